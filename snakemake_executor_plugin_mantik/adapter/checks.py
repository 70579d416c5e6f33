"""What is wrong with a workflow, as far as that can be told without a site and a credential."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.common.errors import (
    ConfigError,
    Mistake,
    UserError,
    WorkflowNotRunnable,
)
from snakemake_executor_plugin_mantik.config.exclude import Exclude
from snakemake_executor_plugin_mantik.config.reading import LoadedConfig, read_configs
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.mlproject.project import find_bound_entry_point
from snakemake_executor_plugin_mantik.rules import preflight, resources, tracked
from snakemake_executor_plugin_mantik.rules.context import RuleContext
from snakemake_executor_plugin_mantik.rules.kinds import group_resources, groups
from snakemake_executor_plugin_mantik.rules.kinds.missing_snakemake import MissingSnakemake
from snakemake_executor_plugin_mantik.rules.options import (
    capped_options,
    check_conda_here,
    ignored_options,
    read_options,
)
from snakemake_executor_plugin_mantik.rules.paths import storage
from snakemake_executor_plugin_mantik.rules.payload import why_full_job
from snakemake_executor_plugin_mantik.rules.preflight import refuse_jobs
from snakemake_executor_plugin_mantik.rules.request import make_request as request_of
from snakemake_executor_plugin_mantik.rules.units import list_members, list_units, member_title
from snakemake_executor_plugin_mantik.rules.wrapping import deployment
from snakemake_executor_plugin_mantik.rules.wrapping.mpi import launcher_mistake
from snakemake_executor_plugin_mantik.sites.credentials import (
    find_account,
)
from snakemake_executor_plugin_mantik.tracking.controller import direct

STATE_DIRECTORY = "mantik"
"""Our own directory below Snakemake's `.snakemake`."""


@dataclass(frozen=True)
class CheckedWorkflow:
    """A workflow in which nothing else is wrong, as far as that can be told without a site.

    Attributes:
        context: what the requests of all jobs have in common.
        planners: the sites' planners by name.
        units: the jobs and groups that will run at a site, as far as they are known.
        used: the sites that they will run at.
        settings: what the user said.
        state: our own local directory, which may not be there yet.
        missing_snakemake: remembers where there is no Snakemake for full jobs.
        mistakes: why what some rules run cannot be made, by rule: for the caller to tell.
    """

    context: RuleContext
    planners: Mapping[str, Planner]
    units: list[Any]
    used: list[str]
    settings: "_Settings"
    state: Path
    missing_snakemake: MissingSnakemake
    mistakes: Mapping[str, str]

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
        refuse_jobs([job], self.settings.deployed_here)
        members = list_members(job)
        for member in members:
            resources.job_retry_reasons(member)
            tracked.tracking_request(member)
            if not self.settings.conda_here:
                deployment.drop_unrequested(member)
        forced = any(map(self.settings.forces, members))
        ask = groups.make_group_request if job.is_group() else request_of
        return ask(job, self.context, secrets=secrets, forced=forced)


@dataclass(frozen=True)
class _Settings:
    deployed_here: tuple[Any, ...]
    conda_here: bool
    tracked: tracked.Which
    direct: Mapping[str, str]
    track_wait_s: float
    force_all: bool
    forced: frozenset[str]

    def forces(self, job: Any) -> bool:
        return (
            self.force_all
            or job.rule.name in self.forced
            or any(str(path) in self.forced for path in job.output)
        )


