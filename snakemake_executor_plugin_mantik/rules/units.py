"""List jobs and groups of jobs, their members and names, and those that become MLflow runs."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from snakemake.common.tbdstring import TBDString
from snakemake.io import IOFile

from ..common.errors import UserError
from ..journal import job_name
from ..mlproject.entry import read_call
from ..mlproject.project import find_bound_entry_point
from ..storage.paths import storable_path
from ..tracking.run import TrackedMember, TrackedRun, flatten_config
from . import Job
from .paths.job_paths import plain_params
from .resources import TRACK_RESOURCE


def list_units(dag: Any) -> list[Job]:
    """Return the jobs and groups of a DAG that are still to run at sites."""
    found: dict[Job, None] = {}
    for job in dag.needrun_jobs():
        unit = dag.get_job_group(job) or job
        if not unit.is_local:
            found[unit] = None
    return list(found)


def find_products(dag: Any) -> frozenset[str]:
    """Return the paths that jobs read and make, logs and benchmark files among them.

    They are not uploaded as project files: each job uploads its own inputs.
    """
    return _products_of(dag, len(dag))


@lru_cache(maxsize=1)
def _products_of(dag: Any, _: int) -> frozenset[str]:
    """Return the paths, anew if the number of jobs that run or have ended is another one."""
    return frozenset(
        storable_path(path) or os.path.relpath(path)
        for job in dag.jobs
        for path in (*job.input, *job.output, *job.log, job.benchmark)
        if path is not None
    )


@dataclass(frozen=True)
class Products:
    """The paths of `jobs`, and of what rules of the workflow made in runs for other targets."""

    workflow: Any
    jobs: frozenset[str]

    def __contains__(self, path: object) -> bool:
        workflow = self.workflow
        return path in self.jobs or workflow.is_rule(workflow.persistence.rule(IOFile(path)))


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
    return re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(group.groupid)) is None


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


Which = Literal["mlproject", "all", "none"]
"""Values of `--mantik-track`: track the jobs that run an entry point, all jobs, or none."""
_ONE: Final = "one"
_WORDS: Final = {"all": True, "true": True, _ONE: True, "none": False, "false": False}


def tracking_request(job: Job) -> bool | None:
    """Read a rule's resource `mantik_track`; None if it is not set or not known yet.

    Raises:
        UserError: the value is invalid.
    """
    value = job.resources.get(TRACK_RESOURCE)
    if value is None or isinstance(value, TBDString):
        return None
    # Snakemake accepts numbers as resources, and does not distinguish 1 and True.
    if value in (0, 1):
        return bool(value)
    known = _WORDS.get(str(value).strip().lower())
    if known is None:
        raise UserError(
            f"it has to be all, one or none (or True, False), found {value!r}",
            where=f"the resource {TRACK_RESOURCE}",
            do="Correct it, or remove it: --mantik-track then decides which jobs are tracked",
        )
    return known


def is_tracked(members: Sequence[Job], which: Which) -> bool:
    """Return whether a job, or a group of these jobs, becomes an MLflow run.

    If `which` is `none`, no job does. Otherwise the resource `mantik_track` of a job decides, and
    without it `which`. A group is one job at its site with one run. It has one if a member requests
    it, if all jobs are tracked and no member opts out, or if a member runs an entry point: this
    member's run needs one above it.
    """
    if which == "none":
        return False
    says = [tracking_request(member) for member in members]
    if len(members) > 1:
        tracked = True in says or (which == "all" and False not in says)
        return tracked or any(map(_has_own_run, members))
    if says[0] is not None:
        return says[0]
    return which == "all" or _runs_entry_point(members[0])


def _has_own_run(member: Job) -> bool:
    """Return whether a member of a tracked group has a run below the group's."""
    return _runs_entry_point(member) and tracking_request(member) is not False


def _runs_entry_point(job: Job) -> bool:
    params = job.rule.params
    return find_bound_entry_point(params) is not None or read_call(params) is not None


def make_tracked_run(members: Sequence[Job]) -> TrackedRun:
    """Describe a job's run: an entry point's arguments, else wildcards and parameters.

    Only parameters with names and plain values are included. A group's run has only the names of
    its members, and those that run entry points have runs below it.
    """
    if len(members) > 1:
        names = tuple(map(job_display_name, members))
        own = {
            number: TrackedMember(names[number], member.rule.name, make_tracked_run([member]))
            for number, member in enumerate(members)
            if _has_own_run(member)
        }
        return TrackedRun(members=names, of_members=own)
    [job] = members
    wildcards = {key: str(value) for key, value in job.wildcards_dict.items()}
    one = str(job.resources.get(TRACK_RESOURCE)).strip().lower() == _ONE
    params = plain_params(job)
    if (call := read_call(params)) is not None:
        return TrackedRun(call, wildcards, one=one)
    plain = {
        name: value
        for name, value in params.items()
        if isinstance(value, str | int | float) and not isinstance(value, TBDString)
    }
    return TrackedRun(None, wildcards, params=wildcards | flatten_config(plain, str), one=one)
