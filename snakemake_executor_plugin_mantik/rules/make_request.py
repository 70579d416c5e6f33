"""Turn a Snakemake job into a JobRequest, which holds all that the engine needs to know.

Each kind of rule renders its command in a module of its own: `shell_command` for `shell:`,
`scripts` for `script:` and `notebook:`, `nested_snakemake` for rules that need a Snakemake at the
site. Directives that apply to any kind (environment, shadow directory) wrap that text in more text.
So wrappers compose, and the job script need not know them.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from snakemake.io import is_flagged

from ..common.secret_names import is_secret
from ..common.state_directory import read_umask
from ..config.environment import environment_uploads
from ..config.exclude import Include
from ..config.model import BackendConfig
from ..engine.request import JobRequest
from ..jobs.library import use_library
from ..jobs.paths import SHADOWS
from ..jobs.script import link_lines
from ..jobs.spec import Benchmark, OutputFile
from ..sites.base import is_rest_safe
from ..staging.secret_files import SecretFiles
from ..storage.paths import find_dataset, find_storage_link, storable_path
from . import Job
from .context import Payload, RuleContext, refuse_rules, start_words
from .deployment import has_launcher, wrap_deployment
from .kinds import nested_snakemake
from .kinds.shell_command import (
    own_tmpdir,
    shell_command,
    shell_executable,
    use_node_tmpdir,
    wrap_shell,
)
from .paths.job_paths import JobPaths, command_text
from .paths.path_rewriting import upload_named_files
from .paths.storage import is_unstaged, may_stay
from .paths.workflow_code import is_source_file, read_snakefiles, stable_paths
from .resources import SITE_RESOURCE
from .site_job import SiteJob
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
    found = {each["name"] for text in read_snakefiles(workflow) for each in _SET.finditer(text)}
    names = {name for name in found if name in environ and _means_the_same(name)}
    return {name: environ[name] for name in sorted(names | set(workflow.envvars))}


def _means_the_same(name: str) -> bool:
    """Return whether a variable means the same at a site, and may be passed without `envvars:`."""
    return not (
        _OF_THE_MACHINE.fullmatch(name)
        or name.startswith(_OF_CONTROLLERS)
        or name in THREAD_VARIABLES
        or is_secret(name)
    )


def secret_mistake(at: SiteJob) -> str | None:
    """Return which inputs of a job, and files of its environment, must not leave this machine.

    The answer follows "rule NAME". What other jobs make is not looked at: it comes from a site, or
    the rule has made it to be read.
    """
    job = at.job
    made = {str(path) for files in job.dag.dependencies.get(job, {}).values() for path in files}
    read = [storable_path(path) or str(path) for path in job.input if str(path) not in made]
    read += [str(local) for local, _ in environment_uploads(at.software, at.context.workdir)]
    return _reads_secrets(read, at.config)


def refuse_secret_code(at: SiteJob, payload: Payload, *more: str) -> None:
    """Refuse files for a job's command, and `more`, that must not leave this machine."""
    made = set(map(str, at.rule.workflow.checkpoints.created_output))
    read = [path for path in payload.inputs if path not in made]
    read += [str(upload.local) for upload in payload.uploads if upload.local is not None]
    if found := _reads_secrets([*read, *more], at.config):
        refuse_rules({at.rule.name: found}, *SECRET_FILES)


SECRET_FILES: Final = (
    "files that must not leave this machine would be uploaded",
    "Take them out, and pass secrets with envvars:. To upload one that only looks like a secret,"
    " add it to Site: Include in the backend config",
)
"""What is wrong with rules that read such files, and what to do."""


def _reads_secrets(paths: Iterable[str], config: BackendConfig) -> str | None:
    include = tuple(config.site.include)
    found = [text for path in paths if (text := _look_at(include, os.path.relpath(path)))]
    return f"reads {'; '.join(found)}" if found else None


@cache  # many jobs read the same files
def _look_at(include: tuple[str, ...], path: str) -> str:
    return _secret_files(include).look_at(path, path)


@cache
def _secret_files(include: tuple[str, ...]) -> SecretFiles:
    return SecretFiles(Include(include))


