"""The reasons why jobs end, as named in schedulers' states, the journal and users' workflows."""

import re
from enum import StrEnum
from typing import Final

from ..common.errors import UserError, one_line


class Reason(StrEnum):
    """Why a job ended.

    Workflows (`mantik_retry_on`, `retry.grows`) and the journal use the values. Only the executor
    can know SET_UP and OUTPUTS; a site can report the others.

    - TIME_LIMIT, OUT_OF_MEMORY: the job needed more than it had requested.
    - NODE_FAILURE, PREEMPTED: no fault of the job; it may succeed if submitted again.
    - CANCELLED: a user cancelled it, or the site ended it without another reason.
    - ALLOCATION_ENDED: the allocation of a pool ended in which it ran; it is submitted again.
    - LAUNCH_FAILURE: the site accepted the job and could not start it.
    - EXIT_CODE: the command failed by itself.
    - REJECTED: the executor, the site or its scheduler refuses to run the job.
    - SET_UP: the job failed before its command (modules, environment, inputs).
    - OUTPUTS: the command succeeded, but outputs are missing on this machine; or the job's marker
      could not be read.
    - UNKNOWN: no reason is known.
    - SUCCESS: the job did not fail.
    """

    TIME_LIMIT = "time_limit"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    ALLOCATION_ENDED = "allocation_ended"
    LAUNCH_FAILURE = "launch_failure"
    EXIT_CODE = "exit_code"
    REJECTED = "rejected"
    SET_UP = "set_up"
    OUTPUTS = "outputs"
    UNKNOWN = "unknown"
    SUCCESS = "success"

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")


FAILURES: Final = tuple(reason for reason in Reason if reason is not Reason.SUCCESS)
"""All reasons except SUCCESS."""


def parse_reasons(names: str) -> frozenset[Reason]:
    """Read reasons for failures from a text, separated by commas or blanks.

    Raises:
        UserError: the text is empty or holds something else.
    """
    given = names.replace(",", " ").split()
    known = {reason.value: reason for reason in FAILURES}
    wrong = [name for name in given if name not in known]
    if wrong or not given:
        named = ", ".join(map(repr, wrong))
        raise UserError(
            f"no job fails for the reason {named}" if wrong else "no reason for a failure is given",
            do=f"Use one or more of {', '.join(known)}, separated by commas",
        )
    return frozenset(known[name] for name in given)


def find_cause(message: str, name: str, site: str) -> str:
    """Return the first line of why a job failed, without the job's name, its site and its id there.

    These differ, or are known, where several jobs have failed for the same cause.
    """
    first = one_line(message.removeprefix("failed: ").strip().partition("\n")[0])
    words = first.removeprefix(f"{name} at {site}: ")
    return re.sub(rf" \({re.escape(site)}, [^()]*\)", "", words)


def same_cause(cause: str, name: str) -> str:
    """Return what is equal for the cause of another job of the rule: without the job's own paths.

    Those are the words that look like paths and hold a value of a wildcard.
    """
    values = [value for _, _, value in (w.partition("=") for w in name.split(", ")) if value]
    return " ".join(
        "…" if re.search(r"\w[./]\w", word) and any(value in word for value in values) else word
        for word in cause.split()
    )
