"""Decide whether this machine or the jobs themselves fetch and store files of a storage.

By default Snakemake fetches and stores on this machine, and jobs get local copies like any other
file. With `--shared-fs-usage none` it does neither for jobs at a site. Each of them is then a full
job, whose own Snakemake reaches the storage from the node (9.27: `jobs.py` `postprocess`, `dag.py`
`retrieve_storage_inputs`, `handle_storage`).
"""

import json
from collections.abc import Iterable
from typing import Any, Final

from snakemake_interface_executor_plugins.settings import SharedFSUsage

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.paths.job_paths import is_kept_in_storage

WORDS: Final = "files that its job fetches and stores itself (--shared-fs-usage)"
"""Why a job is a full job, as words that follow "has"."""

_TOGETHER: Final = {
    "input-output": SharedFSUsage.INPUT_OUTPUT,
    "storage-local-copies": SharedFSUsage.STORAGE_LOCAL_COPIES,
}
"""With only one of them, Snakemake would fetch files that it does not store, or vice versa."""


def check_shared(usage: Iterable[SharedFSUsage]) -> None:
    """Check that either this machine or the jobs both fetch and store.

    Raises:
        UserError: one would fetch and the other store.
    """
    given = [name for name, item in _TOGETHER.items() if item in usage]
    if len(given) == 1:
        [lacking] = _TOGETHER.keys() - given
        raise UserError(
            f"--shared-fs-usage names {given[0]} without {lacking}: files of a storage would be"
            " fetched on one machine and stored from the other",
            do=f"Add {lacking}, or remove the option, to let this machine fetch and store. Use"
            " --shared-fs-usage none to let the jobs do both",
        )


def jobs_use_storage(workflow: Any) -> bool:
    """Return whether jobs at a site fetch and store files of a storage themselves."""
    return SharedFSUsage.INPUT_OUTPUT not in workflow.storage_settings.shared_fs_usage


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
