"""Find the mistakes in a workflow that can be found without a site and a credential."""

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snakemake.io import is_flagged
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.common.errors import (
    ConfigError,
    Mistake,
    MistakeCollector,
    UserError,
    shorten_list,
)
from snakemake_executor_plugin_mantik.config.environment_keys import EnvironmentConfig
from snakemake_executor_plugin_mantik.config.exclude import Exclude
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.config.reading import (
    LoadedConfig,
    read_configs,
    split_spec,
)
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.segments import CONTINUE, Continuation
from snakemake_executor_plugin_mantik.mlproject.project import find_bound_entry_point
from snakemake_executor_plugin_mantik.rules import deployment, preflight, resources, tracked
from snakemake_executor_plugin_mantik.rules.context import (
    RuleContext,
    capped_options,
    check_conda_here,
    ignored_options,
    read_options,
    refuse_rules,
)
from snakemake_executor_plugin_mantik.rules.kinds import groups
from snakemake_executor_plugin_mantik.rules.make_request import make_request as request_of
from snakemake_executor_plugin_mantik.rules.make_request import refuse_secret_inputs, why_full_job
from snakemake_executor_plugin_mantik.rules.paths import storage
from snakemake_executor_plugin_mantik.rules.preflight import (
    MissingSnakemake,
    find_obstacles,
    refuse_jobs,
    refuse_obstacles,
)
from snakemake_executor_plugin_mantik.rules.units import list_members, list_units, member_title
from snakemake_executor_plugin_mantik.sites.credentials import (
    find_account,
)
from snakemake_executor_plugin_mantik.storage.access import Finding
from snakemake_executor_plugin_mantik.storage.catalog import Catalog, catalog_of
from snakemake_executor_plugin_mantik.storage.paths import (
    find_dataset,
    storable_path,
    uses_provider,
    workspace_path,
)
from snakemake_executor_plugin_mantik.tracking.run import sent_variables

from .job_files import refuse_future_inputs

STATE_DIRECTORY = "mantik"
"""The executor's directory below Snakemake's `.snakemake`."""

_HOUR_S = 3600


class _AnyEnvironment(dict[str, EnvironmentConfig]):
    """Has an environment of every name: those of an invalid config are unknown."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> EnvironmentConfig:
        return EnvironmentConfig()


_STAND_IN = BackendConfig.model_validate(
    {
        "UnicoreApiUrl": "https://localhost/rest/core",
        "Resources": {"Queue": "unknown", "Runtime": "24h"},
    }
).model_copy(update={"environments": _AnyEnvironment()})
"""In place of an invalid config, for checks of the rules."""


@dataclass(frozen=True)
class CheckedWorkflow:
    """A workflow without mistakes, except for `mistakes` and for those that only a site reports.

    Attributes:
        context: what the requests of all jobs have in common.
        planners: the sites' planners by name.
        units: the jobs and groups that will run at a site, without those whose resources cannot be
            evaluated yet.
        used: the sites that `units` will run at.
        settings: the user's settings.
        state: the executor's local directory, which may not exist yet.
        missing_snakemake: remembers which sites have no Snakemake for full jobs.
        mistakes: by rule, why its command or script cannot be rendered. The caller reports them.
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
        return self.context.workdir

    @property
    def configs(self) -> Mapping[str, LoadedConfig]:
        return self.context.sites

    def request(self, job: Any, secrets: Mapping[str, str]) -> JobRequest:
        """Make the engine's request for a job or group.

        Raises:
            UserError: the job cannot be run.
        """
        refuse_jobs([job], self.settings.deployed_here)
        members = list_members(job)
        _check_datasets(members, self.context)
        refuse_secret_inputs(members, self.context)
        for member in members:
            resources.job_retry_reasons(member)
            tracked.tracking_request(member)
            if not self.settings.conda_here:
                deployment.drop_unrequested(member)
        # Its resources may depend on files that have been made meanwhile.
        find_continuation(job, self.planners)
        forced = any(map(self.settings.forces, members))
        ask = groups.make_group_request if job.is_group() else request_of
        request = ask(job, self.context, secrets=secrets, forced=forced)
        if not request.datasets:
            return request
        # A job that ran with earlier datasets is another one.
        found = [f.entry for f in look_up_datasets(members, catalog_of(self.workdir))]
        # Local times of a site may be shifted by an hour: see `engine.compare.same_time`.
        versions = [None if e is None else (e.size, int(e.modified % _HOUR_S)) for e in found]
        return replace(request, parameters=f"{request.parameters} {versions}")


