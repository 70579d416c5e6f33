"""The start of a run: all that can be wrong is told here, before anything is sent."""

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.config.exclude import Exclude
from snakemake_executor_plugin_mantik.config.reading import LoadedConfig, read_all
from snakemake_executor_plugin_mantik.engine.core import OPEN_WAIT_S, Engine
from snakemake_executor_plugin_mantik.engine.messages import duration
from snakemake_executor_plugin_mantik.engine.observe import Several
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobNumber, JobRequest, Outcome
from snakemake_executor_plugin_mantik.errors import (
    ConfigError,
    MantikError,
    Mistake,
    UserError,
    WorkflowNotRunnable,
)
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.mlproject.call import call_of
from snakemake_executor_plugin_mantik.mlproject.project import given_of
from snakemake_executor_plugin_mantik.rules import deployment, groups, resources
from snakemake_executor_plugin_mantik.rules.lacks import Lacks
from snakemake_executor_plugin_mantik.rules.mpi import launcher_mistake
from snakemake_executor_plugin_mantik.rules.options import options_of, unused
from snakemake_executor_plugin_mantik.rules.payload import Context, full
from snakemake_executor_plugin_mantik.rules.refusal import refuse
from snakemake_executor_plugin_mantik.rules.request import request as request_of
from snakemake_executor_plugin_mantik.sites import issuer_of, make_site
from snakemake_executor_plugin_mantik.sites.base import Site, SiteFacts
from snakemake_executor_plugin_mantik.sites.credentials import (
    Credential,
    expires_at,
    find_account,
    require_all,
)
from snakemake_executor_plugin_mantik.staging import sources
from snakemake_executor_plugin_mantik.statelog import StateLog
from snakemake_executor_plugin_mantik.tracking.masking import held_by, masker, secret_values
from snakemake_executor_plugin_mantik.tracking.run import TrackedRun, target
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker

STATE = "mantik"
"""Our own directory below Snakemake's `.snakemake`."""


@dataclass(frozen=True)
class Checked:
    """A workflow in which nothing is wrong, as far as that can be told without a site.

    Attributes:
        context: what the requests of all jobs have in common.
        planners: the sites' planners by name.
        units: the jobs and groups that will run at a site, as far as they are known.
        used: the sites that they will run at.
        settings: what the user said.
        state: our own local directory, which may not be there yet.
        lacks: remembers where there is no Snakemake for full jobs.
    """

    context: Context
    planners: Mapping[str, Planner]
    units: list[Any]
    used: list[str]
    settings: "_Settings"
    state: Path
    lacks: Lacks

    @property
    def workdir(self) -> Path:
        """The workflow's working directory."""
        return self.context.workdir

    @property
    def configs(self) -> Mapping[str, LoadedConfig]:
        """The sites' configs by name."""
        return self.context.sites

    def request(self, job: Any, secrets: Mapping[str, str]) -> JobRequest:
        """What the engine is asked for a job.

        Raises:
            UserError: the job cannot be run.
        """
        refuse([job], self.settings.deployed_here)
        members = groups.members_of(job)
        for member in members:
            resources.retried(member)
            if not self.settings.conda_here:
                deployment.keep_unasked(member)
        forced = any(map(self.settings.forces, members))
        ask = groups.request if job.is_group() else request_of
        return ask(job, self.context, secrets=secrets, forced=forced)


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
        members = groups.members_of(job)
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


@dataclass(frozen=True)
class _Settings:
    deployed_here: tuple[Any, ...]
    conda_here: bool
    tracked: bool
    force_all: bool
    forced: frozenset[str]

    def forces(self, job: Any) -> bool:
        return (
            self.force_all
            or job.rule.name in self.forced
            or any(str(path) in self.forced for path in job.output)
        )


