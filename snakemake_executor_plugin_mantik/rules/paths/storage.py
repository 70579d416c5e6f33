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

from snakemake_interface_executor_plugins.settings import SharedFSUsage

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.paths.job_paths import is_kept_in_storage
from snakemake_executor_plugin_mantik.storage.paths import PREFIX

WORDS: Final = "files that its job fetches and stores itself (--shared-fs-usage)"
"""Why a job is a full job, as words that follow "has"."""

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
    if settings.default_storage_provider == PROVIDER:
        if settings.default_storage_prefix.rstrip("/") != PREFIX:
            raise UserError(
                f"--default-storage-prefix is {settings.default_storage_prefix!r}",
                do=f"With --default-storage-provider {PROVIDER}, give"
                f" --default-storage-prefix {PREFIX}",
            )
        if any(item in usage for item in _TOGETHER.values()):
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
    """Return whether outputs stay at the sites where jobs make them."""
    return bool(workflow.storage_settings.default_storage_provider == PROVIDER)


def jobs_use_storage(workflow: Any) -> bool:
    """Return whether jobs at a site fetch and store files of a storage themselves."""
    shared = SharedFSUsage.INPUT_OUTPUT in workflow.storage_settings.shared_fs_usage
    return not shared and not files_stay(workflow)


def is_unstaged(job: Job, path: Any) -> bool:
    """Return whether a file is only in a storage, and so neither uploaded nor downloaded."""
    if not getattr(path, "is_storage", False):
        return False
    return jobs_use_storage(job.rule.workflow) or is_kept_in_storage(path)


def storage_secrets(workflow: Any) -> dict[str, str]:
    """Return variables that storage plugins read, credentials above all, if jobs need them."""
    if not jobs_use_storage(workflow):
        return {}
    return dict(workflow.spawned_job_args_factory.get_storage_provider_envvars())


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
