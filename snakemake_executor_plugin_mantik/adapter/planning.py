"""Forecast what the jobs of a workflow would submit and upload, from Snakemake's graph of jobs.

For that, run Snakemake up to the point where it would run jobs. Snakemake reads its command line,
profiles, configuration and Snakefile, and determines which jobs would run. Where it would create an
executor, it creates one of ours, which inspects the jobs and ends the run. So nothing can run, not
even local rules, and everything before is as in a real run. This uses `cli.parse_args` and
`cli.args_to_api`, which Snakemake's own `main` calls, and its registry of executors, from which a
dry run takes the executor `dryrun`.
"""

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

from snakemake import cli
from snakemake.exceptions import RuleException
from snakemake_interface_common.exceptions import ApiError, WorkflowError
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from ..common.errors import MantikError, UserError
from ..config.environment import describe_software
from ..config.environment_keys import EnvironmentConfig
from ..engine.forecast import LOCAL, Forecast, Forecaster, JobPlan, Preview, Total, make_preview
from ..engine.plan import choose_queue, unchecked_resources
from ..jobs.paths import display_path
from ..rules import Job, preflight
from ..rules.kinds.groups import Unit
from ..rules.make_request import workflow_variables
from ..rules.paths.job_paths import JobPaths
from ..rules.units import find_products, list_members, unit_name
from ..sites.base import QueueLimits, SiteFacts
from ..storage.paths import storable_path
from . import checks, startup
from .checks import CheckedWorkflow
from .proposals import forecast_presubmitted


