"""Serve Snakemake's cache between workflows (`cache:`, `--cache`) for jobs at sites.

Snakemake serves it for its local executor only. Here, single jobs whose outputs are in the cache do
not run at a site, and outputs that a site made are stored in the cache, also those of groups.
"""

from typing import Any

from snakemake_executor_plugin_mantik.rules import Job


async def fetch_cached(workflow: Any, job: Job) -> bool:
    """Restore a job's outputs, but not a group's, from the cache; return whether they were there.

    Raises:
        WorkflowError: the cache cannot be read.
    """
    from snakemake.exceptions import CacheMissException

    if job.is_group() or not is_cached(workflow, job):
        return False
    try:
        await job.rule.cache.fetch(job)
    except CacheMissException:
        return False
    return True


async def store_cached(workflow: Any, job: Job) -> None:
    """Store the outputs of a job, or of each job of a group, in the cache if its rule says so.

    Raises:
        WorkflowError: the cache cannot be written.
    """
    for member in job.jobs if job.is_group() else (job,):
        if is_cached(workflow, member) and not await member.rule.cache.exists(member):
            await member.rule.cache.store(member)


def is_cached(workflow: Any, job: Job) -> bool:
    """Return whether Snakemake's cache serves a job."""
    from snakemake_executor_plugin_mantik.rules.paths.storage import jobs_use_storage
    from snakemake_executor_plugin_mantik.storage.paths import uses_provider

    # Jobs that use the storage themselves, or whose files stay, leave no outputs here. Without a
    # location for the cache, Snakemake reports that it runs without one, and `rule.cache.fetch`
    # would raise.
    enabled = workflow.output_file_cache is not None and not (
        jobs_use_storage(workflow) or uses_provider(workflow)
    )
    return bool(enabled and job.rule.cache and job.rule.cache.output)
