"""Files in a storage: who fetches and stores them, this machine or the jobs themselves.

By default Snakemake fetches and stores here, and jobs get local copies like any other file. With
`--shared-fs-usage none` it does neither for jobs that run at a site: each of them is a full one,
whose own Snakemake reaches the storage from the node (9.27: `jobs.py` `postprocess`, `dag.py`
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
"""Why a job is a full one, in words that follow "has"."""

_TOGETHER: Final = {
    "input-output": SharedFSUsage.INPUT_OUTPUT,
    "storage-local-copies": SharedFSUsage.STORAGE_LOCAL_COPIES,
}
"""With one of both, Snakemake fetches what it does not store, or the other way round."""


def check_shared(usage: Iterable[SharedFSUsage]) -> None:
    """See to it that either this machine or the jobs fetch and store.

    Raises:
        UserError: neither would do all of it.
    """
    given = [name for name, item in _TOGETHER.items() if item in usage]
    if len(given) == 1:
        [lacking] = _TOGETHER.keys() - given
        raise UserError(
            f"--shared-fs-usage names {given[0]} without {lacking}: files of a storage would be"
            " fetched on one machine and stored from the other",
            do=f"Name {' and '.join(_TOGETHER)}, or leave the option out, and this machine fetches"
            " and stores; name neither, as in --shared-fs-usage none, and the jobs do",
        )


def jobs_use_storage(workflow: Any) -> bool:
    """Whether jobs at a site fetch and store themselves."""
    return SharedFSUsage.INPUT_OUTPUT not in workflow.storage_settings.shared_fs_usage


def is_unstaged(job: Job, path: Any) -> bool:
    """Whether a file of a job is neither sent nor fetched, because it is in a storage only."""
    if not getattr(path, "is_storage", False):
        return False
    return jobs_use_storage(job.rule.workflow) or is_kept_in_storage(path)


def storage_secrets(workflow: Any) -> dict[str, str]:
    """What storage plugins read of the environment, if jobs need it: credentials above all."""
    if not jobs_use_storage(workflow):
        return {}
    return dict(workflow.spawned_job_args_factory.get_storage_provider_envvars())


async def storage_versions(jobs: Iterable[Job]) -> str:
    """When what `jobs` read from storages was changed, as text: files here would be compared.

    Raises:
        WorkflowError: a storage does not tell.
    """
    jobs = list(jobs)
    made = {path for job in jobs for path in job.output}
    read = {path for job in jobs for path in job.input if path.is_storage} - made
    return json.dumps([[path, (await path.mtime()).storage()] for path in sorted(read)])


def refresh_storage(jobs: Iterable[Job]) -> None:
    """Forget what plugins remember of the directories that `jobs` have stored just now.

    The S3 plugin (0.3.6) looks only once, here before the job, whether something is a directory.
    """
    for job in jobs:
        made = {path for path in job.output if path.is_storage and path.is_directory}
        readers = (path for other in job.dag.depending[job] for path in other.input if path in made)
        for path in [*made, *readers]:
            known = path.storage_object
            path.flags["storage_object"] = known.provider.object(
                known.query, retrieve=known.retrieve, keep_local=known.keep_local
            )