def plan_workflow(
    workflow: Any, options: Any, logger: Any, *, connect: bool, list_project_files: bool = False
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
    needed = set(dag.needrun_jobs())
    # In an order that respects dependencies.
    ordered = (job for level in dag.toposorted(needed) for job in sorted(level, key=_key))
    units = list(dict.fromkeys(dag.get_job_group(job) or job for job in ordered))
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
        look = _Look(checked, secrets, forecaster, places, frozenset(made), limits)
        jobs = [look.at(checked.units[unit]) for unit in units if not unit.is_local]
        products = find_products(dag)
        totals: dict[str, Total] = {}
        for job in jobs:
            if job.site is not None:
                totals.setdefault(job.site, Total()).add(job.resources, job.cores, job.segments)
        chosen = {
            site: startup.collect_project_files(checked, products, logger, site) for site in totals
        }
        project_files = {
            site: forecaster.project_files(site, found.paths) for site, found in chosen.items()
        }
        for site, total in totals.items():
            total.uploads = forecaster.all(site)
    warnings: dict[str, None] = {}
    for at, job in enumerate(jobs):
        if job.site in limits and job.resources is not None:
            facts = limits[job.site]
            try:
                found = checked.planners[job.site].fits(job.resources, facts)
                warnings |= {f"{job.site}: {warning}": None for warning in found}
            except UserError as error:
                jobs[at] = replace(job, mistake=f"{job.mistake} {error}".strip())
            queue = facts.queues.get(next(iter(job.resources.queues), ""), QueueLimits())
            left = totals[job.site].unchecked
            left += [name for name in unchecked_resources(job.resources, queue) if name not in left]
    for warning in warnings:
        logger.warning(warning)
    alone, stops = forecast_presubmitted(checked, units)
    listed = chosen if list_project_files else {}
    return JobPlan(
        jobs,
        totals,
        project_files,
        project_file_sizes={site: _sizes(checked.workdir, c.paths) for site, c in listed.items()},
        left_out={site: dict(c.left_out) for site, c in listed.items()},
        here=sum(u.is_local and not all(m.rule.norun for m in list_members(u)) for u in units),
        more=any(job.is_checkpoint for job in dag.needrun_jobs()),
        alone=alone,
        stops=stops,
    )


def preview_job(workflow: Any, options: Any, logger: Any, wanted: str) -> Preview:
    """Return the preview of the job that `wanted` names: by its rule, its name, or an output.

    Of a rule with several jobs it is the first one.

    Raises:
        MantikError: there is none, or it could not be submitted.
    """
    checked = checks.check_workflow(workflow, workflow.dag, options, logger)
    named = {
        (unit_name(job), unit): {unit_name(job), *job.rules, *map(str, _outputs(job))}
        for job, unit in checked.units.items()
    }
    found = [key for key, names in named.items() if wanted in names]
    if not found:
        rules = sorted({rule for job in checked.units for rule in job.rules})
        raise UserError(
            f"no job at a site is named {wanted!r}",
            do=f"Name a rule ({', '.join(rules)}), a job as smk-mantik plan shows it, or an output",
        )
    name, unit = min(found, key=itemgetter(0))
    preflight.refuse_mistakes({r: m for r, m in checked.mistakes.items() if r in unit.job.rules})
    site = unit.asked.site
    if site is None or not all(map(preflight.is_determined, unit.members)):
        what = f"what is submitted for {name} follows from files that are still to be made"
        raise UserError(what, do="Run the jobs that make them")
    try:
        request = checked.request(unit, dict.fromkeys(workflow_variables(workflow, os.environ), ""))
    except (RuleException, WorkflowError) as error:
        raise UserError(preflight.describe_error(error, workflow.linemaps)) from error
    project_files = startup.collect_project_files(
        checked, find_products(workflow.dag), logger, site
    )
    return make_preview(checked.planners[site], request, uploads=project_files.paths)


def _sizes(workdir: Path, paths: Iterable[str]) -> dict[str, int]:
    found = {}
    for path in paths:
        with suppress(OSError):  # it was removed meanwhile
            found[path] = (workdir / path).stat().st_size
    return found


def _key(job: Job) -> tuple[str, list[tuple[str, str]]]:
    return job.rule.name, sorted((k, str(v)) for k, v in job.wildcards_dict.items())


def _written(names: Collection[str]) -> Iterator[str]:
    """Yield the names of resources, and of a size's three names only the one with `_mb`."""
    for name in sorted(names):
        size = name.removesuffix("_mib")
        if f"{size}_mb" not in names:
            yield name


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
        places: maps paths to those in a workspace.
        made: paths in the workspace that jobs of the run make.
        facts: what the sites have reported, if they were asked.
    """

    checked: CheckedWorkflow
    secrets: Mapping[str, str]
    forecaster: Forecaster
    places: JobPaths
    made: frozenset[str]
    facts: Mapping[str, SiteFacts]

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
        if (facts := self.facts.get(asked.site)) is not None:
            requested = choose_queue(requested, facts)
        going_on = unit.continuation
        result = replace(
            result,
            elsewhere=unit.sites[1:],
            anywhere=unit.anywhere,
            stays=unit.anywhere and any(member.storable for member in unit.members),
            resources=requested,
            cores=planner.cores(requested),
            cores_alone=planner.cores(requested, alone=True),
            segments=going_on.most if going_on is not None else 1,
            environment=str(own) if own else _words(planner.config.all_environments[name], name),
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
            return replace(
                result, mistake=preflight.describe_error(error, self.checked.workflow.linemaps)
            )
        return replace(
            result,
            job=request.name,
            rule=request.rule,
            nested=request.nested,
            command=request.command,
            inputs=needed,
            sent=self.forecaster.sent(request),
        )


def _words(environment: EnvironmentConfig, name: str) -> str:
    modules = [f"modules {' '.join(environment.modules)}"] if environment.modules else []
    return ", ".join([*([name] if name else []), *modules, *describe_software(environment)])


def read_settings() -> Any:
    """Return the executor's settings that `snakemake` without arguments would use here.

    Snakemake reads the profile only with a Snakefile, which may be yet to come: any path will do.
    """
    with redirect_stdout(sys.stderr):
        there = cli.resolve_snakefile(None, allow_missing=True) is not None
        _, args = _parsed([] if there else ["--snakefile", "workflow/Snakefile"])
        return ExecutorPluginRegistry().get_plugin(_NAME).get_settings(args)


_T = TypeVar("_T")

_NAME: Final = "mantik"

NO_LIMIT: Final = sys.maxsize
"""Numbers of jobs and of cores if the user sets none. Snakemake's dry run would default to one core
and cap the threads of rules. A run at sites has no such number, and fails where a rule reads it.
"""

_OTHER_WORK: Final = (
    "archive", "cleanup_metadata", "cleanup_shadow", "conda_cleanup_envs",
    "conda_create_envs_only", "container_cleanup_images", "containerize", "d3dag", "dag",
    "delete_all_output", "delete_temp_output", "filegraph", "generate_unit_tests", "lint",
    "list_changes", "list_conda_envs", "list_input_changes", "list_params_changes", "list_rules",
    "list_target_rules", "list_untracked", "print_compilation", "report", "reporter", "rulegraph",
    "summary", "detailed_summary", "touch", "unlock",
)  # fmt: skip
"""Options with which Snakemake does something other than run jobs."""


class _Ended(BaseException):
    """Ends Snakemake before anything runs. Not an `Exception`, so Snakemake does not catch it."""


def dry_run(arguments: Sequence[str], look: Callable[[Any, Any, Any], _T]) -> _T | None:
    """Call `look` on the workflow that `snakemake` would run with `arguments`.

    Args:
        arguments: as for the command `snakemake`.
        look: called once all jobs are known, in the workflow's directory, with the workflow, the
            executor's settings and Snakemake's logger.

    Returns:
        The result of `look`, or None if something is wrong, which Snakemake has reported then.

    Raises:
        UserError: the arguments do not run a workflow with this executor.
        SystemExit: Snakemake does not understand the arguments, and has reported it.
    """
    from snakemake.logging import logger

    def only_trouble(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or verbose

    class Looking:
        """Takes the place of an executor, for which Snakemake accepts a class only."""

        def __init__(self, workflow: Any, logger: Any) -> None:
            try:
                raise _Ended(look(workflow, settings, logger))
            except MantikError as error:
                # For other errors Snakemake would show the lines of code that raised them.
                raise ApiError(str(error)) from None

    verbose = False
    registry = ExecutorPluginRegistry()
    usual = registry.plugins["dryrun"]
    # Output of the Snakefile does not belong to the command's own output.
    with redirect_stdout(sys.stderr):
        parser, args = _parsed(arguments)
        verbose = args.verbose
        settings = registry.get_plugin(_NAME).get_settings(args)
        common = replace(usual.common_settings, non_local_exec=True)
        registry.plugins["dryrun"] = replace(usual, executor=Looking, common_settings=common)
        logger.addFilter(only_trouble)
        try:
            cli.args_to_api(args, parser)
        except _Ended as end:
            return end.args[0]  # type: ignore[no-any-return]
        finally:
            logger.removeFilter(only_trouble)
            registry.plugins["dryrun"] = usual
    return None


def _parsed(arguments: Sequence[str]) -> tuple[Any, Any]:
    try:
        parser, args = cli.parse_args(list(arguments))
    except Exception as error:  # noqa: BLE001 - any error that Snakemake's main would report
        raise UserError(f"Snakemake does not accept these arguments: {error}") from None
    if args.report_after_run:
        args.report = args.reporter = None
        args.report_after_run = False
    for name in _OTHER_WORK:
        if getattr(args, name, None):
            raise UserError(
                f"with --{name.replace('_', '-')} Snakemake runs no jobs", do="Remove the option"
            )
    if args.executor not in (None, _NAME):
        raise UserError(
            f"--executor {args.executor} submits nothing to a site",
            do=f"Remove the option, or use --executor {_NAME}",
        )
    args.executor = _NAME
    args.dryrun = True
    args.jobs = args.jobs or NO_LIMIT
    args.cores = args.cores or NO_LIMIT
    args.quiet = set()
    return parser, args
