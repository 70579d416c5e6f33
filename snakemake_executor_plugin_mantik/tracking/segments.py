"""Describe what a job used, and the segments of one that has one run."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from snakemake_executor_plugin_mantik.engine.observer import JobEnd
from snakemake_executor_plugin_mantik.journal import TryRecord

from .ledger import GOES_ON, JobRow
from .run import TAG_LENGTH

SEGMENTS_TAG: Final = "mantik.segments"


@dataclass(frozen=True)
class SegmentEntry:
    """A segment that has ended; times are seconds, or seconds since the epoch by this machine.

    Attributes:
        segment: its number, from 1.
        job: the site's id of it.
        nodes: the names of its nodes, as its scheduler writes them; empty if unknown.
        queued: how long it waited after the one before had ended; None if unknown.
        end: how it ended, in one line; empty if it succeeded.
    """

    segment: int
    try_id: str
    job: str
    nodes: str
    started: float | None
    ended: float | None
    queued: float | None
    ran: float | None
    cpu: float | None
    core_hours: float | None
    end: str


def segment_entry(
    record: TryRecord,
    end: JobEnd,
    row: JobRow | None,
    before: Mapping[str, Any] | None,
    *,
    number: int,
    job: str,
) -> dict[str, Any]:
    """Return the entry of a segment that has ended, as JSON can hold it.

    `row` has its times and cores, `before` is the entry of the segment before; None if there is
    none. `number` is its number, from 1, `job` the site's id of it.
    """
    figures = job_figures(end, row)
    ended = end.ended or (row.ended if row is not None else None)
    ran = end.ran if end.ran is not None else (row.ran if row is not None else None)
    started = ended - ran if ended is not None and ran is not None else None
    queued = end.waited
    if before is not None and queued is not None and started is not None and before["ended"]:
        # It was in the queue while the one before ran.
        queued = min(queued, max(0.0, started - before["ended"]))
    return asdict(
        SegmentEntry(
            number,
            record.id,
            job,
            end.nodes,
            started,
            ended,
            queued,
            end.ran,
            end.cpu,
            figures.get("mantik/core_hours"),
            end.words,
        )
    )


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
            sums[f"mantik/{name}"] = sum(known)
    if exit_code is not None:
        sums["mantik/exit_code"] = float(exit_code)
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
        "try": entry["try_id"],
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


def job_figures(end: JobEnd, job: JobRow | None) -> dict[str, float]:
    """Return the known metrics of a job that has ended."""
    cores = job.cores if job is not None else None
    found = {
        "queued_seconds": end.waited,
        "running_seconds": end.ran,
        "cpu_seconds": end.cpu,
        "core_hours": cores * end.ran / 3600 if cores and end.ran is not None else None,
        "exit_code": end.exit_code,
    }
    return {f"{_FOLDER}{name}": float(value) for name, value in found.items() if value is not None}


def workflow_figures(jobs: Iterable[JobRow]) -> dict[str, float]:
    """Count the jobs in each state, by their last tries, and sum up what all tries used."""
    last: dict[str, str] = {}
    core_hours = cpu = 0.0
    for job in jobs:
        if job.behind:
            continue
        last[job.job] = "SCHEDULED" if job.state == GOES_ON else job.state
        core_hours += job.core_hours or 0.0
        cpu += job.cpu or 0.0
    count = Counter(last.values())
    found = {name: float(count[state]) for state, name in _STATES.items()}
    found |= {"core_hours": core_hours, "cpu_seconds": cpu}
    return {f"{_FOLDER}{name}": value for name, value in found.items()}
