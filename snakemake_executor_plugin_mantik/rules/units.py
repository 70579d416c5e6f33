"""Jobs and groups of jobs alike: list them, their members and their names."""

import hashlib
import json
import os
import uuid
from typing import Any

from snakemake_executor_plugin_mantik.journal import job_name
from snakemake_executor_plugin_mantik.rules import Job


def list_units(dag: Any) -> list[Job]:
    """The jobs and groups of a DAG that are still to run, those that run here left out."""
    found: dict[Job, None] = {}
    for job in dag.needrun_jobs():
        unit = dag.get_job_group(job) or job
        if not unit.is_local:
            found[unit] = None
    return list(found)


def list_members(job: Job) -> list[Job]:
    """The jobs that a group consists of, in an order that is the same in every run; or the job."""
    if not job.is_group():
        return [job]
    return [member for layer in list_layers(job) for member in layer]


def member_title(job: Job) -> str:
    """What a job or group is called in messages."""
    if not job.is_group():
        return f"rule {job.rule.name}"
    rules = ", ".join(sorted(job.rules))
    return f"group {job.groupid} (rules {rules})" if _named(job) else f"the group of rules {rules}"


def unit_name(unit: Job) -> str:
    """A job's name; of a group its rules, and the wildcards that have one value in all of it."""
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
    """Snakemake's order, in which jobs of a layer stand in an order of chance."""
    return [sorted(layer, key=lambda job: (job_display_name(job), job_identity(job)))
            for layer in group.toposorted]  # fmt: skip


def _named(group: Job) -> bool:
    """Whether somebody gave the group its name: Snakemake itself takes a UUID."""
    try:
        uuid.UUID(str(group.groupid))
    except ValueError:
        return True
    return False


def job_identity(job: Job) -> str:
    """A name for what the job is: its rule, wildcards and outputs."""
    wildcards = sorted((key, str(value)) for key, value in job.wildcards_dict.items())
    parts = [job.rule.name, wildcards, [plain_path(path) for path in job.output]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def plain_path(path: Any) -> str:
    """A path as archives and listings have it: without `./` and `//`."""
    return os.path.normpath(str(path))


def job_display_name(job: Job) -> str:
    """Rule and wildcards, readable, as the journal finds the job."""
    return job_name(job.rule.name, job.wildcards_dict)
