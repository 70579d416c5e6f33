"""Define what a notice says, as values and in words."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import one_line
from snakemake_executor_plugin_mantik.common.humanize import humanize_count, humanize_duration
from snakemake_executor_plugin_mantik.jobs.reasons import Reason

_MOST_LISTED: Final = 20
_MOST_NAMED: Final = 3
"""Most failed jobs in the values and in the words of a notice."""


class RunOutcome(StrEnum):
    """How a run ended.

    DETACHED: Snakemake ended, and the jobs at the sites go on.
    """

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DETACHED = "detached"


@dataclass(frozen=True)
class FailedJob:
    """A job that has failed and is not tried again.

    Attributes:
        name: its rule and wildcards.
        site, site_job: where it ran, and its ids there; empty for a local job.
        reason: None for a local job.
        message: what happened, in one line.
        log: path of its output; may be empty.
    """

    name: str
    rule: str
    site: str = ""
    site_job: str = ""
    reason: Reason | None = None
    message: str = ""
    log: str = ""

    @property
    def words(self) -> str:
        """Its name, and where and why it failed."""
        why = f" ({self.reason.words})" if self.reason is not None else ""
        return f"{self.name}{f' at {self.site}' if self.site else ''}{why}"


@dataclass(frozen=True)
class Notice:
    """What a person is notified of.

    Attributes:
        outcome: how the run ended; None if it goes on after its first failure.
        directory: the workflow's.
        sites: names of the sites of the run.
        total, done, running: numbers of jobs.
        failed: the jobs that have failed so far.
        began: seconds since the epoch.
        seconds: how long the run has lasted.
    """

    outcome: RunOutcome | None
    directory: Path
    sites: Sequence[str]
    total: int
    done: int
    running: int
    failed: Sequence[FailedJob]
    began: float
    seconds: float

    @property
    def title(self) -> str:
        """A few words of ASCII."""
        return "Workflow failed" if self.outcome is None else f"Workflow {self.outcome}"

    @property
    def tag(self) -> str:
        """The name of the emoji that ntfy shows beside it."""
        if self.outcome is RunOutcome.SUCCEEDED:
            return "white_check_mark"
        return "x" if self.outcome in (None, RunOutcome.FAILED) else "warning"

    @property
    def text(self) -> str:
        """One line for people."""
        counts = f"{self.done} of {humanize_count(self.total, 'job')} done"
        if self.outcome is None:
            what = f"{self._failures} failed"
            counts += f", {self.running} still running" if self.running else ""
        else:
            what = f"{_ENDS[self.outcome]} after {humanize_duration(self.seconds)}"
            if self.failed:
                counts += f", {len(self.failed)} failed: {self._failures}"
        return one_line(f"{self.directory.name}: {what}; {counts}.")

    @property
    def _failures(self) -> str:
        names = ", ".join(job.words for job in self.failed[:_MOST_NAMED])
        more = len(self.failed) - _MOST_NAMED
        return f"{names} and {more} more" if more > 0 else names

    def as_json(self) -> dict[str, Any]:
        """Return all of it as a value for JSON; docs/watching.md lists the keys."""
        return {
            "event": "failed" if self.outcome is None else "finished",
            "outcome": self.outcome,
            "text": self.text,
            "directory": str(self.directory),
            "host": platform.node(),
            "sites": list(self.sites),
            "total": self.total,
            "done": self.done,
            "running": self.running,
            "failed": len(self.failed),
            "failed_jobs": [
                {
                    "job": job.name,
                    "rule": job.rule,
                    "site": job.site,
                    "site_job": job.site_job,
                    "reason": job.reason,
                    "message": job.message,
                    "log": job.log,
                }
                for job in self.failed[:_MOST_LISTED]
            ],
            "began": self.began,
            "seconds": self.seconds,
        }


_ENDS: Final = {
    RunOutcome.SUCCEEDED: "succeeded",
    RunOutcome.FAILED: "failed",
    RunOutcome.CANCELLED: "was cancelled",
    RunOutcome.DETACHED: "was left to go on by itself",
}
