"""Find the mistakes in a workflow that can be found without a site and a credential."""

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..common.errors import ConfigError, MistakeCollector, UserError, shorten_list
from ..config.environment_keys import EnvironmentConfig
from ..config.model import BackendConfig, PoolConfig
from ..config.reading import LoadedConfig, NoConfig, read_configs, split_spec
from ..engine.core import Engine
from ..engine.plan import Planner
from ..engine.request import JobRequest
from ..rules import deployment, preflight, resources
from ..rules.context import (
    RuleContext,
    capped_options,
    check_deployed_here,
    ignored_options,
    read_context,
)
from ..rules.kinds import groups
from ..rules.kinds.groups import Unit
from ..rules.paths import storage
from ..rules.preflight import MissingSnakemake
from ..rules.resources import ANY_SITE, SITE_RESOURCE, WAIT_RESOURCE
from ..rules.site_job import SiteJob, parse_methods
from ..rules.units import list_units, tracking_request
from ..sites.base import Entry
from ..sites.credentials import find_account
from ..storage.catalog import UNKNOWN, Catalog, catalog_of
from ..storage.paths import find_dataset
from .job_files import refuse_future_inputs

STATE_DIRECTORY = "mantik"
"""The executor's directory below Snakemake's `.snakemake`."""

_HOUR_S = 3600

_Value = TypeVar("_Value")


class _Any(dict[str, _Value]):
    """Has the same value under every name: what an invalid config has is unknown."""

    def __init__(self, value: _Value) -> None:
        super().__init__()
        self._value = value

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> _Value:
        return self._value


_STAND_IN = BackendConfig.model_validate(
    {
        "UnicoreApiUrl": "https://localhost/rest/core",
        "Resources": {"Queue": "unknown", "Runtime": "24h"},
    }
).model_copy(
    update={
        "environments": _Any(EnvironmentConfig()),
        "pools": _Any(
            PoolConfig.model_validate(
                {"Runtime": "9999d", "CPUsPerNode": 10**6, "GPUsPerNode": 10**6}
            )
        ),
    }
)
"""In place of an invalid config, for checks of the rules."""


