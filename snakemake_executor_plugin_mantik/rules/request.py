"""From a Snakemake job to a JobRequest: all that the engine has to know of it."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from snakemake.io import is_flagged

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.spec import Benchmark, OutputFile
from snakemake_executor_plugin_mantik.measuring import measured_path
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.command import NODE_TMPDIR, tmpdir_of
from snakemake_executor_plugin_mantik.rules.payload import Context, Payload, payload_of
from snakemake_executor_plugin_mantik.rules.resources import given_resources, site_of

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
    resources = given_resources(job)
    site = site_of(resources, context.sites)
    outputs = tuple(outputs_of(job))
    benchmark = None
    runs = runs_of(job, context)
    if (measured := measured_file(job)) is not None:
        benchmark = Benchmark(measured, tuple(run.command for run in runs))
        outputs += (OutputFile(measured),)
    return JobRequest(
        number=job.jobid,
        job=identity_of(job),
        rule=job.rule.name,
        name=name_of(job),
        site=site,
        command=runs[0].command,
        benchmark=benchmark,
        shell=runs[0].shell,
        resources=resources,
        threads=job.threads,
        variables=variables_of(job),
        inputs=tuple(dict.fromkeys([*map(plain, job.input), *runs[0].inputs])),
        uploads=tuple({upload.path: upload for run in runs for upload in run.uploads}.values()),
        outputs=outputs,
        umask=umask(),
        secrets=dict(secrets),
        parameters=parameters_of(job),
        forced=forced,
    )


def identity_of(job: Job) -> str:
    """What a job is, the same in every run: a digest of rule, wildcards and outputs."""
    wildcards = {key: str(value) for key, value in job.wildcards_dict.items()}
    outputs = [plain(path) for path in [*job.output, *job.log]]
    identity = [job.rule.name, sorted(wildcards.items()), outputs]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def name_of(job: Job) -> str:
    """Rule and wildcards, readable."""
    details = ", ".join(f"{key}={value}" for key, value in job.wildcards_dict.items())
    return f"{job.rule.name} {details}" if details else str(job.rule.name)


def runs_of(job: Job, context: Context) -> list[Payload]:
    """What runs for a job: several texts where the command is measured more than once.

    Raises:
        UserError: a value in it is not determined before the job runs.
    """
    tmpdir = tmpdir_of(job)
    if job.benchmark is None:
        return [payload_of(job, context, tmpdir)]
    return [payload_of(job, context, tmpdir, i) for i in range(job.benchmark_repeats)]


def measured_file(job: Job) -> str | None:
    """Where the measurements of a job with a benchmark file lie until that is written."""
    return measured_path(identity_of(job)) if job.benchmark is not None else None


def variables_of(job: Job) -> dict[str, str]:
    """The environment variables that Snakemake sets around a command."""
    tmpdir = tmpdir_of(job)
    variables = dict.fromkeys(_THREAD_VARIABLES, str(job.threads))
    return variables if tmpdir == NODE_TMPDIR else {**variables, "TMPDIR": tmpdir}


def parameters_of(job: Job) -> str:
    """The rule's parameters as text, those derived from other things left out."""
    return json.dumps(sorted(repr(value) for value in job.non_derived_params))


@cache
def umask() -> int:
    """The file mode mask of this process. It can only be read by setting it: once is enough."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def outputs_of(job: Job) -> Iterable[OutputFile]:
    """What a job makes: outputs and logs."""
    for path in job.output:
        yield OutputFile(
            path=plain(path),
            kind="touched" if is_flagged(path, "touch") else "output",
            directory=is_flagged(path, "directory"),
            keep=is_flagged(path, "update"),
        )
    for path in job.log:
        yield OutputFile(path=plain(path), kind="log")


def plain(path: Any) -> str:
    """A path as archives and listings have it: without `./` and `//`."""
    return os.path.normpath(str(path))
