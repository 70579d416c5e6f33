"""Which jobs become MLflow runs, and what is told of them there."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from snakemake.common.tbdstring import TBDString

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.mlproject.call import read_call
from snakemake_executor_plugin_mantik.mlproject.project import find_bound_entry_point
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.resources import TRACK_RESOURCE
from snakemake_executor_plugin_mantik.rules.units import job_display_name
from snakemake_executor_plugin_mantik.tracking.run import TrackedRun
from snakemake_executor_plugin_mantik.tracking.workflow import flatten_config

Which = Literal["mlproject", "all", "none"]
"""What `--mantik-track` says: the jobs that run an entry point, all, or none."""
_WORDS: Final[Mapping[str, bool]] = {"all": True, "true": True, "none": False, "false": False}


def tracking_request(job: Job) -> bool | None:
    """What a rule says itself of whether its jobs are tracked; None if it says nothing.

    Raises:
        UserError: it says something else.
    """
    value = job.resources.get(TRACK_RESOURCE)
    if value is None or isinstance(value, TBDString):
        return None
    # Snakemake takes numbers for resources, and makes no difference between 1 and True.
    if value in (0, 1):
        return bool(value)
    known = _WORDS.get(str(value).strip().lower())
    if known is None:
        raise UserError(
            f"it has to be all or none (or True, False), found {value!r}",
            where=f"the resource {TRACK_RESOURCE}",
            do="Correct it, or leave it out: --mantik-track then says which jobs are tracked",
        )
    return known


def is_tracked(members: Sequence[Job], which: Which) -> bool:
    """Whether a job, or a group of these jobs, becomes a run.

    A group is one job at its site, and one run: if one of its members asks for it, or all are
    tracked anyway. Without that its entry points have none.

    Raises:
        UserError: a rule says something that makes no sense.
    """
    if which == "none":
        return False
    says = [tracking_request(member) for member in members]
    if len(members) > 1:
        return True in says or (which == "all" and False not in says)
    if says[0] is not None:
        return says[0]
    return which == "all" or _runs_entry_point(members[0])


def untracked_entry_points(members: Sequence[Job], which: Which) -> set[str]:
    """The rules of a group that run entry points although the group has no run."""
    if len(members) == 1 or which == "none" or is_tracked(members, which):
        return set()
    return {
        member.rule.name
        for member in members
        if _runs_entry_point(member) and tracking_request(member) is None
    }


def _runs_entry_point(job: Job) -> bool:
    params = job.rule.params
    return find_bound_entry_point(params) is not None or read_call(params) is not None


def make_tracked_run(members: Sequence[Job]) -> TrackedRun:
    """What a job's run is made with: an entry point's arguments, else wildcards and parameters.

    Of parameters those count that have names and plain values.
    """
    if len(members) > 1:
        return TrackedRun(members=tuple(map(job_display_name, members)))
    [job] = members
    wildcards = {key: str(value) for key, value in job.wildcards_dict.items()}
    if (call := read_call(job.params)) is not None:
        return TrackedRun(call, wildcards)
    plain = {
        name: value
        for name, value in job.params.items()
        if isinstance(value, str | int | float) and not isinstance(value, TBDString)
    }
    return TrackedRun(None, wildcards, params=wildcards | flatten_config(plain, str))
