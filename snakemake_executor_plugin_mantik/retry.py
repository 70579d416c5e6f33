"""Raise a job's resources after a failure for want of them, in the `resources:` of a Snakefile.

    from snakemake_executor_plugin_mantik.retry import grows

    rule train:
        retries: 3
        resources:
            mem_mb=grows(4000, on="out_of_memory", at_most=64000),
            runtime=grows(60, on="time_limit"),

Snakemake evaluates resources again before each attempt. The reasons come from the journal, so they
survive a restart, which resets Snakemake's `attempt` to 1.
"""

import inspect
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from .common.errors import JournalError, UserError
from .common.state_directory import STATE
from .jobs.reasons import Reason, parse_reasons
from .journal import job_name, read_history

__all__ = ["failures", "grows", "last_failure"]

_run_by_mantik = False


def executor_runs() -> None:
    """Record that this process runs jobs with this executor, which knows why attempts failed."""
    global _run_by_mantik  # noqa: PLW0603 - Snakemake offers functions of resources nothing else
    _run_by_mantik = True


def failures(rulename: str, wildcards: Any) -> list[Reason]:
    """Return the reasons why attempts of a job failed since it last succeeded, the latest first.

    Snakemake passes both arguments to a resource function that names `wildcards` first and
    `rulename` among its other parameters.
    """
    try:
        attempts = read_history(STATE, job_name(rulename, dict(wildcards.items())))
    except JournalError:
        return []  # no job was submitted from here yet
    latest = takewhile(lambda record: record.outcome != "succeeded", reversed(attempts))
    return [Reason(record.reason) for record in latest if record.reason]


def last_failure(rulename: str, wildcards: Any) -> Reason | None:
    """Return why the last attempt of a job failed; None if it did not, or there was none."""
    return next(iter(failures(rulename, wildcards)), None)


def grows(
    start: float | Callable[..., Any], *, on: str, factor: float = 2, at_most: float | None = None
) -> Callable[..., Any]:
    """Return a resource function that raises the value after an attempt failed for want of it.

    Other executors report no reasons: with them it raises the value with each attempt.

    Args:
        start: the value for the first attempt: a number, or a function as Snakemake accepts.
        on: reasons (`jobs.reasons.Reason`) after which to raise the value, separated by commas.
        factor: multiplies the value each time.
        at_most: the upper limit.

    Raises:
        UserError: `on` holds an unknown reason, `factor` is not above 1, or `at_most` is not
            positive.
    """
    reasons = parse_reasons(on)
    if factor <= 1 or (at_most is not None and at_most <= 0):
        raise UserError(
            f"factor={factor}, at_most={at_most} can never raise the resource",
            where="mantik's grows()",
            do="Use a factor above 1, and a positive at_most",
        )

    def grown(wildcards: Any, rulename: str, attempt: int, **given: Any) -> Any:
        first = start
        if callable(start):
            given |= {"rulename": rulename, "attempt": attempt}
            takes = inspect.signature(start).parameters
            first = start(wildcards, **{k: v for k, v in given.items() if k in takes})
        if not isinstance(first, int | float):
            return first  # a placeholder of Snakemake: it depends on files not made yet
        times = sum(reason in reasons for reason in failures(rulename, wildcards))
        if attempt > 1 and not _run_by_mantik:
            times = attempt - 1
        value = first * factor**times
        return round(value if at_most is None else min(value, at_most))

    return grown
