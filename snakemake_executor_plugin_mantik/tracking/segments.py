"""Describe what a run shows of its job: of its last attempt, and of all that continued it."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from ..jobs.pools import Allocation
from ..journal import (
    GOES_ON,
    AttemptRecord,
    AttemptState,
    Event,
    EventKind,
    TrackedAttempt,
    read_attempts,
)
from .cursor import Log, LoggedRun
from .run import TAG_LENGTH, WAITING_REASON

SEGMENTS_TAG: Final = "mantik.segments"
TIMES: Final = "mantik.times"
"""The tag that names the source of a job's run time if the job could not report it."""
STATE_TAGS: Final = frozenset(
    ("mantik.exit_code", "mantik.job_id", "mantik.own_run_id", "mantik.queue", "mantik.reason",
     "mantik.reason.kind", SEGMENTS_TAG, TIMES, WAITING_REASON)
)  # fmt: skip
"""The tags that depend on a run's state; those of a retry stay."""
_SAME: Final = "same segment"
_OPEN: Final = (AttemptState.PLANNED, AttemptState.SUBMITTING, AttemptState.SUBMITTED)


@dataclass(frozen=True)
class RunState:
    """The state of a run: that of the last of its attempts.

    Attributes:
        time: when the job ended, if it has; seconds since the epoch.
        tags: all that depend on the state; none is empty.
    """

    status: str
    time: float
    tags: Mapping[str, str]


def run_state(log: Log, attempts: Sequence[LoggedRun]) -> RunState:
    """Return the state of the run of these attempts, the last one last."""
    last = attempts[-1]
    record, tracked = last.record, last.tracked
    assert record is not None
    assert tracked is not None
    known = {event.kind: event for event in log.events(of=last.id)}
    tags = {
        **last.data.get("retry", {}),
        SEGMENTS_TAG: segments_tag(list_segments(log, attempts)),
        WAITING_REASON: "" if record.started is not None else record.waits or _behind(log, record),
    }
    jobs = [
        (job, each.record.queue)
        for each in attempts
        if each.record
        for job in each.record.site_jobs
    ]
    if jobs:
        tags["mantik.job_id"], tags["mantik.queue"] = jobs[-1]
    status, time = tracked.status, 0.0
    if status in ("", GOES_ON):
        goes_on = len(attempts) > 1 or status == GOES_ON
        begun = record.started is not None or (goes_on and not last.one)
        status = "RUNNING" if begun else "SCHEDULED"
    else:
        end = log.end(last.id)
        over = known.get(EventKind.CONCLUDED)
        if end is None:  # else it was continued since it was settled
            over = known.get(EventKind.SETTLED, over)
        facts = {**(end.data if end else {}), **({"words": over.data["words"]} if over else {})}
        code = facts.get("exit_code")
        tags |= {
            "mantik.exit_code": "" if code is None else str(code),
            "mantik.reason": facts.get("words", ""),
            "mantik.reason.kind": facts.get("reason", ""),
            TIMES: record.times.words,
        }
        time = record.times.ended or (end or over or log.events(of=last.id)[-1]).time
    return RunState(status, time, {n: v[:TAG_LENGTH] for n, v in tags.items() if v})


def _behind(log: Log, record: AttemptRecord) -> str:
    if not record.site_jobs:
        return ""
    makers = json.dumps([*record.makers.values()])
    before = read_attempts(log.db, "WHERE id IN (SELECT value FROM json_each(?))", (makers,))
    names = dict.fromkeys(maker.name for maker in before if maker.state in _OPEN)
    return f"waits for {', '.join(names)}" if names else ""


def end_figures(
    log: Log, attempts: Sequence[LoggedRun], end: Event
) -> tuple[dict[str, float], int]:
    """Return the metrics that the last of these attempts adds at its end, and the step."""
    last = attempts[-1]
    record, tracked = last.record, last.tracked
    assert record is not None
    assert tracked is not None
    code = end.data["exit_code"]
    if not record.segments and not last.one:
        return sum_figures([_entry(record, end, None, 1)], code), 0
    entries, goes_on = list_segments(log, attempts), tracked.status == GOES_ON
    if goes_on and end.data["successor"] == _SAME:
        return {}, 0
    concluded = any(event.kind is EventKind.CONCLUDED for event in log.events(of=last.id))
    used = sum_figures(entries, None if goes_on or concluded else code)
    return used, max(0, len(entries) - 1)


