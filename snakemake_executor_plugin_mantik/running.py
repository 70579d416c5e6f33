"""A run that has started: what the executor asks of the engine, and what it learns of the ends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.checks import Checked
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.request import JobNumber, JobRequest, Outcome
from snakemake_executor_plugin_mantik.mlproject.call import call_of
from snakemake_executor_plugin_mantik.rules.payload import full
from snakemake_executor_plugin_mantik.rules.units import members_of
from snakemake_executor_plugin_mantik.statelog import StateLog
from snakemake_executor_plugin_mantik.tracking.run import TrackedRun
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker


@dataclass
class Run:
    """A run that has started.

    Attributes:
        engine: runs the jobs.
        checked: what was found out before it started.
        states: tells the log of each job's states.
        tracker: makes MLflow runs of MLproject jobs.
        tell: writes a line to the user's log.
        requested: numbers of the jobs that the engine was asked for.
        measured: the jobs with a benchmark file that is written here, and where their measurements
            will be, by number of the request that they belong to.
    """

    engine: Engine
    checked: Checked
    states: StateLog
    tracker: Tracker
    tell: Callable[[str], None]
    requested: set[JobNumber] = field(default_factory=set)
    measured: dict[JobNumber, list[tuple[Any, Path]]] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)
    _full: dict[JobNumber, str] = field(default_factory=dict)

    def request(self, job: Any, secrets: Mapping[str, str]) -> JobRequest:
        """What the engine is asked for a job.

        Raises:
            UserError: the job cannot be run.
        """
        request = self.checked.request(job, secrets)
        members = members_of(job)
        self.requested.add(request.number)
        for member in members:
            if directive := full(member):
                self._full[request.number] = request.site
                self._tell_full(member.rule.name, directive, request.site)
        self.measured[request.number] = [
            (member, Path(path).absolute())
            for member, path in zip(members, request.measured, strict=True)
            if path
        ]
        return replace(request, subject=self._subject(members))

    def _subject(self, members: list[Any]) -> TrackedRun | None:
        """What is tracked of a job; nothing of several that run as one (`_tell_untracked`)."""
        if not self.checked.settings.tracked or len(members) > 1:
            return None
        [job] = members
        call = call_of(job.params)
        wildcards = {key: str(value) for key, value in job.wildcards_dict.items()}
        return TrackedRun(call, wildcards) if call is not None else None

    def _tell_full(self, rule: str, directive: str, site: str) -> None:
        if (rule, site) not in self._told:
            self._told.add((rule, site))
            self.tell(f"Rule {rule} has {directive} and runs in a Snakemake of its own at {site}.")

    def ended(self, outcome: Outcome) -> None:
        """Learn from how a full job ended whether its site has a Snakemake."""
        site = self._full.pop(outcome.number, None)
        if site is not None and outcome.succeeded:
            self.checked.lacks.forget(site)
        elif site is not None and outcome.log is not None:
            self.checked.lacks.note(site, outcome.log)

    def close(self, *, tidy: bool) -> None:
        """End the engine, then what is still to be told of its jobs; quickly unless `tidy`."""
        self.engine.close(tidy=tidy)
        self.tracker.close(*(() if tidy else (0.0,)))
