"""The state of a run that has started: its requests to the engine, and how its jobs ended."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from snakemake_executor_plugin_mantik.common.files import read_end
from snakemake_executor_plugin_mantik.config.exclude import Exclude, Include
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.request import (
    JobNumber,
    JobRequest,
    NamedPaths,
    Outcome,
)
from snakemake_executor_plugin_mantik.rules.make_request import why_full_job
from snakemake_executor_plugin_mantik.rules.paths.job_paths import command_text
from snakemake_executor_plugin_mantik.rules.tracked import is_tracked, make_tracked_run
from snakemake_executor_plugin_mantik.rules.units import list_members
from snakemake_executor_plugin_mantik.staging.sources import UNSENT, missed_files, why_left_out
from snakemake_executor_plugin_mantik.storage.catalog import catalog_of
from snakemake_executor_plugin_mantik.storage.paths import uses_provider
from snakemake_executor_plugin_mantik.tracking.run import TrackedRun
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker

from .checks import CheckedWorkflow, find_products
from .job_log import JobLog
from .look_ahead import LookAhead
from .workflow_metadata import describe_pipeline

Ending = Literal["finished", "failed", "killed", "detached"]
"""How Snakemake ended; detached: its jobs continue, and the next Snakemake takes them up."""
_LOG_END_BYTES = 64 << 10
"""Bytes at the end of a failed job's output in which files are looked for that it missed."""


@dataclass
class ActiveRun:
    """A run that has started.

    Attributes:
        tracker: makes MLflow runs of jobs and of the workflow.
        notify: writes a line to the user's log.
        requested: numbers of the jobs that were requested from the engine.
        ahead: finds jobs to submit before Snakemake requests them.
        measured: by number of a request, its jobs whose benchmark file is written on this machine,
            and the paths of their measurements.
    """

    engine: Engine
    checked: CheckedWorkflow
    states: JobLog
    tracker: Tracker
    dag: Any
    notify: Callable[[str], None]
    ahead: LookAhead
    requested: set[JobNumber] = field(default_factory=set)
    measured: dict[JobNumber, list[tuple[Any, Path]]] = field(default_factory=dict)
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _full: dict[JobNumber, str] = field(default_factory=dict)
    _jobs: int = -1
    _named: NamedPaths = field(default_factory=NamedPaths)

    def request(self, job: Any, secrets: Mapping[str, str]) -> JobRequest:
        """Make the engine's request for a job, and record it.

        Raises:
            UserError: the job cannot be run.
        """
        request = self.checked.request(job, secrets)
        members = list_members(job)
        self.requested.add(request.number)
        for member in members:
            if directive := why_full_job(member):
                if not request.environment:  # a record is about `Environment`
                    self._full[request.number] = request.site
                self._report_full_job(member.rule.name, directive, request.site)
        self.measured[request.number] = [
            (member, Path(path).absolute())
            for member, path in zip(members, request.measured, strict=True)
            if path
        ]
        return replace(request, subject=self._subject(members), named=self.named)

    def propose(self, job: Any, secrets: Mapping[str, str]) -> None:
        """Let the engine submit the jobs that can wait at the site for a requested one."""
        for following, request in self.ahead.behind(job, secrets):
            subject = self._subject([following])
            self.engine.propose(replace(request, subject=subject, named=self.named))

    @property
    def named(self) -> NamedPaths:
        """Return the paths that the workflow's jobs name, also for earlier requests."""
        if self._jobs != len(self.dag):  # a checkpoint has added jobs
            self._jobs, self._named.paths = len(self.dag), find_products(self.dag)
        return self._named

    def _subject(self, members: list[Any]) -> TrackedRun | None:
        if not is_tracked(members, self.checked.settings.tracked):
            return None
        return make_tracked_run(members)

    def _report_full_job(self, rule: str, directive: str, site: str) -> None:
        if (rule, site) not in self._reported:
            self._reported.add((rule, site))
            self.notify(
                f"Rule {rule} has {directive} and runs in a Snakemake of its own at {site}."
            )

    def ended(self, outcome: Outcome) -> None:
        """Remember from the end of a full job whether its site has a Snakemake."""
        site = self._full.pop(outcome.number, None)
        if site is not None and outcome.succeeded:
            self.checked.missing_snakemake.forget(site)
        elif site is not None and outcome.log is not None:
            self.checked.missing_snakemake.note(site, outcome.log)

    def missed(self, job: Any, outcome: Outcome) -> str:
        """Return advice about files that a failed job names, that are here and not at its site."""
        config = self.checked.configs.get(outcome.site)
        if config is None or not outcome.try_id:
            return ""
        members = list_members(job)
        own = ([*m.input, *m.output, *m.log, *filter(None, [m.benchmark])] for m in members)
        paths = list(map(command_text, chain.from_iterable(own)))
        why = partial(
            why_left_out, workdir=self.checked.workdir, exclude=Exclude(config.config.exclude),
            products=self.named.paths, include=Include(config.config.site.include),
        )  # fmt: skip
        end = read_end(outcome.log, _LOG_END_BYTES) if outcome.log is not None else b""
        found = missed_files(
            f"{end.decode(errors='replace')}\n{outcome.message}",
            self.checked.workdir,
            self.checked.context.workspace(outcome.site),
            why,
            known={*paths, *map(os.path.relpath, paths)},
        )
        if not found:
            return ""
        if any(UNSENT in each for each in found):
            rules = " and ".join(sorted({member.rule.name for member in members}))
            found.append(f"Declare what it needs as input of rule {rules}.")
        return " ".join(found) + "\n"

    def close(self, how: Ending, *, tidy: bool) -> None:
        """Close the engine, then the tracker. Skip work that a later run can do unless `tidy`."""
        if uses_provider(self.dag.workflow):
            catalog_of(self.checked.workdir).attach(None)
        self.engine.close(tidy=tidy, ending=how, pipeline=describe_pipeline(self.dag))
        self.tracker.close(*(() if tidy else (0.0,)))