def check_workflow(workflow: Any, dag: Any, options: Any, logger: Any) -> CheckedWorkflow:
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
    asked = read_options(workflow)
    for told in ignored_options(workflow):
        logger.warning(told)
    storage.check_shared(workflow.storage_settings.shared_fs_usage)
    configs = _configs(options.backend_config, workdir)
    for config in configs.values():
        for warning in config.warnings:
            logger.warning(f"{config.path}: {warning}")
    here = frozenset(workflow.deployment_settings.deployment_method)
    wanted = deployment.parse_methods(options.software_deployment)
    context = RuleContext(configs, workdir, wanted, options=asked)
    settings = _Settings(
        tuple(here - wanted),
        DeploymentMethod.CONDA in here,
        options.track,
        direct.sent_variables(os.environ)
        if options.track_direct and options.track != "none"
        else {},
        options.track_wait,
        bool(workflow.dag_settings.forceall),
        frozenset(map(str, workflow.dag_settings.forcerun)),
    )
    units = list_units(dag)
    refuse_jobs(units, settings.deployed_here)
    check_conda_here(workflow, dag)
    units = [unit for unit in units if unit.is_group() or resources.are_resources_known(unit)]
    jobs = [job for unit in units for job in list_members(unit)]
    _check_environments(jobs, context, find_products(dag))
    for told in capped_options(workflow, jobs):
        logger.warning(told)
    for told in resources.resource_warnings(jobs, workflow.global_resources):
        logger.warning(told)
    for remark in deployment.deployment_warnings(jobs, context, why_full_job):
        logger.info(remark)
    _check_projects(jobs, configs)
    state = Path(workflow.persistence.path) / STATE_DIRECTORY
    environments = {n: Planner(c.config, None, workdir).environment for n, c in configs.items()}
    missing_snakemake = MissingSnakemake(state, environments)
    missing_snakemake.refuse(jobs)
    planners = {
        name: Planner(c.config, find_account(name, os.environ), workdir)
        for name, c in configs.items()
    }
    used = check_jobs(units, planners)
    mistakes = preflight.find_mistakes(dag, units, context, workflow.linemaps)
    return CheckedWorkflow(
        context, planners, units, used, settings, state, missing_snakemake, mistakes
    )


def _check_environments(jobs: list[Any], context: RuleContext, products: frozenset[str]) -> None:
    """See to it that the rules' own environments can be had, as far as that shows here.

    Raises:
        WorkflowNotRunnable: with each rule whose cannot.
    """
    found = {
        job.rule.name: mistake
        for job in jobs
        if (mistake := deployment.deployment_mistake(job, context, products)) is not None
        or (mistake := launcher_mistake(job, context)) is not None
    }
    if found:
        raise WorkflowNotRunnable(
            "not every rule can have its environment (nothing submitted): "
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
        given = find_bound_entry_point(job.rule.params)
        if given is None:
            continue
        try:
            given.check(job.wildcards)
        except ConfigError as error:
            mistakes |= dict.fromkeys(error.mistakes)
        site = resources.choose_site(resources.given_resources(job), configs)
        folder = str(given.project.relative_folder())
        if folder != "." and exclude[site].matches(folder, is_dir=True):
            told = f"leaves out {folder}, whose entry points rule {job.rule.name} runs there"
            mistakes[Mistake(str(configs[site].path), "Exclude", told)] = None
    if mistakes:
        raise ConfigError(list(mistakes))


def _configs(specs: list[str], workdir: Path) -> dict[str, LoadedConfig]:
    if not specs:
        raise ConfigError(
            [Mistake("--mantik-backend-config", "", "no Compute Backend Config was given")],
            do="Write one with 'smk-mantik init' and name it with this option, in a profile, or in"
            " SNAKEMAKE_MANTIK_BACKEND_CONFIG",
        )
    return read_configs(specs, workdir)


def check_jobs(
    jobs: list[Any], planners: Mapping[str, Planner], engine: Engine | None = None
) -> list[str]:
    """The sites that the jobs run at; all mistakes in their resources are told at once.

    With an engine, what they ask is compared with what the opened sites allow, too. What follows
    from files that are still to be made is looked at when the job is sent.
    """
    used: dict[str, None] = {}
    mistakes: dict[str, None] = {}
    for job in jobs:
        where = member_title(job)
        try:
            members = list_members(job)
            for member in members:
                resources.job_retry_reasons(member)
                tracked.tracking_request(member)
            site, given, threads, later = group_resources.unit_request(job, planners)
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
        told = "\n  ".join(["nothing submitted: invalid resource requests:", *mistakes])
        raise UserError(told.removesuffix("."))
    return list(used)


def find_products(dag: Any) -> frozenset[str]:
    """What rules read and make: it goes up as inputs, where it is needed, and not as sources."""
    paths: set[str] = set()
    for job in dag.jobs:
        benchmark = [job.benchmark] if job.benchmark is not None else []
        paths.update(map(os.path.relpath, [*job.input, *job.output, *job.log, *benchmark]))
    return frozenset(paths)