def check(workflow: Any, dag: Any, options: Any, logger: Any) -> Checked:
    """Read the configs and look at all jobs; no site and no credential is needed.

    Args:
        workflow: Snakemake's.
        dag: its jobs.
        options: the executor's settings.
        logger: Snakemake's.

    Raises:
        UserError: with everything that is wrong.
    """
    workdir = Path.cwd()
    asked = options_of(workflow)
    for told in unused(workflow):
        logger.warning(told)
    _check_shared(workflow.storage_settings.shared_fs_usage)
    configs = _configs(options.backend_config, workdir)
    for config in configs.values():
        for warning in config.warnings:
            logger.warning(f"{config.path}: {warning}")
    here = frozenset(workflow.deployment_settings.deployment_method)
    wanted = deployment.methods_of(options.software_deployment)
    context = Context(configs, workdir, wanted, options=asked)
    settings = _Settings(
        tuple(here - wanted),
        DeploymentMethod.CONDA in here,
        options.track != "none",
        bool(workflow.dag_settings.forceall),
        frozenset(map(str, workflow.dag_settings.forcerun)),
    )
    units = groups.units(dag)
    jobs = [job for unit in units for job in groups.members_of(unit)]
    refuse(units, settings.deployed_here)
    _check_environments(jobs, context, products(dag))
    for remark in deployment.remarks(jobs, context, full):
        logger.info(remark)
    _check_projects(jobs, configs)
    state = Path(workflow.persistence.path) / STATE
    environments = {n: Planner(c.config, None, workdir).environment for n, c in configs.items()}
    lacks = Lacks(state, environments)
    lacks.refuse(jobs)
    planners = {
        name: Planner(c.config, find_account(name, os.environ), workdir)
        for name, c in configs.items()
    }
    used = _check_jobs(units, planners)
    return Checked(context, planners, units, used, settings, state, lacks)


def start(workflow: Any, dag: Any, logger: Any) -> Run:
    """Check everything, find the credentials, and open the sites.

    Raises:
        MantikError: with everything that is wrong; nothing has been submitted.
    """
    checked = check(workflow, dag, workflow.executor_settings, logger)
    workdir, configs, planners = checked.workdir, checked.configs, checked.planners
    units, used = checked.units, checked.used
    jobs = [job for unit in units for job in groups.members_of(unit)]
    credentials = _credentials(checked)
    _tell_expiry(jobs, credentials, planners, used, logger)
    journal = Journal(checked.state)
    try:
        for name in used:
            credentials[name].login()
        sites = _sites(configs, credentials, planners, workspace_name(workdir, journal.workflow))
    except BaseException:
        journal.close()
        raise
    tracker = _tracker(configs, credentials, workdir, logger)
    if checked.settings.tracked:
        tracker.start(tracked=_tell_untracked(units, logger))
    states = StateLog(logger.info, workdir)
    engine = Engine(
        sites,
        journal=journal,
        workdir=workdir,
        state=checked.state,
        tell=logger.info,
        observer=Several(states, tracker),
    )
    try:
        engine.open(used, partial(sources_of, checked, products(dag), logger))
        _check_jobs(units, planners, engine)
    except BaseException:
        engine.close(tidy=False)
        tracker.close(0.0)
        raise
    context = replace(checked.context, workspace=engine.workspace)
    checked = replace(checked, context=context)
    return Run(engine, checked, states, tracker, logger.info)


def facts(checked: Checked) -> dict[str, SiteFacts]:
    """What the sites that jobs will run at say of themselves; nothing is sent there.

    Raises:
        MantikError: credentials are missing, or a site cannot be used.
    """
    credentials = _credentials(checked)
    # The name of a workspace that no run has: limits do not depend on it.
    name = workspace_name(checked.workdir, "check")
    sites = _sites(checked.configs, credentials, checked.planners, name)

    async def ask(site: Site) -> SiteFacts:
        try:
            async with asyncio.timeout(OPEN_WAIT_S):
                return await site.open()
        except TimeoutError:
            raise MantikError(
                f"the site has not answered for {OPEN_WAIT_S:.0f} s", where=f"site {site.name}",
                do="Check the URL and the network",
            ) from None  # fmt: skip
        finally:
            await site.close()

    found = {}
    for name in checked.used:
        credentials[name].login()
        found[name] = asyncio.run(ask(sites[name][0]))
    return found


def _credentials(checked: Checked) -> Mapping[str, Credential]:
    return require_all(
        {name: c.config.api for name, c in checked.configs.items()},
        os.environ,
        issuers={name: issuer_of(c, checked.workdir) for name, c in checked.configs.items()},
    )


_SHARED = ("input-output", "persistence", "storage-local-copies")
"""What of `--shared-fs-usage` has to be said for files to be where the executor looks for them."""


