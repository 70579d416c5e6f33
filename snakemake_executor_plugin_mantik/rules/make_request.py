"""Turn a Snakemake job into a JobRequest, which holds all that the engine needs to know."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from snakemake.io import is_flagged

from snakemake_executor_plugin_mantik.common.state_directory import read_umask
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.spec import Benchmark, OutputFile
from snakemake_executor_plugin_mantik.mlproject.project import find_bound_entry_point
from snakemake_executor_plugin_mantik.sites.base import is_rest_safe
from snakemake_executor_plugin_mantik.storage.paths import (
    find_dataset,
    find_storage_link,
    storable_path,
)

from . import Job
from .context import Payload, RuleContext
from .kinds.placeholders import refuse_placeholders
from .kinds.shell_command import own_tmpdir
from .paths.job_paths import JobPaths, find_job_paths
from .paths.source_files import is_source_file, stable_paths
from .paths.storage import is_unstaged, may_stay
from .payload import make_payload
from .resources import choose_environment, choose_site, given_resources, job_continuation
from .units import job_display_name, job_identity, plain_path
from .wrapping.mpi import has_launcher

_MEASUREMENTS = ".snakemake/mantik/benchmarks"
"""Directory of measurements, here and at the site, until Snakemake has accepted the outputs."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""Variables that Snakemake sets to a shell command's number of threads (snakemake/shell.py)."""


def make_request(
    job: Job, context: RuleContext, *, secrets: Mapping[str, str], forced: bool
) -> JobRequest:
    """Make the engine's request for a single job, accepted by `preflight.refuse_jobs`.

    `secrets` are the environment variables that jobs get from this machine, by name. With `forced`,
    run the job even if an earlier run has finished it (`--forceall`, `--forcerun`).

    Raises:
        UserError: the job names an unknown site, or `find_runs` raises.
    """
    resources = given_resources(job)
    site = choose_site(resources, context.sites)
    runs = find_runs(job, context)
    payloads = runs.payloads
    full = any(run.full for run in payloads)
    segments = 0 if full else context.sites[site].config.resources.segments or 0
    benchmark = None
    if runs.measured:
        benchmark = Benchmark(
            runs.measured, runs.benchmark, tuple(payload.command for payload in payloads)
        )
    return JobRequest(
        number=job.jobid,
        job=job_identity(job),
        rule=job.rule.name,
        name=message_name(job, job_display_name(job), context),
        site=site,
        command=payloads[0].command,
        benchmark=benchmark,
        shell=payloads[0].shell,
        resources=resources,
        threads=job.threads,
        variables=job_variables(job),
        inputs=runs.inputs,
        uploads=tuple({upload.path: upload for run in payloads for upload in run.uploads}.values()),
        outputs=runs.outputs,
        umask=read_umask(),
        project=project_folder(job),
        environment=choose_environment(resources, context.sites[site].config),
        own_environment=payloads[0].own_environment,
        secrets=dict(secrets),
        parameters=job_parameters(job),
        forced=forced,
        launches=has_launcher(job),
        full=full,
        incomplete=context.options.keep_incomplete,
        storable=frozenset(list_storable(job)),
        storage_link=find_storage_link(job),
        datasets=tuple(list_datasets(job)),
        continuation=job_continuation(job, [o.path for o in runs.outputs if o.keep], segments),
    )


def message_name(job: Job, name: str, context: RuleContext) -> str:
    """Return the name of a job or group for messages: from `--jobname` if given, else `name`."""
    wanted = context.options.jobname
    return name if wanted is None else str(job.format_wildcards(wanted))


@dataclass(frozen=True)
class ResolvedJob:
    """The commands, inputs and outputs of a job. All paths are relative to the workspace.

    Attributes:
        payloads: one, or one per repetition of a benchmark; none for a rule without a command.
        measured: path of the measurements, which are kept until the benchmark file is written;
            empty without a benchmark file, or if the payload writes it.
        benchmark: path of the benchmark file, if something is measured.
        inputs: the job's inputs, and other files that the payloads need.
        outputs: the job's outputs, including logs and measurements.
    """

    payloads: tuple[Payload, ...]
    measured: str = ""
    benchmark: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[OutputFile, ...] = ()


def find_runs(job: Job, context: RuleContext) -> ResolvedJob:
    """Resolve the commands, inputs and outputs of a job.

    Raises:
        UserError: a path is in the executor's own directory, an input is not known yet, or
            `payload.make_payload` raises: a value is not determined before the job runs, or a file
            is missing or too large.
    """
    refuse_placeholders(job)
    places = find_job_paths(job, context)
    measured = benchmark = ""
    outputs = list(list_outputs(job, places))
    payloads = [make_payload(job, context, None if job.benchmark is None else 0)]
    if job.benchmark is not None and payloads[0].full:
        if not is_unstaged(job, job.benchmark):
            outputs.append(OutputFile(plain_path(job.benchmark)))
    elif job.benchmark is not None:
        payloads += [make_payload(job, context, i) for i in range(1, job.benchmark_repeats)]
        measured = f"{_MEASUREMENTS}/{job_identity(job)[:32]}"
        benchmark = places.place(job.benchmark) or f"{measured}.tsv"
        outputs.append(OutputFile(measured))
    inputs = dict.fromkeys([*_inputs(job, places), *payloads[0].inputs])
    return ResolvedJob(tuple(payloads), measured, benchmark, tuple(inputs), tuple(outputs))


def list_outputs(job: Job, places: JobPaths) -> Iterable[OutputFile]:
    """Yield the files to download that a job makes, including logs but no measurements."""
    for path in job.output:
        if not is_unstaged(job, path) and (place := places.place(path)) is not None:
            yield OutputFile(
                path=place,
                kind="touched" if is_flagged(path, "touch") else "output",
                directory=is_flagged(path, "directory"),
                keep=is_flagged(path, "update"),
                stored=may_stay(job, path) and is_rest_safe(place),
            )
    for path in job.log:
        if not is_unstaged(job, path) and (place := places.place(path)) is not None:
            yield OutputFile(path=place, kind="log")


def list_storable(job: Job) -> Iterable[str]:
    """Yield the files that a job reads and that may be stored outputs."""
    yield from filter(None, map(storable_path, job.input))


def list_datasets(job: Job) -> Iterable[str]:
    """Yield the paths, at its site, of the datasets that a job reads."""
    yield from (dataset.path for path in job.input if (dataset := find_dataset(path)) is not None)


def job_variables(job: Job) -> dict[str, str]:
    """Return the environment variables that Snakemake sets around a command.

    TMPDIR is there only if the rule has a directory of its own, which is made on the node.
    """
    tmpdir = own_tmpdir(job)
    variables = dict.fromkeys(THREAD_VARIABLES, str(job.threads))
    return variables if tmpdir is None else {**variables, "TMPDIR": tmpdir}


def project_folder(job: Job) -> str:
    """Return the folder of the MLproject whose entry point a job runs; empty if it runs none."""
    given = find_bound_entry_point(job.rule.params)
    return "" if given is None else str(given.project.relative_folder())


def job_parameters(job: Job) -> str:
    """Return the rule's parameters as text, without those derived from other values."""
    return stable_paths(job, json.dumps(sorted(repr(value) for value in job.non_derived_params)))


def _inputs(job: Job, places: JobPaths) -> Iterable[str]:
    for path in job.input:
        if is_unstaged(job, path) or is_source_file(path):
            continue
        if (place := places.place(path)) is not None:
            yield place