def make_payload(at: SiteJob, iteration: int | None = None) -> Payload:
    """Make the payload of a single job that `preflight` does not refuse.

    `iteration` is the number of the benchmark's repetition, from 0.

    Raises:
        UserError: a value in the command is not determined before the job runs, a script's files
            are too large, or a file of the script or of its environment is not available.
    """
    if at.nested is not None:
        # The Snakemake at the site sets up environment and shadow directory itself.
        text, uploads, inputs = nested_snakemake.nested_command(at)
        payload = Payload(text, uploads=uploads, inputs=inputs, nested=True)
        refuse_secret_code(at, payload)
    else:
        payload = wrap_deployment(_plain(at, iteration), at)
        payload = shadow_payload(payload, at.job, iteration)
    if at.context.precommand:
        # As in Snakemake's own job scripts, a failure of the precommand ends the job.
        before = f"{{ {at.context.precommand}\n}} || exit\n"
        payload = replace(payload, command=before + payload.command)
    start, files = start_words(payload)
    if not files:
        return payload
    uploads = (*payload.uploads, *files)
    command = f"exec {shlex.join(start)}"
    return replace(payload, command=command, shell="sh", uploads=uploads)  # noqa: S604 - a value


def _plain(at: SiteJob, iteration: int | None) -> Payload:
    """Make the payload of a plain script, without environment and shadow directory."""
    job, places = at.job, at.paths()
    shell = os.path.basename(shell_executable(job) or "bash")
    if at.script is not None:
        # Imported here because it imports Snakemake's support for languages and notebooks.
        from .kinds.scripts import script_command

        text, uploads = script_command(job, at.script, places, iteration, at.config)
        payload = Payload(wrap_shell(job, text), shell, uploads)
        refuse_secret_code(at, payload, str(at.script.path))
        return payload
    text = shell_command(job, places, iteration)
    text, uploads = upload_named_files(job, text, places, at.config)
    text, shell = use_node_tmpdir(text, shell)
    payload = Payload(text, shell, uploads)
    refuse_secret_code(at, payload)
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


def make_request(at: SiteJob, *, secrets: Mapping[str, str], forced: bool) -> JobRequest:
    """Make the engine's request for a single job that `preflight` does not refuse.

    `secrets` are the environment variables that jobs get from this machine, by name. With `forced`,
    run the job even if an earlier run has finished it (`--forceall`, `--forcerun`).

    Raises:
        UserError: a path is in the executor's own directory, or `make_payload` raises: a value is
            not determined before the job runs, or a file is missing or too large.
    """
    job, places, entry = at.job, at.paths(), at.entry_point
    outputs = list(_list_outputs(job, places))
    inputs, payloads, benchmark = list[str](), [Payload("")], None
    if not job.is_norun:  # otherwise it is in a group, and its inputs need no upload
        payloads = [make_payload(at, None if job.benchmark is None else 0)]
        staged = (p for p in job.input if not (is_unstaged(job, p) or is_source_file(p)))
        inputs = [place for path in staged if (place := places.place(path)) is not None]
        if job.benchmark is not None and not payloads[0].nested:
            payloads += [make_payload(at, i) for i in range(1, job.benchmark_repeats)]
            measured = f"{_MEASUREMENTS}/{job_identity(job)[:32]}"
            file = places.place(job.benchmark) or f"{measured}.tsv"
            benchmark = Benchmark(measured, file, tuple(each.command for each in payloads))
            outputs.append(OutputFile(measured))
        elif job.benchmark is not None and not is_unstaged(job, job.benchmark):
            outputs.append(OutputFile(plain_path(job.benchmark)))
    payload, tmpdir = payloads[0], own_tmpdir(job)
    return JobRequest(
        number=job.jobid,
        job=job_identity(job),
        rule=at.rule.name,
        name=message_name(job, job_display_name(job), at.context),
        site=at.site,
        command=payload.command,
        benchmark=benchmark,
        shell=payload.shell,
        resources={name: value for name, value in at.given.items() if name != SITE_RESOURCE},
        threads=job.threads,
        # As Snakemake sets them around a command. The node makes a directory of the rule's own.
        variables=dict.fromkeys(THREAD_VARIABLES, str(job.threads))
        | ({} if tmpdir is None else {"TMPDIR": tmpdir}),
        inputs=tuple(dict.fromkeys([*inputs, *payload.inputs])),
        uploads=tuple({upload.path: upload for run in payloads for upload in run.uploads}.values()),
        outputs=tuple(outputs),
        umask=read_umask(),
        project="" if entry is None else str(entry.project.relative_folder()),
        environment=at.environment,
        own_environment=payload.own_environment,
        secrets=dict(secrets),
        # As text, without those derived from other values.
        parameters=stable_paths(job, json.dumps(sorted(map(repr, job.non_derived_params)))),
        forced=forced,
        launches=has_launcher(job),
        nested=payload.nested,
        incomplete=at.context.keep_incomplete,
        storable=frozenset(filter(None, map(storable_path, job.input))),
        storage_link=find_storage_link(job),
        datasets=tuple(found.path for path in job.input if (found := find_dataset(path))),
        continuation=at.continuation,
    )


