"""Choose the jobs that become MLflow runs, and describe them."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from snakemake.common.tbdstring import TBDString

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.mlproject.entry import read_call
from snakemake_executor_plugin_mantik.mlproject.project import find_bound_entry_point
from snakemake_executor_plugin_mantik.tracking.run import TrackedMember, TrackedRun, flatten_config

from . import Job
from .paths.job_paths import plain_params
from .resources import TRACK_RESOURCE
from .units import job_display_name

Which = Literal["mlproject", "all", "none"]
"""Values of `--mantik-track`: track the jobs that run an entry point, all jobs, or none."""
_ONE: Final = "one"
_WORDS: Final[Mapping[str, bool]] = {
    "all": True, "true": True, _ONE: True, "none": False, "false": False,
}  # fmt: skip


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

    Raises:
        UserError: the resource `mantik_track` of a rule is invalid.
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
    shown = wildcards | flatten_config(plain, str)
    return TrackedRun(None, wildcards, params=shown, one=one)
