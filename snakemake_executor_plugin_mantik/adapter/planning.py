"""Forecast what the jobs of a workflow would submit and upload, from Snakemake's graph of jobs."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snakemake.exceptions import RuleException
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.environment import job_environment
from snakemake_executor_plugin_mantik.engine.forecast import (
    LOCAL,
    Forecast,
    Forecaster,
    JobPlan,
    Total,
)
from snakemake_executor_plugin_mantik.engine.plan import find_misfits, unchecked_resources
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.jobs.spec import Environment
from snakemake_executor_plugin_mantik.rules import Job, preflight
from snakemake_executor_plugin_mantik.rules.kinds.groups import Unit
from snakemake_executor_plugin_mantik.rules.make_request import workflow_variables
from snakemake_executor_plugin_mantik.rules.paths.job_paths import JobPaths
from snakemake_executor_plugin_mantik.rules.units import list_members, unit_name
from snakemake_executor_plugin_mantik.sites.base import QueueLimits
from snakemake_executor_plugin_mantik.storage.paths import storable_path

from . import checks, startup
from .checks import CheckedWorkflow
from .dryrun import NO_LIMIT
from .look_ahead import forecast_ahead


def plan_workflow(
    workflow: Any, options: Any, logger: Any, *, connect: bool, list_sources: bool = False
) -> JobPlan:
    """Forecast the jobs that a workflow would submit and the files that it would upload.

    Snakemake's `workflow` has a complete DAG, and its directory is the current one. With `connect`,
    read the limits of queues from the sites. With `list_sources`, list the files of the working
    directory that would be uploaded, and those that would not.

    Raises:
        MantikError: a run would not start because of a mistake, or a site cannot be used. If the
            command of a job at a site cannot be rendered, its forecast shows that instead.
    """
    dag = workflow.dag
    checked = checks.check_workflow(workflow, dag, options, logger)
    at_sites = {member.rule.name for unit in checked.known for member in unit.members}
    preflight.refuse_mistakes(
        {rule: what for rule, what in checked.mistakes.items() if rule not in at_sites}
    )
    limits = startup.collect_facts(checked) if connect else {}
    units = _units(dag)
    places = JobPaths(checked.workdir, lambda: "")  # used for paths within a workspace only
    made = {
        place: LOCAL if unit.is_local else checked.units[unit].asked.site or LOCAL
        for unit in units
        for path in _outputs(unit)
        if (place := places.place(path)) is not None
    }
    jobs: list[Forecast] = []
    with Forecaster(checked.workdir, checked.state, checked.planners, made) as forecaster:
        secrets = dict.fromkeys(workflow_variables(workflow, os.environ), "")  # names alone
        look = _Look(checked, secrets, workflow.linemaps, forecaster, places, frozenset(made))
        jobs = [look.at(checked.units[unit]) for unit in units if not unit.is_local]
        products = checks.find_products(dag)
        totals: dict[str, Total] = {}
        for job in jobs:
            if job.site is not None:
                totals.setdefault(job.site, Total()).add(job.resources, job.cores, job.segments)
        chosen = {site: startup.collect_sources(checked, products, logger, site) for site in totals}
        sources = {site: forecaster.sources(site, found.paths) for site, found in chosen.items()}
        for site, total in totals.items():
            total.uploads = forecaster.all(site)
    warnings: dict[str, None] = {}
    for at, job in enumerate(jobs):
        if job.site in limits and job.resources is not None:
            facts = limits[job.site]
            found = list(find_misfits(job.resources, facts))
            misfits = [f"{m.what}. {m.do}." for m in found if m.certain]
            jobs[at] = replace(job, mistake=" ".join([job.mistake, *misfits]).strip())
            warnings |= {f"{job.site}: {m.what}. {m.do}.": None for m in found if not m.certain}
            queue = facts.queues.get(next(iter(job.resources.queues), ""), QueueLimits())
            left = totals[job.site].unchecked
            left += [name for name in unchecked_resources(job.resources, queue) if name not in left]
    for warning in warnings:
        logger.warning(warning)
    alone, stops = forecast_ahead(checked, units)
    return JobPlan(
        jobs,
        totals,
        sources,
        source_files={site: _sizes(checked.workdir, c.paths) for site, c in chosen.items()}
        if list_sources
        else {},
        left_out={site: dict(c.left_out) for site, c in chosen.items()} if list_sources else {},
        here=sum(bool(unit.is_local and _runs(unit)) for unit in units),
        more=any(job.is_checkpoint for job in dag.needrun_jobs()),
        alone=alone,
        stops=stops,
    )


def _sizes(workdir: Path, paths: Iterable[str]) -> dict[str, int]:
    found = {}
    for path in paths:
        with suppress(OSError):  # it was removed meanwhile
            found[path] = (workdir / path).stat().st_size
    return found


def _units(dag: Any) -> list[Job]:
    """Return the jobs and groups that would run, in an order that respects dependencies."""
    needed = set(dag.needrun_jobs())
    ordered = (job for level in dag.toposorted(needed) for job in sorted(level, key=_key))
    return list(dict.fromkeys(dag.get_job_group(job) or job for job in ordered))


def _key(job: Job) -> tuple[str, list[tuple[str, str]]]:
    return job.rule.name, sorted((k, str(v)) for k, v in job.wildcards_dict.items())


def _written(names: Collection[str]) -> Iterator[str]:
    """Yield the names of resources, and of a size's three names only the one with `_mb`."""
    for name in sorted(names):
        size = name.removesuffix("_mib")
        if f"{size}_mb" not in names:
            yield name


