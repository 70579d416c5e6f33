"""Describe schedules and their due times to users, and as JSON to programs."""

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.runs.directories import RunDirectory, runs_home
from snakemake_executor_plugin_mantik.runs.local_runs import read_local_run
from snakemake_executor_plugin_mantik.runs.settlement import run_status

from .schedules import Firing, FiringState, Schedule
from .store import ScheduleStore
from .submit import format_moment, is_under_way


def describe_time(schedule: Schedule, firing: Firing) -> str:
    """Return when the firing was due, in the schedule's time zone."""
    return format_moment(datetime.fromtimestamp(firing.due, ZoneInfo(schedule.tz)))


def describe_outcome(store: ScheduleStore, schedule: Schedule, firing: Firing) -> str:
    """Describe the outcome of a firing so far."""
    if firing.state is FiringState.FIRING:
        return _pending(store, schedule, firing)
    return {
        FiringState.FIRED: f"run {firing.run} ({_run_state(firing.run)})",
        FiringState.MISSED: f"missed: {firing.told}",
        FiringState.FAILED: f"not submitted, given up: {firing.told}",
    }[firing.state]


def _run_state(run_id: str) -> str:
    """Return the state of a run from its directory alone, without a request to MLflow."""
    try:
        run = read_local_run(RunDirectory(runs_home() / run_id))
    except MantikError:
        return "not here any more"
    if run.gone:
        return "its controller is gone: smk-mantik runs continue"
    return "under way" if run.end is None else run_status(run.directory)


def _pending(store: ScheduleStore, schedule: Schedule, firing: Firing) -> str:
    if is_under_way(store.path.parent, schedule.id):
        return "is being submitted"
    again = format_moment(datetime.fromtimestamp(firing.retry, ZoneInfo(schedule.tz)))
    if firing.begun:
        return f"its submission was interrupted, and continues after {again}"
    if not firing.attempts:
        return "about to be submitted"
    return f"not submitted yet, again after {again}: {firing.told}"


def schedule_as_json(store: ScheduleStore, schedule: Schedule, now: datetime) -> dict[str, Any]:
    """Return a schedule as JSON, with its last claimed due time and the outcome."""
    due = next(schedule.due(now), None)
    last = store.history(schedule.id, 1)
    return {
        "name": schedule.name,
        "run": schedule.run,
        "cron": schedule.cron,
        "tz": schedule.tz,
        "until": schedule.until.isoformat() if schedule.until else None,
        "site": schedule.site or None,
        "account": schedule.account or None,
        "missed": schedule.missed,
        "next": due.isoformat() if due else None,
        "last": firing_as_json(schedule, last[0]) if last else None,
    }


def firing_as_json(schedule: Schedule, firing: Firing) -> dict[str, Any]:
    """Return a firing and its outcome as JSON."""
    zone = ZoneInfo(schedule.tz)
    waits = firing.state is FiringState.FIRING
    return {
        "due": datetime.fromtimestamp(firing.due, zone).isoformat(),
        "state": firing.state,
        "run": firing.run or None,
        "run_state": _run_state(firing.run) if firing.run else None,
        "attempts": firing.attempts,
        "reason": firing.told or None,
        "retry": datetime.fromtimestamp(firing.retry, zone).isoformat() if waits else None,
    }