def _check_shared(usage: Any) -> None:
    """See to it that Snakemake itself leaves the files of jobs to the executor.

    Raises:
        UserError: it would not: it would fetch no file from a storage, and look for none here.
    """
    named = {item.name.lower().replace("_", "-") for item in usage}
    if lacking := [name for name in _SHARED if name not in named]:
        raise UserError(
            f"--shared-fs-usage leaves out {', '.join(lacking)}; with the mantik executor a site's"
            " file system looks to Snakemake as if it were shared",
            do=f"Leave the option out, or let it say {', '.join(_SHARED)}: this machine fetches"
            " from storages and stores there, and stages the files to and from the sites",
        )


def _tracker(
    configs: Mapping[str, LoadedConfig],
    credentials: Mapping[str, Credential],
    workdir: Path,
    logger: Any,
) -> Tracker:
    secrets = [*secret_values(os.environ), *held_by(credentials.values())]
    for loaded in configs.values():
        secrets += secret_values(loaded.config.environment.variables)
    texts = {n: c.path.read_text(errors="replace") for n, c in configs.items()}
    return Tracker(
        workdir, target(os.environ, workdir), texts, mask=masker(secrets), tell=logger.info
    )


def _tell_untracked(units: list[Any], logger: Any) -> bool:
    """Whether jobs are tracked; entry points in groups are not, and that is told."""
    tracked, grouped = False, set()
    for unit in units:
        members = groups.members_of(unit)
        rules = {job.rule.name for job in members if given_of(job.rule.params) is not None}
        tracked = tracked or bool(rules and len(members) == 1)
        grouped |= rules if len(members) > 1 else set()
    if grouped:
        logger.warning(
            f"Entry points that run as members of a group are no MLflow runs of their own and are"
            f" not tracked: rule {', '.join(sorted(grouped))}. Take them out of the group for that."
        )
    return tracked


def _check_environments(jobs: list[Any], context: Context, products: frozenset[str]) -> None:
    """See to it that the rules' own environments can be had, as far as that shows here.

    Raises:
        WorkflowNotRunnable: with each rule whose cannot.
    """
    found = {
        job.rule.name: mistake
        for job in jobs
        if (mistake := deployment.mistake_of(job, context, products)) is not None
        or (mistake := launcher_mistake(job, context)) is not None
    }
    if found:
        raise WorkflowNotRunnable(
            "not every rule can have its environment (nothing was sent): "
            + "; ".join(f"rule {name} {mistake}" for name, mistake in sorted(found.items())),
            do="Correct these rules",
        )


def _check_projects(jobs: list[Any], configs: Mapping[str, LoadedConfig]) -> None:
    """See to it that the entry points that jobs run get right values and find their project.

    Raises:
        ConfigError: with all mistakes.
    """
    mistakes: dict[Mistake, None] = {}
    exclude = {name: Exclude(loaded.config.exclude) for name, loaded in configs.items()}
    for job in jobs:
        given = given_of(job.rule.params)
        if given is None:
            continue
        try:
            given.check(job.wildcards)
        except ConfigError as error:
            mistakes |= dict.fromkeys(error.mistakes)
        site = resources.site_of(resources.given_resources(job), configs)
        folder = str(given.project.relative_folder())
        if folder != "." and exclude[site].matches(folder, is_dir=True):
            told = f"leaves out {folder}, whose entry points rule {job.rule.name} runs there"
            mistakes[Mistake(str(configs[site].path), "Exclude", told)] = None
    if mistakes:
        raise ConfigError(list(mistakes))


def _sites(
    configs: Mapping[str, LoadedConfig],
    credentials: Mapping[str, Credential],
    planners: Mapping[str, Planner],
    workspace: str,
) -> dict[str, tuple[Site, Planner]]:
    """The sites by name. Names for one workspace, reached as one user, share a client and it."""
    made: dict[object, Site] = {}
    sites: dict[str, tuple[Site, Planner]] = {}
    for name, loaded in configs.items():
        config, credential = loaded.config, credentials[name]
        key = (
            config.api_url, config.firecrest, config.site.workspace, config.site.storage,
            id(credential),
        )  # fmt: skip
        if key not in made:
            made[key] = make_site(
                loaded, credential, workspace, project=planners[name].project,
                account=planners[name].account,
            )  # fmt: skip
        sites[name] = (made[key], planners[name])
    return sites