@dataclass(frozen=True)
class _Settings:
    deployed_here: tuple[Any, ...]
    conda_here: bool
    tracked: tracked.Which
    direct: Mapping[str, str]
    force_all: bool
    forced: frozenset[str]

    def forces(self, job: Any) -> bool:
        return (
            self.force_all
            or job.rule.name in self.forced
            or any(str(path) in self.forced for path in job.output)
        )


def check_workflow(workflow: Any, dag: Any, options: Any, logger: Any) -> CheckedWorkflow:
    """Read the configs and check all jobs, without a site or a credential.

    `workflow`, `dag` and `logger` are Snakemake's, `options` are the executor's settings.

    Raises:
        UserError: something is wrong with the options, the configs or the workflow: all mistakes
            that can be found although there are others. If commands that cannot be rendered are
            the only ones, they are in the result's `mistakes` instead.
    """
    workdir = Path.cwd()
    found = MistakeCollector()
    if options.ahead < 0:
        raise UserError(
            f"--mantik-ahead has to be 0 or more, found {options.ahead}",
            do="Give the most jobs that may wait at a site for their inputs; 0 for none",
        )
    run_options = read_options(workflow)
    for warning in ignored_options(workflow):
        logger.warning(warning)
    here = frozenset(workflow.deployment_settings.deployment_method)
    wanted = deployment.parse_methods(options.software_deployment)
    settings = _read_settings(workflow, options, here - wanted)
    units = list_units(dag)
    here_jobs = [job for job in dag.needrun_jobs() if job.is_local]
    obstacles = find_obstacles([*units, *here_jobs], settings.deployed_here)
    configs = _read_or_stand_in(found, options.backend_config, workdir)
    with found.check():
        refuse_obstacles(obstacles)
    units = [unit for unit in units if all(map(resources.are_resources_known, list_members(unit)))]
    jobs = [job for unit in units for job in list_members(unit)]
    _check_without_sites(found, workflow, dag, jobs)
    if not configs:
        found.refuse()
    for config in configs.values():
        for warning in config.warnings:
            logger.warning(warning)
    if foreign := resources.foreign_resources(jobs, workflow.global_resources):
        logger.warning(foreign)
    for warning in capped_options(workflow, jobs):
        logger.warning(warning)
    state = Path(workflow.persistence.path) / STATE_DIRECTORY
    environments = {n: Planner(c.config, None, workdir).environment() for n, c in configs.items()}
    missing_snakemake = MissingSnakemake(state, environments)
    planners = {
        name: Planner(c.config, find_account(name, os.environ), workdir)
        for name, c in configs.items()
    }
    used: list[str] = []
    with found.check():
        used = check_jobs(units, planners)
    context = RuleContext(configs, workdir, wanted, options=run_options)
    # The checks below need a job that has a site and can run there.
    units = [unit for unit in units if _is_sound(unit, configs, obstacles)]
    jobs = [job for unit in units for job in list_members(unit)]
    reported = {*obstacles, *_check_at_sites(found, dag, jobs, context)}
    with found.check():
        missing_snakemake.refuse(jobs)
    mistakes = preflight.find_mistakes(dag, units, context, workflow.linemaps)
    if found:
        with found.check():
            preflight.refuse_mistakes({r: m for r, m in mistakes.items() if r not in reported})
        found.refuse()
    for remark in deployment.deployment_warnings(jobs, context, why_full_job):
        logger.info(remark)
    if without := _rules_without_outputs(units):
        logger.warning(
            f"These rules have no output, so what their jobs make stays at the site: {without}."
            " Name it as output."
        )
    if (limited := _beyond_max_jobs(workflow, units, used, configs)) is not None:
        logger.warning(limited)
    return CheckedWorkflow(
        context, planners, units, used, settings, state, missing_snakemake, mistakes
    )


def _read_settings(workflow: Any, options: Any, deployed_here: Collection[Any]) -> _Settings:
    """Read the user's settings; `deployed_here` are the methods to deploy on this machine alone."""
    return _Settings(
        tuple(deployed_here),
        DeploymentMethod.CONDA in workflow.deployment_settings.deployment_method,
        options.track,
        sent_variables(os.environ) if options.track_direct and options.track != "none" else {},
        bool(workflow.dag_settings.forceall),
        frozenset(map(str, workflow.dag_settings.forcerun)),
    )