@dataclass(frozen=True)
class CheckedWorkflow:
    """A workflow without mistakes, except for `mistakes` and for those that only a site reports.

    Attributes:
        workflow: Snakemake's.
        options: the executor's settings.
        context: what the requests of all jobs have in common.
        planners: the sites' planners by name.
        missing_snakemake: remembers which sites have no Snakemake.
        engine: knows the limits of the sites that it has opened; None before the run.
        units: the jobs and groups that will run at a site, by Snakemake's jobs.
        used: the sites that they will run at, as far as their resources can be evaluated.
        mistakes: by rule, why its command or script cannot be rendered. The caller reports them.
    """

    workflow: Any
    options: Any
    context: RuleContext
    planners: Mapping[str, Planner]
    missing_snakemake: MissingSnakemake
    engine: Engine | None = None
    units: Mapping[Any, Unit] = field(default_factory=dict)
    used: Sequence[str] = ()
    mistakes: Mapping[str, str] = field(default_factory=dict)

    @property
    def workdir(self) -> Path:
        return self.context.workdir

    @property
    def state(self) -> Path:
        """The executor's local directory, which may not exist yet."""
        return Path(self.workflow.persistence.path) / STATE_DIRECTORY

    @property
    def known(self) -> list[Unit]:
        """The units whose resources can be evaluated before the run, at each of their sites."""
        return list(everywhere(self.units.values()))

    def refuse(self, unit: Unit) -> None:
        """Check a job or group that is to be submitted: a checkpoint may have added it."""
        for check in (preflight.OBSTACLES, *preflight.CHECKS):
            check.refuse([unit])
        self._check_resources(unit)

    def check_resources(self, units: Iterable[Unit]) -> list[str]:
        """Check the resources of jobs, and return the sites that the jobs run at.

        Resources that depend on files not made yet are checked when the job is submitted.

        Raises:
            UserError: lists all mistakes in the jobs' resources.
        """
        used: dict[str, None] = {}
        mistakes: dict[str, None] = {}
        for unit in units:
            where = unit.title
            try:
                if (site := unit.asked.site) is not None:
                    used[site] = None
                    where += f" at {site}" if len(self.planners) > 1 else ""
                self._check_resources(unit)
            except UserError as error:
                what = str(error).removeprefix(f"{where}: ")
                mistakes[f"{where}: {what}"] = None
        preflight.refuse_lines("invalid resource requests", mistakes)
        return list(used)

    def _check_resources(self, unit: Unit) -> None:
        """Check the resources of a job, and that its site allows them, as far as that is known.

        Raises:
            UserError: one is wrong, or the site does not.
        """
        for member in unit.members:
            resources.job_retry_reasons(member.job)
            tracking_request(member.job)
        asked, going_on = unit.asked, unit.continuation
        unit.members[0].patience_s  # noqa: B018 - reading checks it
        resources.refuse_misspelt(asked.later)
        if asked.site is None:
            return
        planner, environment = self.planners[asked.site], unit.environment
        requested = planner.resources(asked.resources, asked.threads)
        planner.pool_suits(requested, environment, going_on)
        if going_on is not None:
            going_on.check_walltime(requested.runtime_s)
        if self.engine is not None:
            self.engine.facts_fit(asked.site, asked.resources, asked.threads, environment)

    def able(self, unit: Unit) -> Unit:
        """Return a job that may run anywhere without sites that cannot run it, unless none can."""
        able = []
        if self.planners and unit.is_known and unit.anywhere:
            with suppress(UserError):  # reported when all jobs are checked
                for at in (unit, *unit.elsewhere()):
                    with suppress(UserError):
                        self._check_resources(at)
                        able.append(at.site)
        return unit.at(tuple(able)) if able else unit

    def request(self, unit: Unit, secrets: Mapping[str, str]) -> JobRequest:
        """Make the engine's request for a job or group."""
        settings = self.workflow.dag_settings
        named = set(map(str, settings.forcerun))
        forced = settings.forceall or any(
            not named.isdisjoint([member.rule.name, *map(str, member.job.output)])
            for member in unit.members
        )
        request = groups.make_group_request(unit, secrets=secrets, forced=forced)
        request = replace(request, patience_s=unit.members[0].patience_s)
        if not request.datasets:
            return request
        # A job that ran with earlier datasets is another one.
        found = look_up_datasets((m.job for m in unit.members), catalog_of(self.workdir))
        # Local times of a site may be shifted by an hour: see `engine.compare.same_time`.
        versions = [None if e is UNKNOWN else (e.size, int(e.modified % _HOUR_S)) for e in found]
        return replace(request, parameters=f"{request.parameters} {versions}")


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
    if options.presubmit < 0:
        raise UserError(
            f"--mantik-presubmit has to be 0 or more, found {options.presubmit}",
            do="Give the most jobs that may wait at a site for their inputs; 0 for none",
        )
    wanted = parse_methods(options.software_deployment)
    for warning in ignored_options(workflow):
        logger.warning(warning)
    configs = _read_or_stand_in(found, options.backend_config, workdir)
    context = read_context(workflow, configs, workdir, wanted)
    planners = {
        name: Planner(c.config, find_account(name, os.environ), workdir)
        for name, c in configs.items()
    }
    missing = MissingSnakemake(
        Path(workflow.persistence.path) / STATE_DIRECTORY,
        {name: planner.environment() for name, planner in planners.items()},
    )
    context = replace(context, lacks=missing.said)
    checked = CheckedWorkflow(workflow, options, context, planners, missing)
    units = {job: checked.able(Unit(job, context)) for job in list_units(dag)}
    here = [Unit(job, context) for job in dag.needrun_jobs() if job.is_local]
    obstacles = preflight.OBSTACLES.refuse([*units.values(), *here], found)
    known = list(everywhere(units.values()))
    members = [member for unit in known for member in unit.members]
    _check_as_a_whole(found, workflow, dag)
    if not configs:
        found.refuse()
    for config in configs.values():
        for warning in config.warnings:
            logger.warning(warning)
    if foreign := preflight.foreign_resources(members):
        logger.warning(foreign)
    for warning in capped_options(workflow, (member.job for member in members)):
        logger.warning(warning)
    used: list[str] = []
    with found.check():
        used = checked.check_resources(known)
    # The checks below need a job that has a site and can run there.
    sound = [unit for unit in known if _is_sound(unit, obstacles)]
    asked = [*here, *sound]
    reported = obstacles.union(*(check.refuse(asked, found) for check in preflight.CHECKS))
    mistakes = preflight.find_mistakes(asked, workflow.linemaps)
    if found:
        with found.check():
            preflight.refuse_mistakes({r: m for r, m in mistakes.items() if r not in reported})
        found.refuse()
    members = [member for unit in sound for member in unit.members]
    for warning in (
        *deployment.deployment_warnings(members),
        *_without_outputs(members),
        *_without_next_site(members),
        *_beyond_max_jobs(workflow.global_resources["_nodes"].value, sound, planners, used),
    ):
        logger.warning(warning)
    return replace(checked, units=units, used=used, mistakes=mistakes)