def message_name(job: Job, name: str, context: RuleContext) -> str:
    """Return the name of a job or group for messages: from `--jobname` if given, else `name`."""
    wanted = context.jobname
    return name if wanted is None else str(job.format_wildcards(wanted))


def _list_outputs(job: Job, places: JobPaths) -> Iterable[OutputFile]:
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


def shadow_payload(payload: Payload, job: Job, iteration: int | None) -> Payload:
    """Wrap the payload in its job's shadow directory, if the rule has a `shadow:`.

    All repetitions (`iteration`) of a benchmark share the directory.
    """
    if job.rule.shadow_depth is None:
        return payload
    start, uploads = start_words(payload)
    text = wrap_shadow(
        f"{SHADOWS}/{job_identity(job)[:16]}",
        job.rule.shadow_depth,
        shlex.join(start),
        rule=job.rule.name,
        inputs=_relative(job.input),
        outputs=_relative(job.output),
        logs=_relative(job.log),
        also=payload.inputs,
        storage_link=find_storage_link(job),
        first=not iteration,
        last=iteration is None or iteration + 1 == job.benchmark_repeats,
    )
    return payload.around(text, uploads)


def _relative(paths: object) -> tuple[str, ...]:
    """Return the relative paths. Absolute ones are not moved to the shadow directory."""
    return tuple(
        dict.fromkeys(
            plain_path(command_text(p))
            for p in paths  # type: ignore[attr-defined] # Snakemake's Namedlist
            if find_dataset(p) is None and not os.path.isabs(command_text(p))
        )
    )


def wrap_shadow(
    place: str,
    depth: str,
    start: str,
    *,
    rule: str,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    logs: Sequence[str] = (),
    also: Sequence[str] = (),
    storage_link: str = "",
    first: bool = True,
    last: bool = True,
) -> str:
    """Return a text for bash that runs a program in a shadow directory, `place`.

    All paths are relative to the workspace. `start` is the program and its arguments, quoted.
    `outputs` are moved out of the directory after a success, `logs` in any case. `also` names
    further files that the command reads; they are linked unless they are there already. Only the
    `first` repetition of a benchmark makes the directory, and the `last` one, or a failure, removes
    it. For `storage_link` see `jobs.spec.JobSpec`.
    """

    def linked(paths: Sequence[str]) -> list[str]:
        """Return each path, and the target of a link to it from the shadow directory."""
        at = (os.path.dirname(os.path.join(place, path)) for path in paths)
        return [word for path in paths for word in (path, os.path.relpath(path, next(at)))]

    folders = {os.path.dirname(path) for path in (*inputs, *outputs, *logs)}
    arrays = {
        "folders": sorted(filter(None, folders)),
        "shadow_inputs": linked(inputs),
        "also": linked(also),
        "shadow_outputs": outputs,
        "shadow_logs": logs,
    }
    return "\n".join(
        [
            f"{use_library()} || exit 1",
            f"_m_who={shlex.quote(f'rule {rule}')}",
            f"_m_shadow={shlex.quote(place)} _m_depth={depth}",
            f"_m_first={'yes' if first else ''} _m_last={'yes' if last else ''}",
            *(link_lines(storage_link) if storage_link else ()),
            *(f"_m_{name}=({shlex.join(words)})" for name, words in arrays.items() if words),
            f"_m_run_in_shadow {start}",
            "",
        ]
    )