def _read_or_stand_in(
    found: MistakeCollector, specs: list[str], workdir: Path
) -> Mapping[str, LoadedConfig]:
    """Read the configs; others stand in for invalid ones, so that further mistakes are found."""
    with found.check():
        return _configs(specs, workdir)
    configs: dict[str, LoadedConfig] = {}
    for spec in specs:
        try:
            configs |= read_configs([spec], workdir)
        except ConfigError:
            name, file = split_spec(spec)
            configs[name] = LoadedConfig(name, workdir / file, _STAND_IN)
    return configs


def _check_without_sites(found: MistakeCollector, workflow: Any, dag: Any, jobs: list[Any]) -> None:
    """Collect mistakes that have nothing to do with any site."""
    with found.check():
        storage.check_shared(workflow.storage_settings)
    with found.check():
        check_conda_here(workflow, dag)
    if uses_provider(workflow):
        with found.check():
            _check_names(dag.jobs)
    with found.check():
        resources.refuse_slips(jobs, workflow.global_resources)
    with found.check():
        refuse_future_inputs(dag.needrun_jobs())


def _check_at_sites(
    found: MistakeCollector, dag: Any, jobs: list[Any], context: RuleContext
) -> Iterable[str]:
    """Collect mistakes of jobs that have a site and no obstacle to run there.

    Returns:
        The rules whose environments have mistakes.
    """
    with found.check():
        _check_datasets(jobs, context)
    mistakes = _environment_mistakes(dag, jobs, context)
    with found.check():
        refuse_rules(
            mistakes, "the environments of some rules are not available", do="Correct these rules"
        )
    with found.check():
        refuse_secret_inputs(jobs, context)
    with found.check():
        _check_projects(jobs, context.sites)
    return mistakes


def _is_sound(unit: Any, sites: Mapping[str, LoadedConfig], obstacles: Mapping[str, str]) -> bool:
    """Return whether all members of a unit have a known site, and no obstacle to run there."""
    try:
        for member in list_members(unit):
            given, _ = resources.split_undetermined(resources.given_resources(member))
            site = resources.choose_site(given, sites)
            resources.choose_environment(given, sites[site].config)
    except UserError:
        return False
    return not any(member.rule.name in obstacles for member in list_members(unit))


def _rules_without_outputs(units: Iterable[Any]) -> str:
    """Return the names of rules whose jobs run at a site and leave no file here; may be empty.

    The results of entry points go to MLflow.
    """
    members = (member for unit in units for member in list_members(unit))
    found = {
        member.rule.name
        for member in members
        if not (member.output or member.is_norun or find_bound_entry_point(member.rule.params))
    }
    return ", ".join(sorted(found))


def _beyond_max_jobs(
    workflow: Any, units: list[Any], used: list[str], configs: Mapping[str, LoadedConfig]
) -> str | None:
    """Return a remark if `--jobs` allows more jobs than the sites' `MaxJobs` together do.

    None without a number of jobs, which `smk-mantik plan` and `--jobs unlimited` stand for.
    """
    wanted = workflow.global_resources["_nodes"].value
    limits = {name: configs[name].config.site.max_jobs for name in used}
    most = sum(limits.values())
    if not used or wanted in (None, sys.maxsize) or min(wanted, len(units)) <= most:
        return None
    named = ", ".join(f"{number} at {name}" for name, number in limits.items())
    return (
        f"--jobs {wanted}: at most {named} are submitted at once (Site: MaxJobs in the backend"
        " config); the others wait here. Raise MaxJobs if the site allows more."
    )


def _check_names(jobs: Iterable[Any]) -> None:
    """Check that no file is named both with and without `storage.mantik`.

    Snakemake would take it for two files.

    Raises:
        UserError: one is.
    """
    named: dict[str, None] = {}
    plain: set[str] = set()
    for job in jobs:
        for path in [*job.input, *job.output]:
            if (stored := storable_path(path)) is not None:
                named[stored] = None
            elif not path.is_storage and not is_flagged(path, "local"):
                plain.add(workspace_path(str(path)))
    if both := [path for path in named if path in plain]:
        raise UserError(
            f"a file is named with and without storage.mantik: {', '.join(both)}",
            do="Name it with storage.mantik in all rules, or in none",
        )


def _check_datasets(jobs: list[Any], context: RuleContext) -> None:
    """Check that jobs read datasets of their own sites only.

    Raises:
        UserError: a job reads another one, or names an unknown site.
    """
    found = {
        job.rule.name: mistake
        for job in jobs
        if (mistake := storage.dataset_mistake(job, context)) is not None
    }
    refuse_rules(
        found,
        "datasets are not where they are read",
        do="Name the site of the rule (resources: mantik_site) in storage.mantik, or the dataset's"
        " site in the rule",
    )