def list_segments(log: Log, attempts: Sequence[LoggedRun]) -> list[dict[str, Any]]:
    """Return an entry for each of the segments, or retries in one run, that has ended."""
    entries: list[dict[str, Any]] = []
    for each in attempts:
        record, end = each.record, log.end(each.id)
        if record is None or end is None or end.data["successor"] == _SAME:
            continue
        if record.segments or each.one:
            number = len(entries) + 1 if each.one else record.segment + 1
            entries.append(_entry(record, end, entries[-1] if entries else None, number))
    return entries


def _entry(
    record: AttemptRecord, end: Event, before: Mapping[str, Any] | None, number: int
) -> dict[str, Any]:
    """Return the entry of a segment that has ended; `before` is that of the one before."""
    ended, ran, queued = record.times.ended or end.time, record.ran, record.waited
    started = ended - ran if ran is not None else None
    if before is not None and queued is not None and started is not None:
        # It was in the queue while the one before ran.
        queued = min(queued, max(0.0, started - before["ended"]))
    return {
        "segment": number, "attempt": record.id, "job": " ".join(record.site_jobs[-1:]),
        "nodes": end.data["nodes"], "started": started, "ended": ended, "queued": queued,
        "ran": ran, "cpu": record.what_used.cpu_s, "core_hours": _core_hours(record),
        "end": end.data["words"],
    }  # fmt: skip


def sum_figures(entries: Sequence[Mapping[str, Any]], exit_code: int | None) -> dict[str, float]:
    """Return the metrics of a run: what all its segments have used, as far as it is known."""
    sums: dict[str, float] = {}
    for name, key in (
        ("queued_seconds", "queued"),
        ("running_seconds", "ran"),
        ("cpu_seconds", "cpu"),
        ("core_hours", "core_hours"),
    ):
        if known := [float(entry[key]) for entry in entries if entry[key] is not None]:
            sums[f"{_FOLDER}{name}"] = sum(known)
    if exit_code is not None:
        sums[f"{_FOLDER}exit_code"] = float(exit_code)
    return sums


def segments_tag(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the value of `SEGMENTS_TAG`; of too many segments it lists the last ones."""
    shown = [_shown(entry) for entry in entries]
    while len(text := json.dumps(shown, ensure_ascii=False)) > TAG_LENGTH and shown:
        del shown[0]
    return text if shown else ""


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    shown = {
        "segment": entry["segment"],
        "attempt": entry["attempt"],
        "job": entry["job"],
        "nodes": entry["nodes"],
        "started": "" if entry["started"] is None else format_moment(entry["started"]),
        "ended": format_moment(entry["ended"]),
        "seconds": round(entry["ran"], 1) if entry["ran"] is not None else None,
        "end": entry["end"][:100],
    }
    return {name: value for name, value in shown.items() if value not in (None, "")}


def format_moment(seconds: float) -> str:
    """Return a moment in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


_FOLDER: Final = "mantik/"
"""The prefix of our metrics: MLflow shows them as a section of their own."""
_STATES: Final[Mapping[str, str]] = {
    "SCHEDULED": "jobs_queued",
    "RUNNING": "jobs_running",
    "FINISHED": "jobs_finished",
    "FAILED": "jobs_failed",
    "KILLED": "jobs_killed",
}


def _core_hours(record: AttemptRecord) -> float | None:
    cores = record.what_asked.cores
    return cores * record.ran / 3600 if cores and record.ran is not None else None


def workflow_figures(
    jobs: Iterable[tuple[TrackedAttempt, AttemptRecord]], allocations: Sequence[Allocation] = ()
) -> dict[str, float]:
    """Count the jobs in each state, by their last attempts, and sum up what all attempts used.

    Of the allocations of pools, if there are any, sum up what jobs have had of them, and the rest.
    """
    last: dict[str, str] = {}
    core_hours = cpu = 0.0
    for tracked, record in jobs:
        if tracked.behind:
            continue
        status = tracked.status or ("RUNNING" if record.started is not None else "SCHEDULED")
        last[record.job] = "SCHEDULED" if status == GOES_ON else status
        core_hours += _core_hours(record) or 0.0
        cpu += record.what_used.cpu_s or 0.0
    count = Counter(last.values())
    found = {name: float(count[state]) for state, name in _STATES.items()}
    found |= {"core_hours": core_hours, "cpu_seconds": cpu}
    if allocations:
        found["pool_core_hours_used"] = sum(each.used for each in allocations) / 3600
        found["pool_core_hours_idle"] = sum(each.idle for each in allocations) / 3600
    return {f"{_FOLDER}{name}": value for name, value in found.items()}
