"""Why jobs end: the words that schedulers' states, the journal and users' workflows share."""

from enum import StrEnum
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError


class Reason(StrEnum):
    """Why a job ended.

    The values are what a workflow writes (`mantik_retry_on`, `retry.grows`) and what the journal
    keeps. The first seven are a site's own; of the others a try's owner knows.

    - TIME_LIMIT, OUT_OF_MEMORY: it needed more than it had asked for.
    - NODE_FAILURE, PREEMPTED: nobody's fault; the same job may succeed.
    - CANCELLED: somebody, or something that gave no other reason, told it to end.
    - LAUNCH_FAILURE: the site took it and could not start it.
    - EXIT_CODE: its command failed by itself.
    - REJECTED: the executor, the site or its scheduler refuses to run it.
    - SET_UP: it failed before its command (modules, environment, inputs).
    - OUTPUTS: its command succeeded, but what it made is not all here.
    - UNKNOWN: nobody says.
    - SUCCESS: it did not fail.
    """

    TIME_LIMIT = "time_limit"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    LAUNCH_FAILURE = "launch_failure"
    EXIT_CODE = "exit_code"
    REJECTED = "rejected"
    SET_UP = "set_up"
    OUTPUTS = "outputs"
    UNKNOWN = "unknown"
    SUCCESS = "success"

    @property
    def words(self) -> str:
        """As a message has it: `out of memory`."""
        return self.value.replace("_", " ")


FAILURES: Final = tuple(reason for reason in Reason if reason is not Reason.SUCCESS)
"""Why a job can have failed."""


def parse_reasons(names: str) -> frozenset[Reason]:
    """The reasons that a text names, with commas or blanks between them.

    Raises:
        UserError: one is no reason for a failure, or there is none.
    """
    given = names.replace(",", " ").split()
    known = {reason.value: reason for reason in FAILURES}
    wrong = [name for name in given if name not in known]
    if wrong or not given:
        found = f"{', '.join(map(repr, wrong))} is no reason" if wrong else "no reason is named"
        raise UserError(
            f"{found} for a failed try",
            do=f"Name some of {', '.join(known)}, with commas between them",
        )
    return frozenset(known[name] for name in given)