def look_up_datasets(jobs: Iterable[Any], catalog: Catalog) -> list[Finding]:
    """Look up the datasets that jobs read, as far as their sites' APIs can list them.

    Raises:
        UserError: lists those that do not exist.
    """
    missing: dict[str, None] = {}
    all_found = []
    for job in jobs:
        for dataset in filter(None, map(find_dataset, job.input)):
            found = catalog.look(dataset)
            all_found.append(found)
            if found.known and found.entry is None:
                missing[f"{dataset} (rule {job.rule.name})"] = None
    if missing:
        raise UserError(
            f"datasets do not exist (nothing submitted): {', '.join(missing)}",
            do="Correct the paths, or put the files there",
        )
    return all_found


def _environment_mistakes(dag: Any, jobs: list[Any], context: RuleContext) -> dict[str, str]:
    """Check the rules' own environments and MPI launchers, as far as this machine can.

    Returns:
        By rule, what is wrong.
    """
    products = find_products(dag)
    return {
        job.rule.name: mistake
        for job in dag.needrun_jobs()
        if job.is_local and (mistake := deployment.conda_file_mistake(job, products))
    } | {
        job.rule.name: mistake
        for job in jobs
        if (mistake := deployment.deployment_mistake(job, context, products)) is not None
        or (mistake := deployment.launcher_mistake(job, context)) is not None
    }


def _check_projects(jobs: list[Any], configs: Mapping[str, LoadedConfig]) -> None:
    """Check that the entry points that jobs run get valid values and find their project.

    Raises:
        ConfigError: lists all mistakes.
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
            what = f"leaves out {folder}, whose entry points rule {job.rule.name} runs there"
            mistakes[Mistake(str(configs[site].path), "Exclude", what)] = None
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
    """Check the resources of all jobs, and return the sites that the jobs run at.

    With an engine, compare the resources with the limits of the opened sites, too. Resources that
    depend on files not made yet are checked when the job is submitted.

    Raises:
        UserError: lists all mistakes in the jobs' resources.
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
            site, given, threads, later = groups.unit_request(job, planners)
            going_on = find_continuation(job, planners)
            resources.refuse_misspelt(later)
            if site is None:
                continue
            used[site] = None
            where = f"{where} at {site}" if len(planners) > 1 else where
            requested = planners[site].resources(given, threads)
            environment = resources.choose_environment(given, planners[site].config)
            if going_on is not None:
                going_on.check_walltime(requested.runtime_s)
            if engine is not None:
                engine.facts_fit(site, given, threads, environment)
        except UserError as error:
            what = str(error).removeprefix(f"{where}: ")
            mistakes[f"{where}: {what}"] = None
    if mistakes:
        message = "\n  ".join(
            ["nothing submitted: invalid resource requests:", *shorten_list(mistakes)]
        )
        raise UserError(message.removesuffix("."))
    return list(used)


def find_continuation(unit: Any, planners: Mapping[str, Planner]) -> Continuation | None:
    """Return how a job goes on past its walltime, if it may; `planners` are those of all sites.

    Raises:
        UserError: its resources for that are invalid, or it is of a kind that cannot.
    """
    for member in list_members(unit):
        site = member.resources.get(resources.SITE_RESOURCE)
        planner = next(iter(planners.values())) if site is None else planners.get(site)
        default = (planner.config.resources.segments or 0) if planner is not None else 0
        updated = [str(path) for path in member.output if is_flagged(path, "update")]
        found = resources.job_continuation(member, updated, default)
        if found is None:
            continue
        if member.resources.get(CONTINUE) is None and (unit.is_group() or why_full_job(member)):
            continue  # the site's default is for those that can
        if unit.is_group():
            raise UserError(
                f"rule {member.rule.name} has mantik_continue, but a job in a group cannot go on",
                do="Take it out of its group",
            )
        if why := why_full_job(member):
            raise UserError(
                f"the resource mantik_continue is not supported for a rule that has {why}",
                do="Use shell:, or a script: that does not import Snakemake",
            )
        return found
    return None


def find_products(dag: Any) -> frozenset[str]:
    """Return the paths that jobs read and make, logs and benchmark files among them.

    They are not uploaded as sources: each job uploads its own inputs.
    """
    paths: set[str] = set()
    for job in dag.jobs:
        benchmark = [job.benchmark] if job.benchmark is not None else []
        for path in [*job.input, *job.output, *job.log, *benchmark]:
            paths.add(storable_path(path) or os.path.relpath(path))
    return frozenset(paths)
