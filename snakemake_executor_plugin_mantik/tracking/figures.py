"""Compute the metrics of a job's run and of a workflow's run."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from snakemake_executor_plugin_mantik.engine.observer import JobEnd
from snakemake_executor_plugin_mantik.tracking.ledger import GOES_ON, JobRow

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
