"""Snakemake's cache between workflows (`cache:`, `--cache`), which only its local executor serves.

What is in the cache is not run at a site; what a site made is put there.
"""

from typing import Any

from snakemake_executor_plugin_mantik.rules import Job


async def fetch_cached(workflow: Any, job: Job) -> bool:
    """Put a job's outputs into place if they are in the cache, and say whether they are.

    Raises:
        WorkflowError: the cache cannot be read.
    """
    from snakemake.exceptions import CacheMissException

    if job.is_group() or not _cached(workflow, job):
        return False
    try:
        await job.rule.cache.fetch(job)
    except CacheMissException:
        return False
    return True


async def store_cached(workflow: Any, job: Job) -> None:
    """Put what a job, or each job of a group, has made into the cache, where it asks for that.

    Raises:
        WorkflowError: the cache cannot be written.
    """
    for member in job.jobs if job.is_group() else (job,):
        if _cached(workflow, member) and not await member.rule.cache.exists(member):
            await member.rule.cache.store(member)


def _cached(workflow: Any, job: Job) -> bool:
    from snakemake_executor_plugin_mantik.rules.paths.storage import jobs_use_storage

    # Where jobs store themselves, nothing of theirs is here. Without a place for the cache there is
    # none: Snakemake says that it does without, and its `fetch_cached` would raise.
    asked = workflow.output_file_cache is not None and not jobs_use_storage(workflow)
    return bool(asked and job.rule.cache and job.rule.cache.output)
