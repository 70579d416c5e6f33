"""List jobs and groups of jobs, their members and their names."""

import hashlib
import json
import os
import uuid
from typing import Any

from snakemake_executor_plugin_mantik.journal import job_name

from . import Job


def list_units(dag: Any) -> list[Job]:
    """Return the jobs and groups of a DAG that are still to run at sites."""
    found: dict[Job, None] = {}
    for job in dag.needrun_jobs():
        unit = dag.get_job_group(job) or job
        if not unit.is_local:
            found[unit] = None
    return list(found)


def list_members(job: Job) -> list[Job]:
    """Return the members of a group, in the same order in every run; or the job itself."""
    if not job.is_group():
        return [job]
    return [member for layer in list_layers(job) for member in layer]


def member_title(job: Job) -> str:
    """Return the title of a job or group for messages, which names its rules."""
    if not job.is_group():
        return f"rule {job.rule.name}"
    rules = ", ".join(sorted(job.rules))
    return f"group {job.groupid} (rules {rules})" if _named(job) else f"the group of rules {rules}"


def unit_name(unit: Job) -> str:
    """Return a job's name; for a group, its rules and the wildcards that have a single value."""
    members = list_members(unit)
    if len(members) == 1:
        return job_display_name(members[0])
    values: dict[str, set[str]] = {}
    for member in members:
        for key, value in member.wildcards_dict.items():
            values.setdefault(key, set()).add(str(value))
    common = {key: of.pop() for key, of in values.items() if len(of) == 1}
    group = f"group {unit.groupid}" if _named(unit) else "group"
    return job_name(f"{group}: {', '.join(sorted(unit.rules))}", common)


def list_layers(group: Job) -> list[list[Job]]:
    """Return a group's layers. Snakemake orders the jobs within a layer at random; this sorts."""
    return [sorted(layer, key=lambda job: (job_display_name(job), job_identity(job)))
            for layer in group.toposorted]  # fmt: skip


def keep_groups_current(dag: Any) -> None:
    """Have Snakemake ask the present members of a group whether it is ready, from now on.

    When it makes its DAG, and when a checkpoint has ended, Snakemake (9.27) evaluates the jobs that
    read the checkpoint again, but leaves their old selves in the layers of their groups, with
    placeholders as inputs and without dependencies. Depending on the order of a set, it took such a
    group for ready while the checkpoint ran.
    """
    update = dag.update_groups

    def update_groups() -> None:
        update()
        for group in filter(None, map(dag.get_job_group, dag.needrun_jobs())):
            _renew_layers(group)

    dag.update_groups = update_groups
    update_groups()
    dag._ready_jobs = {
        job for job in dag.ready_jobs if not job.is_group() or all(map(dag._ready, job))
    }


def _renew_layers(group: Job) -> None:
    """Replace members of a group that Snakemake has evaluated again.

    The new ones are in no group, or in this one. Other jobs in `group.jobs` belong to groups that
    it was merged with once.
    """
    dag = group.dag
    layered = {job for layer in group.toposorted for job in layer}
    if all(map(dag.needrun, layered)):
        return
    present = frozenset(
        job
        for job in group.jobs
        if dag.needrun(job) and (job in layered or dag.get_job_group(job) in (None, group))
    )
    group.toposorted = list(dag.toposorted(present, inherit_pipe_dependencies=True))


def _named(group: Job) -> bool:
    """Return whether the user named the group. Snakemake itself uses a UUID as name."""
    try:
        uuid.UUID(str(group.groupid))
    except ValueError:
        return True
    return False


def job_identity(job: Job) -> str:
    """Return a hash that identifies the job by rule, wildcards and outputs."""
    wildcards = sorted((key, str(value)) for key, value in job.wildcards_dict.items())
    parts = [job.rule.name, wildcards, [plain_path(path) for path in job.output]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def plain_path(path: Any) -> str:
    """Return a path as it is in archives and listings, without `./` and `//`."""
    return os.path.normpath(str(path))


def job_display_name(job: Job) -> str:
    """Return the job's readable name, its rule and wildcards, as the journal stores it."""
    return job_name(job.rule.name, job.wildcards_dict)
