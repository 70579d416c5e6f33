"""From a Snakemake job to a JobRequest: all that the engine has to know of it."""

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache

from snakemake.io import is_flagged

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.spec import Benchmark, OutputFile
from snakemake_executor_plugin_mantik.journal import job_name
from snakemake_executor_plugin_mantik.measuring import measured_path
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.command import NODE_TMPDIR, tmpdir_of
from snakemake_executor_plugin_mantik.rules.identity import identity, plain
from snakemake_executor_plugin_mantik.rules.mpi import launches
from snakemake_executor_plugin_mantik.rules.payload import Context, payload_of
from snakemake_executor_plugin_mantik.rules.places import Places, places_of, stays_in_storage
from snakemake_executor_plugin_mantik.rules.resources import given_resources, site_of
from snakemake_executor_plugin_mantik.rules.sourcefiles import is_source_file, steady

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""What Snakemake sets to the number of threads around a shell command (snakemake/shell.py)."""


def request(job: Job, context: Context, *, secrets: Mapping[str, str], forced: bool) -> JobRequest:
    """What the engine is asked for a job.

    Args:
        job: the Snakemake job; `refusal.obstacle` has found nothing in its way.
        context: of the run.
        secrets: values of the workflow's `envvars:`.
        forced: whether the user asked to run it whatever an earlier run finished.

    Raises:
        UserError: a value is not determined, or an unknown site is named.
    """
    rule = job.rule
    resources = given_resources(job)
    site = site_of(resources, context.sites)
    tmpdir = tmpdir_of(job)
    wildcards = {key: str(value) for key, value in job.wildcards_dict.items()}
    places = places_of(job, context)
    outputs = tuple(_outputs(job, places))
    identified = identity(job)
    measured = job.benchmark is not None
    runs = [payload_of(job, context, tmpdir, 0 if measured else None)]
    benchmark = None
    if measured and runs[0].full:
        outputs += (OutputFile(plain(job.benchmark)),)
    elif measured:
        runs += [payload_of(job, context, tmpdir, i) for i in range(1, job.benchmark_repeats)]
        benchmark = Benchmark(measured_path(identified), tuple(run.command for run in runs))
        outputs += (OutputFile(benchmark.path),)
    variables = dict.fromkeys(_THREAD_VARIABLES, str(job.threads))
    if tmpdir != NODE_TMPDIR:
        variables["TMPDIR"] = tmpdir
    name = job_name(rule.name, wildcards)
    if context.options.jobname is not None:
        name = job.format_wildcards(context.options.jobname)
    return JobRequest(
        number=job.jobid,
        job=identified,
        rule=rule.name,
        name=name,
        site=site,
        command=runs[0].command,
        benchmark=benchmark,
        shell=runs[0].shell,
        resources=resources,
        threads=job.threads,
        variables=variables,
        inputs=tuple(dict.fromkeys([*_inputs(job, places), *runs[0].inputs])),
        uploads=tuple({upload.path: upload for run in runs for upload in run.uploads}.values()),
        outputs=outputs,
        umask=_umask(),
        own_environment=runs[0].own_environment,
        secrets=dict(secrets),
        parameters=steady(job, json.dumps(sorted(repr(value) for value in job.non_derived_params))),
        forced=forced,
        launches=launches(job),
        full=any(run.full for run in runs),
        incomplete=context.options.keep_incomplete,
    )


@cache
def _umask() -> int:
    """The file mode mask of this process. It can only be read by setting it: once is enough."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _inputs(job: Job, places: Places) -> Iterable[str]:
    for path in job.input:
        if stays_in_storage(path) or is_source_file(path):
            continue
        if (place := places.place(path)) is not None:
            yield place


def _outputs(job: Job, places: Places) -> Iterable[OutputFile]:
    for path in job.output:
        if not stays_in_storage(path) and (place := places.place(path)) is not None:
            yield OutputFile(
                path=place,
                kind="touched" if is_flagged(path, "touch") else "output",
                directory=is_flagged(path, "directory"),
                keep=is_flagged(path, "update"),
            )
    for path in job.log:
        if not stays_in_storage(path) and (place := places.place(path)) is not None:
            yield OutputFile(path=place, kind="log")
