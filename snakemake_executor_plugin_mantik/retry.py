"""Resources that follow from why a job failed before: for the `resources:` of a Snakefile.

    from snakemake_executor_plugin_mantik.retry import grows

    rule train:
        retries: 3
        resources:
            mem_mb=grows(4000, on="out_of_memory", at_most=64000),
            runtime=grows(60, on="time_limit"),

Snakemake evaluates resources again before each try. What is told here comes from the journal, so it
holds as well after a restart, where Snakemake's `attempt` begins at 1 again.
"""

import inspect
from collections.abc import Callable
from typing import Any

from snakemake_executor_plugin_mantik.common.errors import JournalError, UserError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.jobs.reasons import Reason, parse_reasons
from snakemake_executor_plugin_mantik.journal import TryRecord, job_name, read_history

__all__ = ["failures", "grows", "last_failure"]

_run_by_mantik = False


def executor_runs() -> None:
    """Note that this process runs jobs with this executor, which knows why tries failed."""
    global _run_by_mantik  # noqa: PLW0603 - Snakemake offers functions of resources nothing else
    _run_by_mantik = True


def failures(rulename: str, wildcards: Any) -> list[Reason]:
    """Why the tries of a job failed since it last succeeded, the latest first.

    A function of a rule's resources gets both arguments from Snakemake: it names `wildcards` first
    and `rulename` among the others.
    """
    try:
        tries = read_history(STATE, job_name(rulename, dict(wildcards.items())))
    except JournalError:
        return []  # nothing was sent from here yet
    return _since_success(tries)


def last_failure(rulename: str, wildcards: Any) -> Reason | None:
    """Why the last try of a job failed; None if it did not, or there was none."""
    return next(iter(failures(rulename, wildcards)), None)


def grows(
    start: float | Callable[..., Any], *, on: str, factor: float = 2, at_most: float | None = None
) -> Callable[..., Any]:
    """A resource that is raised after each try that failed for want of it, and else is not.

    With another executor, which tells no reasons, it is raised with each attempt.

    Args:
        start: what the first try asks for; a number, or a function as Snakemake takes them.
        on: reasons (`jobs.reasons.Reason`) after which more may help, with commas between them.
        factor: by which it is raised each time.
        at_most: the most that is asked for.

    Raises:
        UserError: `on` names what is no reason, or a number makes no sense.
    """
    reasons = parse_reasons(on)
    if factor <= 1 or (at_most is not None and at_most <= 0):
        raise UserError(
            f"factor={factor}, at_most={at_most} let nothing grow",
            where="mantik's grows()",
            do="Give a factor above 1, and at_most as the most that may be asked for",
        )

    def grown(wildcards: Any, rulename: str, attempt: int, **given: Any) -> Any:
        first = start
        if callable(start):
            given |= {"rulename": rulename, "attempt": attempt}
            takes = inspect.signature(start).parameters
            first = start(wildcards, **{k: v for k, v in given.items() if k in takes})
        if not isinstance(first, int | float):
            return first  # what Snakemake puts where a value follows from files to be made yet
        if attempt > 1 and not _run_by_mantik:
            times = attempt - 1
        else:
            times = sum(reason in reasons for reason in failures(rulename, wildcards))
        value = first * factor**times
        return round(value if at_most is None else min(value, at_most))

    return grown


def _since_success(tries: list[TryRecord]) -> list[Reason]:
    found: list[Reason] = []
    for record in reversed(tries):
        if record.outcome == "succeeded":
            break
        if record.reason:
            found.append(Reason(record.reason))
    return found