def _configs(specs: list[str], workdir: Path) -> dict[str, LoadedConfig]:
    if not specs:
        raise ConfigError(
            [Mistake("--mantik-backend-config", "", "no Compute Backend Config was given")],
            do="Write one with 'smk-mantik init' and name it with this option, in a profile, or in"
            " SNAKEMAKE_MANTIK_BACKEND_CONFIG",
        )
    return read_all(specs, workdir)


def workspace_name(workdir: Path, workflow: str) -> str:
    """The name of the workflow's own workspace: readable, and another one for each directory.

    Args:
        workdir: the workflow's directory. A copy of it, journal included, is another workflow.
        workflow: its name in its journal (`Journal.workflow`).
    """
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", workdir.name).strip("-.")[:40] or "workflow"
    identity = f"{workflow}\0{workdir.resolve()}"
    return f"{readable}-{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:8]}"


def _check_jobs(
    jobs: list[Any], planners: Mapping[str, Planner], engine: Engine | None = None
) -> list[str]:
    """The sites that the jobs run at; all mistakes in their resources are told at once.

    With an engine, what they ask is compared with what the opened sites allow, too. What follows
    from files that are still to be made is looked at when the job is sent.
    """
    used: dict[str, None] = {}
    mistakes: dict[str, None] = {}
    for job in jobs:
        where = groups.title_of(job)
        try:
            members = groups.members_of(job)
            for member in members:
                resources.retried(member)
            site, given, threads, later = groups.wanted(job, planners)
            resources.refuse_misspelt(later)
            if site is None:
                continue
            used[site] = None
            where = f"{where} at {site}" if len(planners) > 1 else where
            planners[site].resources(given, threads)
            if engine is not None:
                engine.facts_fit(site, given, threads)
        except UserError as error:
            told = str(error).removeprefix(f"{where}: ")
            mistakes[f"{where}: {told}"] = None
    if mistakes:
        told = "\n  ".join(["nothing was sent: these resources cannot be had:", *mistakes])
        raise UserError(told.removesuffix("."))
    return list(used)


def _tell_expiry(
    jobs: list[Any],
    credentials: Mapping[str, Any],
    planners: Mapping[str, Planner],
    used: list[str],
    logger: Any,
) -> None:
    """Say which tokens will expire before the requested walltimes can be over."""
    for name in used:
        expiry = expires_at(credentials[name])
        if expiry is None:
            continue
        walltimes = [planners[name].config.resources.runtime_s or 0]
        asked = [str(job.resources.get("runtime", "")) for job in jobs]
        walltimes += [int(minutes) * 60 for minutes in asked if minutes.isdigit()]
        left = expiry - time.time()
        if left < max(walltimes):
            logger.warning(
                f"The token for site {name} expires in {duration(max(0.0, left))}, but jobs ask for"
                f" up to {duration(max(walltimes))}. Give one that lasts, or a refresh token; jobs"
                " that run then are taken up by the next run."
            )


def products(dag: Any) -> frozenset[str]:
    """What rules read and make: it goes up as inputs, where it is needed, and not as sources."""
    paths: set[str] = set()
    for job in dag.jobs:
        benchmark = [job.benchmark] if job.benchmark is not None else []
        paths.update(map(os.path.relpath, [*job.input, *job.output, *job.log, *benchmark]))
    return frozenset(paths)


def sources_of(checked: Checked, made: frozenset[str], logger: Any, name: str) -> sources.Sources:
    """What goes up to a site besides the jobs' inputs and what is `made` of them.

    Raises:
        UserError: that is too much.
    """
    config = checked.configs[name].config
    chosen = sources.select(
        checked.workdir, Exclude(config.exclude), products=made,
        file_limit=config.site.source_file_limit_bytes, total_limit=config.site.sources_limit_bytes,
    )  # fmt: skip
    left_out = f", {len(chosen.too_large)} too large ones do not" if chosen.too_large else ""
    logger.info(
        f"Sources: {len(chosen.paths)} files ({max(1, chosen.size >> 10)} KiB) of the working"
        f" directory go to {name}{left_out} (Exclude in the backend config leaves out more)."
    )
    return chosen