def _runs(unit: Job) -> bool:
    return any(not member.rule.norun for member in list_members(unit))


def _outputs(unit: Job) -> Iterator[object]:
    for member in list_members(unit):
        for path in member.output:
            stored = storable_path(path)
            yield path if stored is None else display_path(stored)


@dataclass(frozen=True)
class _Look:
    """Forecasts single jobs.

    Attributes:
        secrets: names of the variables of this process that jobs get.
        linemaps: Snakemake's, for its messages.
        places: maps paths to those in a workspace.
        made: paths in the workspace that jobs of the run make.
    """

    checked: CheckedWorkflow
    secrets: Mapping[str, str]
    linemaps: Any
    forecaster: Forecaster
    places: JobPaths
    made: frozenset[str]

    def at(self, unit: Unit) -> Forecast:
        """Forecast what would be submitted for a job or group."""
        asked, job = unit.asked, unit.job
        result = Forecast(
            unit_name(job), ", ".join(sorted(job.rules)), asked.site,
            outputs=tuple(map(str, _outputs(job))), later=tuple(_written(asked.later)),
        )  # fmt: skip
        if asked.site is None:
            return result
        if asked.threads >= NO_LIMIT:
            return replace(result, mistake="its threads follow from workflow.cores: add --cores")
        planner, name = self.checked.planners[asked.site], unit.environment
        own = None if job.is_group() else unit.members[0].own  # each member may have its own
        requested = planner.resources(asked.resources, asked.threads)
        going_on = unit.continuation
        result = replace(
            result,
            resources=requested,
            cores=planner.cores(requested),
            segments=going_on.most if going_on is not None else 1,
            environment=str(own)
            if own
            else _words(job_environment(planner.config, self.checked.workdir, name=name), name),
        )
        rules = {member.rule.name for member in unit.members}
        mistaken = {rule: self.checked.mistakes[rule] for rule in rules & {*self.checked.mistakes}}
        if mistaken:
            return replace(result, mistake="\n".join(mistaken.values()))
        return self._looked_into(unit, result)

    def _looked_into(self, unit: Unit, result: Forecast) -> Forecast:
        """Add the command and files of a job to its forecast, as far as they are known."""
        try:
            request = self.checked.request(unit, self.secrets)
            needed = self.forecaster.needed(request)
        except (UserError, RuleException, WorkflowError) as error:
            if any(self.places.place(path) in self.made for path in unit.job.input):
                return result  # the value may be known once the input exists
            return replace(result, mistake=preflight.describe_error(error, self.linemaps))
        return replace(
            result,
            job=request.name,
            rule=request.rule,
            full=request.full,
            command=request.command,
            inputs=needed,
            sent=self.forecaster.sent(request),
        )


def _words(environment: Environment, name: str) -> str:
    parts = [name] if name else []
    parts += [f"modules {' '.join(environment.modules)}"] if environment.modules else []
    parts += [option.removeprefix("--") for option in environment.slurm_options]
    if environment.apptainer:
        parts.append(f"Apptainer {environment.apptainer.image}")
    if environment.container:
        parts.append(f"{environment.container.plugin} {environment.container.source}")
    if environment.python:
        parts.append(f"Python {environment.python}")
    return ", ".join(parts)
