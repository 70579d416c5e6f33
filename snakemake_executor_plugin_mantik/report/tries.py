"""Turn what the journal knows of tries into times, states and pictures. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snakemake_executor_plugin_mantik.journal import Asked, TryRecord, Used, WorkflowHistory
from snakemake_executor_plugin_mantik.pictures import Node, NodeState
from snakemake_executor_plugin_mantik.watching.overview import (
    Condition,
    JobOverview,
    overview_jobs,
    segments_ahead,
)

_STATES: Mapping[Condition, NodeState] = {
    Condition.PLANNED: NodeState.WAITING,
    Condition.SUBMITTING: NodeState.QUEUED,
    Condition.WAITING: NodeState.QUEUED,
    Condition.OPEN: NodeState.QUEUED,
    Condition.RUNNING: NodeState.RUNNING,
    Condition.OVER: NodeState.RUNNING,
    Condition.WENT_ON: NodeState.FINISHED,
    Condition.SUCCEEDED: NodeState.FINISHED,
    Condition.FAILED: NodeState.FAILED,
    Condition.CANCELLED: NodeState.KILLED,
    Condition.LEFT: NodeState.KILLED,
}


@dataclass(frozen=True)
class ReportedTry:
    """A try in a report.

    Attributes:
        asked, used: what it requested and used, as far as it is known.
        jobs: the identities of its job, or of the members of its group.
        number: how many tries its job has had with this one.
        last: whether no later try of the same job replaces it.
        node: its state and times, for pictures.
    """

    record: TryRecord
    asked: Asked
    used: Used
    jobs: tuple[str, ...]
    number: int
    last: bool
    node: Node

    @property
    def group(self) -> bool:
        return len(self.jobs) > 1

    def ran(self, now: float) -> float | None:
        """Return the seconds that it has run so far, or did; None if unknown, or not started."""
        started = self.node.started
        if self.record.outcome or started is None or self.node.state is not NodeState.RUNNING:
            return self.record.ran
        return max(0.0, now - started)

    @property
    def untimed(self) -> bool:
        """Whether it ran and is over, and nobody knows how long it ran."""
        record = self.record
        return bool(record.outcome) and record.started is not None and record.ran is None

    def core_hours(self, now: float) -> float | None:
        """Return its cores times its hours so far; None if its cores are unknown."""
        ran = self.ran(now) or 0.0
        return self.asked.cores * ran / 3600 if self.asked.cores is not None else None


def report_tries(history: WorkflowHistory, *, controlled: bool) -> list[ReportedTry]:
    """Return all tries of a workflow, the oldest first.

    Leaves out segments that wait for the one before to end, or were not needed after it.
    `controlled` says whether a Snakemake runs that watches them.
    """
    ahead = segments_ahead(history.tries)
    shown = [record for record in history.tries if record.id not in ahead]
    last = {record.job: record.id for record in shown}
    return [
        ReportedTry(
            job.record,
            job.record.what_asked,
            job.record.what_used,
            history.members.get(job.record.id, (job.record.job,)),
            job.number,
            last[job.record.job] == job.record.id,
            _node(job),
        )
        for job in overview_jobs(shown, controlled=controlled)
    ]


def begun_since(tries: Sequence[ReportedTry], moment: float) -> list[ReportedTry]:
    """Return the tries that were not over at a moment; times are seconds since the epoch."""
    return [one for one in tries if (one.record.finished or moment) >= moment]


def _node(job: JobOverview) -> Node:
    record = job.record
    state = _STATES[job.condition]
    queued, ended, started = job.waiting_since, _ended(job), _started(job)
    submitted = record.submitted
    if ended is not None and started is not None:
        started = min(started, ended)
    if queued is not None and started is not None:
        queued = min(queued, started)
    if submitted is not None and queued is not None:
        submitted = min(submitted, queued)
    fetched = record.finished if state in _FETCHED and ended is not None else None
    words = job.words if state is not NodeState.FINISHED else ""
    told = f"ran {record.times.words}" if record.times.words else ""
    note = ", ".join(filter(None, [record.part, words, told]))
    name = f"{record.name} ({record.part})" if record.part else record.name
    return Node(
        record.id, name, record.rule, state, {}, record.site, queued, started, ended, note,
        prepared=record.created if submitted is not None else None,
        submitted=submitted,
        fetched=max(fetched, ended) if fetched is not None and ended is not None else None,
    )  # fmt: skip


_FETCHED = (NodeState.FINISHED, NodeState.FAILED)


def _started(job: JobOverview) -> float | None:
    """Return when a job began, by what is most exact."""
    record = job.record
    ended = record.what_used.ended
    if ended is not None and record.ran is not None:
        return ended - record.ran
    if job.running_since:
        return job.running_since
    if record.submitted is not None and record.waited is not None:
        return record.submitted + (record.times.behind or 0.0) + record.waited
    if record.finished is not None and record.ran is not None:
        return record.finished - record.ran
    return None


def _ended(job: JobOverview) -> float | None:
    record = job.record
    if not record.outcome or record.left_behind:
        return None
    started = _started(job)
    if record.what_used.ended is not None:
        return record.what_used.ended
    if started is not None and record.ran is not None:
        return started + record.ran
    return record.finished
