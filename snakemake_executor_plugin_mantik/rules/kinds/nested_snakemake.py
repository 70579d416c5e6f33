"""Render the command of a job that runs a Snakemake at the site.

The command passes a description of the job to `rules/onsite/nested_snakemake.py`, which finds one
at the site and runs it in its own process. That Snakemake gets the arguments with which Snakemake
starts its own `run:` jobs (9.27: `snakemake/spawn_jobs.py`, `RemoteExecutor.format_job_exec`),
without anything specific to this machine. Threads, resources and the attempt are fixed to the
values of this machine.

The mode is `subprocess`: the Snakemake at the site deletes no temp() file, stores nothing, keeps no
metadata, loads no profile and prints only errors. Where jobs reach the storage themselves
(`rules/paths/storage.py`) the mode is `remote`: it fetches before the job and stores after it.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from snakemake import __version__, wrapper
from snakemake.common.tbdstring import TBDString
from snakemake.io import is_callable, is_flagged
from snakemake.resources import Resources
from snakemake.sourcecache import LocalGitFile, SourceFile

from ...common.errors import UserError
from ...config.model import BackendConfig
from ...engine.request import Upload
from ...jobs.paths import OURS, file_path
from .. import Job
from ..deployment import deployment_files
from ..onsite import nested_snakemake
from ..paths.storage import jobs_use_storage
from ..paths.workflow_code import (
    ELSEWHERE,
    WorkflowCode,
    enters_workdir,
    find_workflow_code,
    is_source_file,
    read_snakefiles,
    resolve_recorded,
    resolve_source,
)
from ..site_job import SiteJob, nested_options
from ..units import job_identity
from .shell_command import own_tmpdir

_PACKAGE: Final = "snakemake_executor_plugin_mantik"

BOOTSTRAPPED: Final = f"{OURS}/snakemake-{__version__}"
"""The virtual environment in a workspace that `smk-mantik bootstrap` makes."""

_COPIES: Final = f"{OURS}/storage"
"""Directory of files that jobs fetch from a storage themselves."""

_PLAIN: Final = re.compile(r"[\w./+-]+")

_COMMAND: Final = """\
mantik_python=$(command -v python3 || command -v python || command -v {venv}/bin/python) || {{
  echo {lack} >&2
  printf 'step=own\\n' >> "${{MANTIK_STATE:-/dev/null}}"
  exit {unfit}
}}
"$mantik_python" {program} <<'MANTIK_JOB'
{order}
MANTIK_JOB
"""


def _way_out(site: str) -> str:
    return (
        f"Install snakemake=={__version__} in the environment or image of the backend config, or"
        f" run: smk-mantik bootstrap {site}"
    )


def nested_command(at: SiteJob) -> tuple[str, tuple[Upload, ...], tuple[str, ...]]:
    """Return the command of a nested Snakemake, the files to upload, and further inputs.

    Raises:
        UserError: something that the job needs is not available on this machine.
    """
    job, rule, workflow = at.job, at.rule, at.rule.workflow
    found = find_workflow_code(workflow, at.context.workdir, at.config)
    _add_code(job, found, at.config)
    sources, image = deployment_files(at)
    for source in sources:
        found.add_source(source, workflow.sourcecache)
    if image is not None:
        found.add(image)
    made = _checkpointed(job)
    for path in made:
        # If jobs fetch themselves, copies on this machine serve only functions that run here.
        if os.path.exists(path) and not jobs_use_storage(workflow):
            found.inputs[os.path.normpath(path)] = None
    from_git = [source for source in workflow.included if isinstance(source, LocalGitFile)]
    order = {
        "snakemake": __version__,
        "pythons": ["python3", "python", f"{BOOTSTRAPPED}/bin/python"],
        "packages": [*_packages(workflow)],
        "do": f"{_way_out(at.site)}.",
        "rules": [rule.name],
        "input": [None if is_source_file(path) else str(path) for path in job.input],
        "output": [str(path) for path in job.output],
        "checkpointed": made,
        "cache": found.cached,
        "repositories": sorted({os.path.abspath(source.repo_path) for source in from_git}),
        "copies": _copies(job),
        "beginning": found.place(workflow.workdir_init) if enters_workdir(workflow) else "",
        "arguments": [*nested_options(at.context.deployment), *_arguments(job, found)],
    }
    program = Path(nested_snakemake.__file__).read_bytes()
    place = file_path(program, "nested_snakemake.py")
    text = _COMMAND.format(
        venv=BOOTSTRAPPED,
        lack=shlex.quote(
            f"{nested_snakemake.LACK} there is no Python at all. {_way_out(at.site)}."
        ),
        unfit=nested_snakemake.UNFIT,
        program=place,
        order=json.dumps(order),
    )
    uploads = (Upload(place, content=program), *found.uploads.values())
    return text, uploads, tuple(found.inputs)


def _add_code(job: Job, found: WorkflowCode, config: BackendConfig) -> None:
    rule, workflow = job.rule, job.rule.workflow
    code = rule.script or rule.notebook or rule.cwl
    if code:
        source = resolve_source(code, job)
        place = found.add_source(source, workflow.sourcecache)
        if place.startswith(ELSEWHERE):
            found.add_directory(Path(source.path).parent, config)
    if rule.is_wrapper:
        prefix = workflow.workflow_settings.wrapper_prefix
        source = wrapper.get_script(rule.wrapper, workflow.sourcecache, prefix)
        if not isinstance(source, SourceFile):
            raise UserError(
                f"there is no wrapper {rule.wrapper}: {'; '.join(source.values())}",
                where=f"rule {rule.name}",
                do="Correct the name, or check that it can be reached from this machine",
            )
        found.add_source(source, workflow.sourcecache)


def _checkpointed(job: Job) -> list[str]:
    """Return the outputs of finished checkpoints, if the rule has functions that may read them."""
    rule = job.rule
    if not any(map(is_callable, [*rule.input, *rule.params])):
        return []
    return sorted(map(str, rule.workflow.checkpoints.created_output))


def _packages(workflow: Any) -> Iterator[str]:
    """Yield the packages that a Snakefile or an option names: ours, as for entry points, storages.

    There is no public attribute of the latter.
    """
    if any(_PACKAGE in text for text in read_snakefiles(workflow)):
        yield _PACKAGE
    used = workflow.storage_registry._storages.values()
    yield from sorted({type(provider).__module__.partition(".")[0] for provider in used})


def _arguments(job: Job, found: WorkflowCode) -> Iterator[str]:
    rule, workflow = job.rule, job.rule.workflow
    execution, output = workflow.execution_settings, workflow.output_settings
    main = next(iter(workflow.included))
    code = found.place(main.path) if main.is_local else main.get_path_or_uri(secret_free=True)
    yield from ("--snakefile", str(code))
    # `workdir:` has already taken effect: the workspace mirrors that directory.
    yield from ("--directory", ".", "--workflow-profile", "none", "--executor", "local")
    yield from ("--mode", "remote" if jobs_use_storage(workflow) else "subprocess")
    yield from ("--force", "--nolock", "--ignore-incomplete")
    yield from ("--allowed-rules", rule.name, "--cores", str(max(1, job.threads)))
    yield from ("--force-use-threads", "--target-files-omit-workdir-adjustment")
    yield from ("--max-inventory-time", "0", "--retries", "0", "--attempt", str(job.attempt))
    yield from ("--nocolor", "--no-hooks", "--notemp", "--drop-metadata", "--scheduler", "greedy")
    # Otherwise the source cache would be in the home directory, which a container may not have.
    yield from ("--shared-fs-usage", "software-deployment", "sources")
    if jobs_use_storage(workflow):
        # Suppresses repeated output, but not the job's errors.
        yield from ("--quiet", "progress", "rules", "host")
    else:
        yield from ("persistence", "input-output", "storage-local-copies")
    # Apart from the environments and images that the workspace holds for plain scripts.
    yield from ("--conda-prefix", f"{OURS}/snakemake-conda")
    yield from ("--apptainer-prefix", f"{OURS}/snakemake-images")
    if arguments := workflow.deployment_settings.apptainer_args:
        yield from ("--apptainer-args", arguments)
    if any(is_flagged(path, "protected") for path in job.output):
        yield from ("--omit-flags", "protected")
    switches = {
        "--keep-incomplete": execution.keep_incomplete,
        "--skip-script-cleanup": not execution.cleanup_scripts,
        "--verbose": output.verbose,
        "--printshellcmds": output.printshellcmds,
        "--benchmark-extended": output.benchmark_extended,
        "--replace-workflow-config": workflow.config_settings.replace_workflow_config,
    }
    yield from (option for option, given in switches.items() if given)
    yield from ("--latency-wait", str(execution.latency_wait))
    if execution.shadow_prefix:
        yield from ("--shadow-prefix", str(execution.shadow_prefix))
    if prefix := workflow.workflow_settings.wrapper_prefix:
        yield from ("--wrapper-prefix", prefix)
    scatter = workflow.resource_settings.overwrite_scatter
    yield from _listed("--set-scatter", [f"{name}={n}" for name, n in scatter.items()])
    if (rule.is_run or job.is_shadow) and not rule.is_template_engine:
        # Locally, too, these run in a Snakemake of their own with all built-in defaults.
        yield from ("--default-resources", "tmpdir=system_tmpdir")
    yield from ("--set-threads", f"{rule.name}={job.threads}")
    pinned = list(_pinned(job))
    if own_tmpdir(job) is not None:
        # The job's script has made the directory and set TMPDIR to it.
        pinned.append(f"{rule.name}:tmpdir={Resources.DEFAULTS['bare']['tmpdir']}")
    yield from _listed("--set-resources", pinned)
    yield from _listed("--configfiles", _configfiles(workflow, found))
    yield from _listed("--config", list(workflow.config_settings.config_args or ()))
    yield from _storage(workflow)
    yield from _target(job)


def _storage(workflow: Any) -> Iterator[str]:
    """Yield the storage options, so that a Snakefile's paths in a storage mean the same."""
    known = workflow.spawned_job_args_factory
    yield from shlex.split(known.get_default_storage_provider_args())
    for option in known.get_storage_provider_args():
        yield from shlex.split(option)
    if not jobs_use_storage(workflow):
        yield from ("--local-storage-prefix", str(workflow.storage_settings.local_storage_prefix))


