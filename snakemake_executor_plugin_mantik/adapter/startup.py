"""Start a run: check the workflow, then set up credentials, sites and the engine.

The started run keeps its requests to the engine, and how its jobs ended.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..common.state_directory import read_end
from ..config.exclude import Exclude, Include
from ..connections.connect import (
    find_secrets,
    find_site_credentials,
    make_sites,
    make_tracker,
    workspace_name,
)
from ..engine.core import Engine
from ..engine.messages import learned_error
from ..engine.observer import Observers
from ..engine.place import OPEN_WAIT_S, answering
from ..engine.request import JobNumber, JobRequest, NamedPaths, Outcome
from ..engine.transfer_meter import TransferMeter
from ..engine.undeclared import list_brought
from ..journal import Journal, read_undeclared
from ..rules import preflight
from ..rules.deployment import drop_unrequested
from ..rules.kinds.groups import Unit, evaluate_anew
from ..rules.paths.job_paths import command_text
from ..rules.units import (
    Products,
    find_products,
    is_tracked,
    job_identity,
    list_members,
    make_tracked_run,
    unit_name,
)
from ..sites.base import Site, SiteFacts
from ..staging.project_files import UNSENT, ProjectFileFilter, ProjectFiles, missed_files
from ..storage.catalog import catalog_of
from ..storage.paths import uses_provider
from ..tracking.run import direct_remark, sent_variables
from ..tracking.tracker import Tracker
from .checks import CheckedWorkflow, check_workflow, everywhere, look_up_datasets
from .job_log import JobLog
from .proposals import Proposals
from .workflow_metadata import describe_pipeline, describe_run, describe_workflow

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
        proposals: finds jobs to submit before Snakemake requests them.
        left: by number of a request, the sites that it is still for, the next one first.
        closed: whether its end has begun: nothing is left to cancel.
        measured: by number of a request, its jobs whose benchmark file is written on this machine,
            and the paths of their measurements.
    """

    engine: Engine
    checked: CheckedWorkflow
    states: JobLog
    tracker: Tracker
    dag: Any
    notify: Callable[[str], None]
    proposals: Proposals
    requested: set[JobNumber] = field(default_factory=set)
    measured: dict[JobNumber, list[tuple[Any, Path]]] = field(default_factory=dict)
    left: dict[JobNumber, tuple[str, ...]] = field(default_factory=dict)
    closed: bool = False
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _nested: dict[JobNumber, str] = field(default_factory=dict)
    _named: NamedPaths = field(default_factory=NamedPaths)

    def request(self, job: Any, secrets: Mapping[str, str]) -> JobRequest:
        """Make the engine's request for a job, and record it."""
        if job.is_group():
            evaluate_anew(job)
        drop_unrequested(job)
        unit = self._unit(job)
        self.checked.refuse(unit)
        request = self.checked.request(unit, secrets)
        self.requested.add(request.number)
        for member in unit.members:
            if member.nested is not None:
                if not request.environment:  # a record is about `Environment`
                    self._nested[request.number] = request.site
                key = member.rule.name, request.site
                if key not in self._reported:
                    self._reported.add(key)
                    self.notify(
                        f"Rule {key[0]} has {member.nested} and runs in a Snakemake of its own at"
                        f" {key[1]}."
                    )
        self.measured[request.number] = [
            (member.job, Path(path).absolute())
            for member, path in zip(unit.members, request.measured, strict=True)
            if path
        ]
        return self._named_of(request, unit)

    def _unit(self, job: Any) -> Unit:
        """Return a job at the one of its sites whose turn it is: where an earlier run left it."""
        unit = Unit(job, self.checked.context)
        if len(unit.sites) == 1:
            return unit
        if job.jobid not in self.left:
            self.left[job.jobid] = self._choose(unit)
        return unit.at(self.left[job.jobid])

    def _choose(self, unit: Unit) -> tuple[str, ...]:
        """Return the sites for a job in order, first the one where an earlier run left it.

        The journal has that from before the job's first request to the site.
        """
        before, tried = self.engine.sites_of_jobs([*map(job_identity, list_members(unit.job))])
        if not unit.anywhere:
            return unit.sites[unit.sites.index(before) if before in unit.sites else 0 :]
        names = self.checked.able(unit).sites
        if before in unit.sites:
            return (before, *(name for name in names if name not in {before, *tried}))
        there = self.engine.sites_of({path for at in unit.members for path in at.storable})
        names = tuple(name for name in names if name in there)[:1] or names
        asked = {name: unit.at((name,)).asked for name in names}
        return tuple(
            self.engine.order_sites({n: (a.resources, a.threads) for n, a in asked.items()})
        )

    def withdrawn(self, job: Any) -> None:
        """Let the next request for a job be one for the next of its sites."""
        before = self._unit(job).members[0]
        self.left[job.jobid] = self.left[job.jobid][1:]
        self.notify(
            f"{unit_name(job)}: withdrawn from {before.site}, where it had not started after"
            f" {humanize_duration(before.patience_s or 0)}; it goes to {self._unit(job).site}."
        )

    def propose(self, job: Any, secrets: Mapping[str, str]) -> None:
        """Let the engine submit the jobs that can wait at the site for a requested one."""
        for following, request in self.proposals.following(job, secrets):
            self.engine.propose(self._named_of(request, following))

    @property
    def named(self) -> NamedPaths:
        """Return the paths that the workflow's jobs name, also for earlier requests."""
        self._named.paths = find_products(self.dag)
        return self._named

    def _named_of(self, request: JobRequest, unit: Unit) -> JobRequest:
        """Return a request with what observers and the engine know of its run."""
        members = [member.job for member in unit.members]
        tracked = is_tracked(members, self.checked.options.track)
        subject = make_tracked_run(members) if tracked else None
        return replace(request, subject=subject, named=self.named)

    def ended(self, outcome: Outcome) -> None:
        """Remember from the end of such a job whether its site has a Snakemake."""
        site = self._nested.pop(outcome.number, None)
        if site is not None and outcome.succeeded:
            self.checked.missing_snakemake.forget(site)
        elif site is not None and outcome.log is not None:
            self.checked.missing_snakemake.note(site, outcome.log)

    def missed(self, job: Any, outcome: Outcome) -> str:
        """Return advice about files that a failed job names, that are here and not at its site."""
        config = self.checked.context.sites.get(outcome.site)
        if config is None or not outcome.attempt_id:
            return ""
        members = list_members(job)
        own = (path for m in members for path in (*m.input, *m.output, *m.log, m.benchmark))
        paths = list(map(command_text, filter(None, own)))
        chosen = ProjectFileFilter(
            self.checked.workdir, Exclude(config.config.exclude),
            Products(self.dag.workflow, self.named.paths), Include(config.config.site.include),
        )  # fmt: skip
        end = read_end(outcome.log, _LOG_END_BYTES) if outcome.log is not None else b""
        found = missed_files(
            f"{end.decode(errors='replace')}\n{outcome.message}",
            self.checked.workdir,
            self.checked.context.workspace(outcome.site),
            chosen.why_left_out,
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
        self.closed = True
        if uses_provider(self.dag.workflow):
            catalog_of(self.checked.workdir).attach(None)
        self.engine.close(tidy=tidy, ending=how, pipeline=describe_pipeline(self.dag))
        self.tracker.close(*(() if tidy else (0.0,)))


def start_run(workflow: Any, dag: Any, logger: Any, meter: TransferMeter) -> ActiveRun:
    """Check the workflow, find the credentials, open the sites, and start the engine.

    `meter` measures the transfers of the run.

    Raises:
        MantikError: something is wrong, and nothing has been submitted.
    """
    checked = check_workflow(workflow, dag, workflow.executor_settings, logger)
    preflight.refuse_mistakes(checked.mistakes)
    workdir, configs, planners = checked.workdir, checked.context.sites, checked.planners
    units, used, options = checked.known, checked.used, checked.options
    credentials = find_site_credentials(checked.context.sites, checked.workdir)
    _report_expiry(checked, credentials, logger)
    shared = any(loaded.config.site.sharing == "group" for loaded in configs.values())
    journal = Journal(checked.state, shared=shared)
    if journal.remark:
        logger.warning(journal.remark)
    try:
        for name in used:
            credentials[name].login()
        sites = make_sites(
            configs, credentials, planners, workspace_name(journal.home, journal.workflow)
        )
    except BaseException:
        journal.close()
        raise
    described = describe_workflow(workflow)
    about = describe_run(described, workdir, find_secrets(configs, credentials))
    direct = options.track_direct and options.track != "none"
    tracker = make_tracker(
        configs, credentials, workdir, journal, logger.info,
        workflow=described, direct=sent_variables(os.environ) if direct else {},
    )  # fmt: skip
    if options.track != "none":
        tracked = any(is_tracked([m.job for m in unit.members], options.track) for unit in units)
        if direct and tracked:
            logger.warning(direct_remark(os.environ))
        tracker.start(tracked=tracked)
    states = JobLog(logger.info, workdir)
    journal.begin_run(about, describe_pipeline(dag))
    engine = Engine(
        sites,
        journal=journal,
        workdir=workdir,
        state=checked.state,
        notify=logger.info,
        observer=Observers(states, tracker),
        configs={name: loaded.path for name, loaded in configs.items()},
        presubmit=options.presubmit,
        most_jobs=workflow.global_resources["_nodes"].value,
        meter=meter,
    )
    try:
        fixed = {unit.asked.site for unit in units if not unit.anywhere}
        engine.open(
            used,
            partial(collect_project_files, checked, find_products(dag), logger),
            {*used} - fixed,
        )
        context = replace(checked.context, workspace=engine.workspace)
        checked = replace(checked, context=context, engine=engine)
        checked.check_resources(everywhere(map(checked.able, checked.units.values())))
        if uses_provider(workflow):
            _refuse_to_forget(engine)
            catalog_of(workdir).try_again()
            look_up_datasets((j for j in dag.needrun_jobs() if not j.is_local), catalog_of(workdir))
        engine.end_unneeded(lambda: {job_identity(j) for j in dag.jobs if not dag.needrun(j)})
    except BaseException:
        engine.close(tidy=False)
        tracker.close(0.0)
        raise
    if uses_provider(workflow):
        catalog_of(workdir).attach(engine)
    checked = replace(checked, units={})  # jobs are looked at again
    proposals = Proposals(workflow, checked, options.presubmit * len(configs))
    return ActiveRun(engine, checked, states, tracker, dag, logger.info, proposals)


def _refuse_to_forget(engine: Engine) -> None:
    """Check that Snakemake knew all remote outputs when it decided what to run."""
    if engine.learned:
        raise learned_error(engine.learned)


def collect_facts(checked: CheckedWorkflow) -> dict[str, SiteFacts]:
    """Read the facts (limits, queues) of the sites that jobs will run at.

    Upload nothing, and leave nothing at the sites.

    Raises:
        MantikError: credentials are missing, a site cannot be used, or it does not answer in time.
    """
    credentials = find_site_credentials(checked.context.sites, checked.workdir)
    # No run has a workspace of this name. Limits do not depend on it.
    name = workspace_name(checked.workdir, "check")
    sites = make_sites(checked.context.sites, credentials, checked.planners, name)

    async def ask(site: Site) -> SiteFacts:
        try:
            async with answering(site.name), asyncio.timeout(OPEN_WAIT_S):
                return await site.open(make=False)
        finally:
            await site.close()

    found = {}
    for name in checked.used:
        credentials[name].login()
        found[name] = asyncio.run(ask(sites[name][0]))
    return found


def _report_expiry(checked: CheckedWorkflow, credentials: Mapping[str, Any], logger: Any) -> None:
    """Warn of tokens that will expire before the longest requested walltime is over."""
    members = [member for unit in checked.known for member in unit.members]
    for name in checked.used:
        expiry = credentials[name].expires_at()
        if expiry is None:
            continue
        walltimes = [checked.context.sites[name].config.resources.runtime_s or 0]
        runtimes = [str(at.given.get("runtime", "")) for at in members if at.site == name]
        walltimes += [int(minutes) * 60 for minutes in runtimes if minutes.isdigit()]
        left = expiry - time.time()
        if left < max(walltimes):
            logger.warning(
                f"The token for site {name} expires in {humanize_duration(max(0.0, left))}, but"
                f" jobs request up to {humanize_duration(max(walltimes))}. Use a token that lasts"
                " longer, or a refresh token. The next run reattaches jobs that still run when the"
                " token expires."
            )


def collect_project_files(
    checked: CheckedWorkflow, made: frozenset[str], logger: Any, name: str
) -> ProjectFiles:
    """Choose the files to upload to the site `name` besides the paths that rules read and make.

    Raises:
        UserError: the files exceed the site's limits.
    """
    config = checked.context.sites[name].config
    brought = list_brought(checked.workdir, read_undeclared(checked.state))
    chosen = ProjectFileFilter(
        checked.workdir, Exclude(config.exclude), Products(checked.workflow, made | brought),
        Include(config.site.include),
    ).select(config.site.project_files_limit_bytes)  # fmt: skip
    if chosen.withheld:
        logger.warning(f"Project files for {name}: {chosen.withheld}.")
    left_out = f", without {len(chosen.too_large)} too large" if chosen.too_large else ""
    logger.info(
        f"Project files for {name}: {humanize_count(len(chosen.paths), 'file')}"
        f" ({humanize_size(chosen.size)}){left_out}, uploaded as far as they are not there yet; add"
        " patterns to Exclude in the backend config to skip some."
    )
    return chosen
