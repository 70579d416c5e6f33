"""Describe what a job used, and the segments of one that has one run."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from snakemake_executor_plugin_mantik.journal import (
    GOES_ON,
    Event,
    EventKind,
    TrackedTry,
    TryRecord,
)

from .cursor import Log, LoggedRun
from .run import TAG_LENGTH

SEGMENTS_TAG: Final = "mantik.segments"
_SAME: Final = "same segment"


def describe_end(log: Log, run: LoggedRun, event: Event) -> dict[str, Any]:
    """Return what MLflow is to know of the end of a try, which `event` reports.

    Returns:
        `status`, empty if the job goes on; `time`; `words`, `times`, `reason` and `exit_code` for
        tags; `log`, the path of the job's log; `metrics` and their `step`; and `segments`.
    """
    record, tracked = run.record, run.tracked
    assert record is not None
    assert tracked is not None
    facts = event.data
    found = {
        "status": "" if tracked.status == GOES_ON else tracked.status,
        "time": event.time, "times": "", "reason": "", "exit_code": None, "log": "",
        **facts, "metrics": {}, "step": 0, "segments": [],
    }  # fmt: skip
    if event.kind is not EventKind.ENDED:
        return found
    concluded = [e for e in log.events(of=run.id) if e.kind is EventKind.CONCLUDED]
    found |= {"time": record.times.ended or event.time, "times": record.times.words}
    found |= {"words": concluded[-1].data["words"]} if concluded else {}
    if not record.segments and not run.one:
        return found | {"metrics": job_figures(record, facts["exit_code"])}
    entries = _entries(log, run)
    found["segments"] = entries
    if facts["successor"] != _SAME or found["status"]:
        code = facts["exit_code"] if found["status"] and not concluded else None
        found |= {"metrics": sum_figures(entries, code), "step": max(0, len(entries) - 1)}
    return found


def _entries(log: Log, run: LoggedRun) -> list[dict[str, Any]]:
    """Return an entry for each segment, or retry in one run, that has ended up to `run`."""
    entries: list[dict[str, Any]] = []
    for each in log.chain(run):
        end = log.end(each.id)
        if each.record is None or end is None or end.data["successor"] == _SAME:
            continue
        number = len(entries) + 1 if run.one else each.record.segment + 1
        entries.append(_entry(each.record, end, entries[-1] if entries else None, number))
    return entries


def _entry(
    record: TryRecord, end: Event, before: Mapping[str, Any] | None, number: int
) -> dict[str, Any]:
    """Return the entry of a segment that has ended; `before` is that of the one before."""
    ended, ran, queued = record.times.ended or end.time, record.ran, record.waited
    started = ended - ran if ran is not None else None
    if before is not None and queued is not None and started is not None:
        # It was in the queue while the one before ran.
        queued = min(queued, max(0.0, started - before["ended"]))
    return {
        "segment": number, "try": record.id, "job": " ".join(record.site_jobs[-1:]),
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
        known = [float(entry[key]) for entry in entries if entry[key] is not None]
        if known:
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
        "try": entry["try"],
        "job": entry["job"],
        "nodes": entry["nodes"],
        "started": _moment(entry["started"]),
        "ended": _moment(entry["ended"]),
        "seconds": round(entry["ran"], 1) if entry["ran"] is not None else None,
        "end": entry["end"][:100],
    }
    return {name: value for name, value in shown.items() if value not in (None, "")}


def _moment(seconds: float | None) -> str | None:
    if seconds is None:
        return None
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


def job_figures(record: TryRecord, exit_code: int | None) -> dict[str, float]:
    """Return the known metrics of a job that has ended."""
    found = {
        "queued_seconds": record.waited,
        "running_seconds": record.ran,
        "cpu_seconds": record.what_used.cpu_s,
        "core_hours": _core_hours(record),
        "exit_code": exit_code,
    }
    return {f"{_FOLDER}{name}": float(value) for name, value in found.items() if value is not None}


def _core_hours(record: TryRecord) -> float | None:
    cores = record.what_asked.cores
    return cores * record.ran / 3600 if cores and record.ran is not None else None


def run_status(tracked: TrackedTry, record: TryRecord) -> str:
    """Return MLflow's status of a try's run, or `GOES_ON`."""
    return tracked.status or ("RUNNING" if record.started is not None else "SCHEDULED")


def workflow_figures(jobs: Iterable[tuple[TrackedTry, TryRecord]]) -> dict[str, float]:
    """Count the jobs in each state, by their last tries, and sum up what all tries used."""
    last: dict[str, str] = {}
    core_hours = cpu = 0.0
    for tracked, record in jobs:
        if tracked.behind:
            continue
        status = run_status(tracked, record)
        last[record.job] = "SCHEDULED" if status == GOES_ON else status
        core_hours += _core_hours(record) or 0.0
        cpu += record.what_used.cpu_s or 0.0
    count = Counter(last.values())
    found = {name: float(count[state]) for state, name in _STATES.items()}
    found |= {"core_hours": core_hours, "cpu_seconds": cpu}
    return {f"{_FOLDER}{name}": value for name, value in found.items()}