def _copies(job: Job) -> dict[str, str] | None:
    """Return the directories of local copies of storage files, here and for this job at the site.

    Each job has its own directory there, because Snakemake removes the copies after the job. None
    if jobs do not fetch files themselves.
    """
    settings = job.rule.workflow.storage_settings
    if not jobs_use_storage(job.rule.workflow):
        return None
    here, remote = settings.local_storage_prefix, settings.remote_job_local_storage_prefix
    where = _COPIES if remote == here else str(remote)
    return {"here": str(here), "there": f"{where}/{job_identity(job)[:16]}"}


def _listed(option: str, values: list[str]) -> list[str]:
    return [option, *values] if values else []


def _configfiles(workflow: Any, found: WorkflowCode) -> list[str]:
    """Return the config files for the command line of the site's Snakemake.

    These are the files of this run's command line. If a `configfile:` is outside the working
    directory, and so has another path at the site, add those of the code.
    """
    given = [found.place(path) for path in workflow.overwrite_configfiles]
    # With `workdir:`, relative ones are found where they are relative to.
    declared = [
        found.place(resolve_recorded(workflow, path))
        for path in workflow.configfiles
        if os.path.isabs(path) or not enters_workdir(workflow)
    ]
    declared = [path for path in declared if path not in given]
    elsewhere = any(path.startswith(ELSEWHERE) for path in declared)
    # In the same order as on this machine, so that keys are in the same order, too.
    return [*given, *declared, *given] if elsewhere else given


