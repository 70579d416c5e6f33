"""From a Snakemake job to a JobRequest: all that the engine has to know of it."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from snakemake.io import is_flagged

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.spec import Benchmark, OutputFile
from snakemake_executor_plugin_mantik.measuring import measured_path
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.command import NODE_TMPDIR, tmpdir_of
from snakemake_executor_plugin_mantik.rules.identity import identity, plain
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
    runs = runs_of(job, context)
    payloads = runs.payloads
    benchmark = None
    if runs.measured:
        benchmark = Benchmark(runs.measured, tuple(payload.command for payload in payloads))
    return JobRequest(
        number=job.jobid,
        job=identity(job),
        rule=job.rule.name,
        name=name_of(job),
        site=site,
        command=payloads[0].command,
        benchmark=benchmark,
        shell=payloads[0].shell,
        resources=resources,
        threads=job.threads,
        variables=variables_of(job),
        inputs=tuple(dict.fromkeys([*map(plain, job.input), *payloads[0].inputs])),
        uploads=tuple({upload.path: upload for run in payloads for upload in run.uploads}.values()),
        outputs=runs.outputs,
        umask=umask(),
        own_environment=payloads[0].own_environment,
        secrets=dict(secrets),
        parameters=parameters_of(job),
        forced=forced,
    )


def name_of(job: Job) -> str:
    """Rule and wildcards, readable."""
    details = ", ".join(f"{key}={value}" for key, value in job.wildcards_dict.items())
    return f"{job.rule.name} {details}" if details else str(job.rule.name)


@dataclass(frozen=True)
class Runs:
    """What runs for a job, and what it makes.

    Attributes:
        payloads: one, or as many as a command is measured.
        measured: where the measurements lie until the benchmark file is written; empty if there
            is none, or if the payload writes it.
        outputs: all of the job's, logs and what is measured among them.
    """

    payloads: tuple[Payload, ...]
    measured: str
    outputs: tuple[OutputFile, ...]


def runs_of(job: Job, context: Context) -> Runs:
    """What runs for a job, and what it makes.

    Raises:
        UserError: a value in it is not determined before the job runs.
    """
    tmpdir = tmpdir_of(job)
    outputs = tuple(_outputs(job))
    if job.benchmark is None:
        return Runs((payload_of(job, context, tmpdir),), "", outputs)
    first = payload_of(job, context, tmpdir, 0)
    if first.measures:
        return Runs((first,), "", (*outputs, OutputFile(plain(job.benchmark))))
    others = (payload_of(job, context, tmpdir, i) for i in range(1, job.benchmark_repeats))
    measured = measured_path(identity(job))
    return Runs((first, *others), measured, (*outputs, OutputFile(measured)))


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


def _outputs(job: Job) -> Iterable[OutputFile]:
    for path in job.output:
        yield OutputFile(
            path=plain(path),
            kind="touched" if is_flagged(path, "touch") else "output",
            directory=is_flagged(path, "directory"),
            keep=is_flagged(path, "update"),
        )
    for path in job.log:
        yield OutputFile(path=plain(path), kind="log")
