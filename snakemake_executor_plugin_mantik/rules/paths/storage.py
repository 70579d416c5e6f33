"""Decide who fetches and stores files of a storage: this machine, the jobs, or nobody.

By default Snakemake fetches and stores on this machine, and jobs get local copies like any other
file. With `--shared-fs-usage none` it does neither for jobs at a site. Each of them is then a full
job, whose own Snakemake reaches the storage from the node (9.27: `jobs.py` `postprocess`, `dag.py`
`retrieve_storage_inputs`, `handle_storage`).

With the default storage provider `mantik`, outputs stay at the site where a job makes them: nothing
is fetched or stored, and all jobs stay what they are.
"""

import json
from collections.abc import Iterable
from typing import Any, Final

from snakemake.io import is_flagged
from snakemake_interface_executor_plugins.settings import SharedFSUsage

from ...common.errors import UserError
from ...storage.paths import find_dataset, is_ours, storable_path
from .. import Job
from .job_paths import is_kept_in_storage

WORDS: Final = "files that its job fetches and stores itself (--shared-fs-usage)"
"""Why a job runs a Snakemake at the site, as words that follow "has"."""

_TOGETHER: Final = {
    "input-output": SharedFSUsage.INPUT_OUTPUT,
    "storage-local-copies": SharedFSUsage.STORAGE_LOCAL_COPIES,
}
"""With only one of them, Snakemake would fetch files that it does not store, or vice versa."""

PROVIDER: Final = "mantik"
"""Name of the storage provider whose files stay where they were made."""

SHARED: Final = "persistence software-deployment sources source-cache"
"""What `--shared-fs-usage` has to be while files stay."""


def check_shared(settings: Any) -> None:
    """Check that either this machine or the jobs both fetch and store, or, if files stay, neither.

    `settings` are Snakemake's storage settings.

    Raises:
        UserError: one would fetch and the other store; or files are to stay and to be fetched.
    """
    usage = settings.shared_fs_usage
    stay = settings.default_storage_provider == PROVIDER
    if stay and any(item in usage for item in _TOGETHER.values()):
        raise UserError(
            "outputs are to stay at their sites (--default-storage-provider"
            f" {PROVIDER}), but --shared-fs-usage lets Snakemake fetch all of them",
            do=f"Give --shared-fs-usage {SHARED}",
        )
    given = [name for name, item in _TOGETHER.items() if item in usage]
    if len(given) == 1:
        [lacking] = _TOGETHER.keys() - given
        raise UserError(
            f"--shared-fs-usage names {given[0]} without {lacking}: files of a storage would be"
            " fetched on one machine and stored from the other",
            do=f"Add {lacking}, or remove the option, to let this machine fetch and store. Use"
            " --shared-fs-usage none to let the jobs do both",
        )


def files_stay(workflow: Any) -> bool:
    """Return whether all outputs stay at the sites where jobs make them."""
    return bool(workflow.storage_settings.default_storage_provider == PROVIDER)


def jobs_use_storage(workflow: Any) -> bool:
    """Return whether jobs at a site fetch and store files of a storage themselves."""
    shared = SharedFSUsage.INPUT_OUTPUT in workflow.storage_settings.shared_fs_usage
    return not shared and not files_stay(workflow)


_COMES: Final = ("touch", "protected", "update")
"""Flags of outputs that never stay at a site: Snakemake handles them on this machine."""


def may_stay(job: Job, path: Any) -> bool:
    """Return whether an output of a job may stay at the site, whatever its name is."""
    comes = job.is_checkpoint or any(is_flagged(path, flag) for flag in _COMES)
    return storable_path(path) is not None and not comes