def _pinned(job: Job) -> Iterator[str]:
    """Yield the job's resources with their values here. Functions may return others at the site."""
    resources = dict(job.resources.items())
    for name, value in resources.items():
        if name.startswith("_") or name in ("tmpdir", "shell_exec"):
            continue
        # A size has three names, of which Snakemake accepts one.
        if f"{name}_mb" in resources or f"{name.removesuffix('_mib')}_mb" in resources:
            continue
        if isinstance(value, bool) or not isinstance(value, int | str):
            continue
        # Snakemake expands variables and `~` in a text before it evaluates that.
        if isinstance(value, str) and ("$" in value or value.startswith("~")):
            continue
        if isinstance(value, TBDString):  # depends on a file that the job's group makes
            continue
        yield f"{job.rule.name}:{name}={value!r}"


def _target(job: Job) -> list[str]:
    """Return the job as a target: its rule and wildcards, or an output for unusual wildcards.

    Snakemake ends a wildcard's value at a comma, and strips quotes around it.
    """
    wildcards = [f"{name}={value}" for name, value in job.wildcards_dict.items()]
    if job.output and not all(map(_PLAIN.fullmatch, job.wildcards_dict.values())):
        return ["--", _target_name(job)]
    return ["--target-jobs", f"{job.rule.name}:{','.join(wildcards)}"]


def _target_name(job: Job) -> str:
    """Return an output for the command line, which expects no prefix of the default storage.

    Raises:
        UserError: there is a default storage, and no output is in it.
    """
    settings = job.rule.workflow.storage_settings
    if settings.default_storage_provider is None:
        return str(job.output[0])
    prefix = settings.default_storage_prefix or ""
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    for path in job.output:
        if path.is_storage and str(path.storage_object.query).startswith(prefix):
            return str(path.storage_object.query).removeprefix(prefix)
    raise UserError(
        "its wildcards have values with special characters, and none of its outputs is in the"
        " default storage",
        where=f"rule {job.rule.name}",
        do="Rename these files, or declare an output without storage()",
    )
