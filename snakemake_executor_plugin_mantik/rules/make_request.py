"""Turn a Snakemake job into a JobRequest, which holds all that the engine needs to know.

Each kind of rule renders its command in a module of its own: `shell_command` for `shell:`,
`scripts` for `script:` and `notebook:`, `full_jobs` for rules that need a Snakemake at the site.
Directives that apply to any kind (environment, shadow directory) wrap that text in more text. So
wrappers compose, and the job script need not know them.

What must not leave this machine is refused (`staging.secret_files`). Environment variables are
passed if a workflow requests them: `envvars:` names some, and a Snakefile may set others
(`os.environ["BLIS_ARCH"] = "zen3"`), which local jobs inherit. The names of these are read from the
Snakefiles' code, because the environment does not distinguish them from variables of the user's
shell and of imported libraries.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from snakemake.io import is_flagged

from snakemake_executor_plugin_mantik.common.secret_names import is_secret
from snakemake_executor_plugin_mantik.common.state_directory import read_umask
from snakemake_executor_plugin_mantik.config.environment import environment_uploads
from snakemake_executor_plugin_mantik.config.exclude import Include
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.request import JobRequest, Upload
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.jobs.script import COMMAND_BYTES
from snakemake_executor_plugin_mantik.jobs.spec import Benchmark, OutputFile
from snakemake_executor_plugin_mantik.mlproject.project import find_bound_entry_point
from snakemake_executor_plugin_mantik.sites.base import is_rest_safe
from snakemake_executor_plugin_mantik.staging.secret_files import SecretFiles
from snakemake_executor_plugin_mantik.storage.paths import (
    find_dataset,
    find_storage_link,
    storable_path,
)

from . import Job
from .context import Payload, RuleContext, refuse_rules
from .deployment import has_launcher, wrap_deployment
from .kinds import full_jobs
from .kinds.shell_command import (
    own_tmpdir,
    shell_command,
    shell_executable,
    use_node_tmpdir,
    wrap_shell,
)
from .paths import path_rewriting, storage
from .paths.job_paths import JobPaths, find_job_paths
from .paths.storage import is_unstaged, may_stay
from .paths.workflow_code import is_source_file, stable_paths, upload_source_files
from .resources import (
    choose_environment,
    choose_site,
    given_resources,
    job_continuation,
    split_undetermined,
)
from .shadow import shadow_payload
from .units import job_display_name, job_identity, plain_path

_SET = re.compile(
    r"""^[^\S\n]*(?:os\.)?environ(?:\[|\.setdefault\()\s*(['"])(?P<name>[A-Za-z_]\w*)\1\s*"""
    r"""(?:\]\s*\+?=(?!=)|,)""",
    re.MULTILINE,
)
"""Pattern of a line that sets a variable."""

_OF_THE_MACHINE = re.compile(
    r"PATH|\w+_PATH|PYTHONPATH|PYTHONHOME|HOME|TMPDIR|TMP|TEMP|SHELL|USER|LOGNAME|PWD|CONDA_PREFIX"
)
"""Variables with paths and names that are different at a site."""

_OF_CONTROLLERS = ("SNAKEMAKE_", "MANTIK_", "MLFLOW_")
"""Prefixes of variables that are meant for this process."""


def workflow_variables(workflow: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process's environment that the workflow passes to jobs.

    Snakemake's own list of variables also has the credentials of storages. These stay on this
    machine unless jobs use the storage themselves (`rules/paths/storage.py`).
    """
    names = {name for name in _set_by(workflow) if name in environ and _means_the_same(name)}
    return {name: environ[name] for name in sorted(names | set(workflow.envvars))}


def _set_by(workflow: Any) -> Iterator[str]:
    """Yield the names of the variables that the Snakefiles set."""
    for source in workflow.included:
        with workflow.sourcecache.open(source) as file:
            for found in _SET.finditer(file.read()):
                yield found["name"]


def _means_the_same(name: str) -> bool:
    """Return whether a variable means the same at a site, and may be passed without `envvars:`."""
    return not (
        _OF_THE_MACHINE.fullmatch(name)
        or name.startswith(_OF_CONTROLLERS)
        or name in THREAD_VARIABLES
        or is_secret(name)
    )


def refuse_secret_inputs(jobs: Iterable[Job], context: RuleContext) -> None:
    """Refuse inputs of jobs, and files of their environments, that must not leave this machine.

    What other jobs make is not looked at: it comes from a site, or the rule has made it to be read.

    Raises:
        UserError: lists the rules, each with its files.
    """
    found: dict[str, str] = {}
    for job in jobs:
        given, _ = split_undetermined(given_resources(job))
        config = context.sites[choose_site(given, context.sites)].config
        made = {str(path) for files in job.dag.dependencies.get(job, {}).values() for path in files}
        read = [storable_path(path) or str(path) for path in job.input if str(path) not in made]
        environment = config.named_environment(choose_environment(given, config))
        read += [str(local) for local, _ in environment_uploads(environment, context.workdir)]
        _look(found, job, read, config)
    _refuse(found)


def refuse_secret_code(job: Job, payload: Payload, config: BackendConfig, *more: str) -> None:
    """Refuse what a job's command needs that must not leave this machine; `more` has further files.

    Raises:
        UserError: names the rule and the files.
    """
    made = set(map(str, job.rule.workflow.checkpoints.created_output))
    read = [path for path in payload.inputs if path not in made]
    read += [str(upload.local) for upload in payload.uploads if upload.local is not None]
    found: dict[str, str] = {}
    _look(found, job, [*read, *more], config)
    _refuse(found)


def _look(found: dict[str, str], job: Job, paths: Iterable[str], config: BackendConfig) -> None:
    """Note the rule of a job if one of `paths` must not leave this machine."""
    include = tuple(config.site.include)
    if secrets := "; ".join(filter(None, (_look_at(include, os.path.relpath(p)) for p in paths))):
        found.setdefault(job.rule.name, f"reads {secrets}")


@cache  # many jobs read the same files
def _look_at(include: tuple[str, ...], path: str) -> str:
    return _secret_files(include).look_at(path, path)


@cache
def _secret_files(include: tuple[str, ...]) -> SecretFiles:
    return SecretFiles(Include(include))


def _refuse(found: Mapping[str, str]) -> None:
    refuse_rules(
        found,
        "files that must not leave this machine would be uploaded",
        do="Take them out, and pass secrets with envvars:. To upload one that only looks like a"
        " secret, add it to Site: Include in the backend config",
    )


def why_full_job(job: Job) -> str | None:
    """Return why a job needs a Snakemake at its site, as words after "has"; None for thin jobs."""
    if storage.jobs_use_storage(job.rule.workflow):
        return storage.WORDS
    if job.rule.is_script or job.rule.is_notebook:
        # Imported here because it imports Snakemake's support for languages and notebooks.
        from .kinds.scripts import needs_snakemake

        imported = needs_snakemake(job)
        return f"a script that imports {', '.join(imported)}" if imported else None
    return full_jobs.full_job_directive(job)


def make_payload(job: Job, context: RuleContext, iteration: int | None = None) -> Payload:
    """Make the payload of a single job, accepted by `preflight.refuse_jobs`.

    `iteration` is the number of the benchmark's repetition, from 0.

    Raises:
        UserError: a value in the command is not determined before the job runs, a script's files
            are too large, or a file of the script or of its environment is not available.
    """
    if why_full_job(job) is not None:
        # The Snakemake at the site sets up environment and shadow directory itself.
        site = choose_site(given_resources(job), context.sites)
        text, uploads, inputs = full_jobs.full_job_command(
            job, context.workdir, site, context.sites[site].config,
            context.deployment,
        )  # fmt: skip
        payload = Payload(text, uploads=uploads, inputs=inputs, full=True)
        refuse_secret_code(job, payload, context.sites[site].config)
    else:
        payload = _thin(job, context, iteration)
        payload = shadow_payload(
            wrap_deployment(payload, job, context), job, iteration, also=payload.inputs
        )
    if context.options.precommand:
        # As in Snakemake's own job scripts, a failure of the precommand ends the job.
        before = f"{{ {context.options.precommand}\n}} || exit\n"
        payload = replace(payload, command=before + payload.command)
    return _shortened(payload)


def _shortened(payload: Payload) -> Payload:
    """Return a payload whose long command travels as a file: schedulers limit scripts to 4 MiB."""
    content = payload.command.encode("utf-8", "surrogateescape")
    if len(content) <= COMMAND_BYTES:
        return payload
    file = Upload(file_path(content, "command"), content=content)
    command = f". ./{shlex.quote(file.path)}"
    return replace(payload, command=command, uploads=(*payload.uploads, file))


def _thin(job: Job, context: RuleContext, iteration: int | None) -> Payload:
    """Make the payload of a thin job, without environment and shadow directory."""
    shell = os.path.basename(shell_executable(job) or "bash")
    places = find_job_paths(job, context)
    config = context.sites[choose_site(given_resources(job), context.sites)].config
    if job.rule.is_script or job.rule.is_notebook:
        # Imported here because it imports Snakemake's support for languages and notebooks.
        from .kinds.script_file import find_script_file
        from .kinds.scripts import script_command

        text, uploads = script_command(job, places, iteration, config)
        payload = Payload(wrap_shell(job, text), shell, uploads)
        refuse_secret_code(job, payload, config, str(find_script_file(job).path))
        return payload
    text = shell_command(job, places, iteration)
    text, uploads = upload_source_files(job, text, lambda: places.workspace)
    text, beside = path_rewriting.upload_siblings(job, text, places, config)
    text, shell = use_node_tmpdir(text, shell)
    payload = Payload(text, shell, (*uploads, *beside))
    refuse_secret_code(job, payload, config)
    return payload


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
        UserError: a path is in the executor's own directory, or `make_payload` raises: a value is
            not determined before the job runs, or a file is missing or too large.
    """
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