def stored_mistake(job: Job, directive: str | None) -> str | None:
    """Return why a job cannot run with its files of the storage provider `mantik`, or None.

    The answer follows "rule NAME". `directive` is why it runs a Snakemake, if it does.
    """
    files = [*job.input, *job.output, *job.log]
    stay = files_stay(job.rule.workflow)
    if not stay and not any(map(is_ours, files)):
        return None
    if directive:
        return (
            f"has {directive} and needs a Snakemake at the site, which does not know outputs that"
            " stay there (use shell: or script:, make it a localrule, or run without"
            f" {'--default-storage-provider mantik' if stay else 'storage.mantik(…)'})"
        )
    for path in files:
        if stay and path.is_storage and not is_ours(path):
            return (
                f"uses {path.storage_object.print_query}, but where outputs stay at sites, no other"
                " storage is fetched (make it a localrule, or run without"
                " --default-storage-provider mantik)"
            )
    return _named_mistake(job)


def _named_mistake(job: Job) -> str | None:
    """Return what is wrong with the outputs that `storage.mantik` names, or None."""
    for path in [*job.output, *job.log]:
        if (dataset := find_dataset(path)) is not None:
            return f"makes {dataset}, but datasets are read-only (use storage.mantik with a path)"
        if not is_ours(path) or path.storage_object.retrieve:
            continue
        ensured = path.flags.get("ensure") or {}
        if ensured.get("checksum_algorithm") in ("md5", "sha1"):
            return (
                f"ensures the MD5 or SHA-1 of {path.storage_object.query}, which stays at a site"
                " (give its SHA-256)"
            )
        if not may_stay(job, path):
            return (
                f"makes {path.storage_object.query}, which cannot stay at a site: it has a flag"
                " that Snakemake handles here, or is a checkpoint's (remove storage.mantik)"
            )
    return None


def local_mistake(job: Job) -> str | None:
    """Return why a local job cannot run with its files of the provider `mantik`, or None."""
    if job.is_norun:
        return None
    if files_stay(job.rule.workflow) and not job.rule.workflow.is_local(job.rule):
        # Snakemake 9.27 runs it here: `Job.is_local`.
        flagged = [str(path) for path in [*job.input, *job.output] if is_flagged(path, "local")]
        return (
            f"flags {', '.join(flagged)} with local(…), so that Snakemake would run it on this"
            " machine (leave local(…) out: inputs are uploaded anyway, and smk-mantik get brings"
            " outputs here; or name the rule in localrules: if it is to run here)"
        )
    for path in [*job.input, *job.output]:
        if is_ours(path) and not path.storage_object.retrieve:
            return (
                f"runs on this machine and uses {find_dataset(path) or path.storage_object.query},"
                " which stays at a site (let the rule run at the site, or use the profile with"
                " which local rules fetch what they need: smk-mantik docs files-stay)"
            )
    return None


def is_unstaged(job: Job, path: Any) -> bool:
    """Return whether a file is only in a storage, and so neither uploaded nor downloaded."""
    stored = bool(getattr(path, "is_storage", False))
    return stored and (jobs_use_storage(job.rule.workflow) or is_kept_in_storage(path))


def storage_secrets(workflow: Any) -> dict[str, str]:
    """Return variables that storage plugins read, credentials above all, if jobs need them."""
    known = workflow.spawned_job_args_factory.get_storage_provider_envvars
    return dict(known()) if jobs_use_storage(workflow) else {}


async def storage_versions(jobs: Iterable[Job]) -> str:
    """Return the modification times of what `jobs` read from storages, as text.

    They detect changes of inputs, as the comparison of files does for inputs on this machine.

    Raises:
        WorkflowError: a storage does not provide the times.
    """
    jobs = list(jobs)
    made = {path for job in jobs for path in job.output}
    read = {path for job in jobs for path in job.input if path.is_storage} - made
    return json.dumps([[path, (await path.mtime()).storage()] for path in sorted(read)])


def refresh_storage(jobs: Iterable[Job]) -> None:
    """Replace the cached storage objects of directories that `jobs` have just stored.

    The S3 plugin (0.3.6) checks only once, before the job, whether an object is a directory.
    """
    for job in jobs:
        made = {path for path in job.output if path.is_storage and path.is_directory}
        readers = (path for other in job.dag.depending[job] for path in other.input if path in made)
        for path in [*made, *readers]:
            known = path.storage_object
            path.flags["storage_object"] = known.provider.object(
                known.query, retrieve=known.retrieve, keep_local=known.keep_local
            )