def everywhere(units: Iterable[Unit]) -> Iterator[Unit]:
    """Yield the units whose resources can be evaluated now, at each of their sites."""
    for unit in units:
        if unit.is_known:
            yield unit
            with suppress(UserError):  # reported when the first one is checked
                yield from unit.elsewhere()


def _read_or_stand_in(
    found: MistakeCollector, specs: list[str], workdir: Path
) -> Mapping[str, LoadedConfig]:
    """Read the configs; others stand in for invalid ones, so that further mistakes are found."""
    with found.check():
        if not specs:
            raise NoConfig
        return read_configs(specs, workdir)
    configs: dict[str, LoadedConfig] = {}
    for spec in specs:
        try:
            configs |= read_configs([spec], workdir)
        except ConfigError:
            name, file = split_spec(spec)
            configs[name] = LoadedConfig(name, workdir / file, _STAND_IN)
    return configs


def _check_as_a_whole(found: MistakeCollector, workflow: Any, dag: Any) -> None:
    """Collect mistakes of the workflow that no single job has."""
    with found.check():
        storage.check_shared(workflow.storage_settings)
    with found.check():
        check_deployed_here(workflow, dag)
    with found.check():
        refuse_future_inputs(dag.needrun_jobs())


def _is_sound(unit: Unit, obstacles: Collection[str]) -> bool:
    """Return whether all members of a unit have a known site, and no obstacle to run there."""
    try:
        for member in unit.members:
            member.environment  # noqa: B018 - reading finds it, at the site
    except UserError:
        return False
    return not any(member.rule.name in obstacles for member in unit.members)


def _without_outputs(members: Iterable[SiteJob]) -> Iterator[str]:
    """Warn of jobs at a site that leave no file here. The results of entry points go to MLflow."""
    found = {
        member.rule.name
        for member in members
        if not (member.job.output or member.job.is_norun or member.entry_point)
    }
    if found:
        yield (
            "These rules have no output, so what their jobs make stays at the site:"
            f" {', '.join(sorted(found))}. Name it as output."
        )


def _without_next_site(members: Iterable[SiteJob]) -> Iterator[str]:
    """Warn of jobs that may wait at a site for a limited time, and name no other to go to."""
    if found := {member.rule.name for member in members if member.waits_in_vain}:
        yield (
            f"{WAIT_RESOURCE} has no effect on these rules, which name no second site to go to:"
            f" {', '.join(shorten_list(sorted(found)))}. Name several sites in {SITE_RESOURCE}, or"
            f' "{ANY_SITE}".'
        )


def _beyond_max_jobs(
    wanted: int | None, units: Iterable[Unit], planners: Mapping[str, Planner], used: Iterable[str]
) -> Iterator[str]:
    """Warn if `--jobs`, `wanted`, allows more jobs than the sites' `MaxJobs` together do.

    There is no number of jobs with `smk-mantik plan` and `--jobs unlimited`. `MaxJobs` does not
    count jobs of pools.
    """
    limits = {name: planners[name].config.site.max_jobs for name in used}
    if not limits or wanted is None or wanted == sys.maxsize:
        return
    requests = [unit.asked for unit in units]
    own = sum(
        planners[one.site].resources(one.resources, one.threads).pool is None
        for one in requests
        if one.site is not None
    )
    if min(wanted, own) > sum(limits.values()):
        named = ", ".join(f"{number} at {name}" for name, number in limits.items())
        yield (
            f"--jobs {wanted}: at most {named} are submitted at once (Site: MaxJobs in the backend"
            " config); the others wait on this machine. Raise MaxJobs if the site allows more."
        )


def look_up_datasets(jobs: Iterable[Any], catalog: Catalog) -> list[Entry]:
    """Look up the datasets that jobs read, as far as their sites' APIs can list them.

    Raises:
        UserError: lists those that do not exist.
    """
    missing: dict[str, None] = {}
    all_found: list[Entry] = []
    for job in jobs:
        for dataset in filter(None, map(find_dataset, job.input)):
            found = catalog.look(dataset)
            if found is None:
                missing[f"{dataset} (rule {job.rule.name})"] = None
            else:
                all_found.append(found)
    if missing:
        raise UserError(
            f"datasets do not exist (nothing submitted): {', '.join(missing)}",
            do="Correct the paths, or put the files there",
        )
    return all_found
