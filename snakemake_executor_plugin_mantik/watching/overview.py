"""What is known of each job: its condition, since when, and why it waits. Pure functions."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import WENT_ON, TryRecord, TryState, turn_of
from snakemake_executor_plugin_mantik.sites.base import Phase
from snakemake_executor_plugin_mantik.sites.slurm import explain_pending


class Condition(StrEnum):
    """The condition of a try, as far as it is known.

    PLANNED: not submitted yet. SUBMITTING: the site may know it. WAITING: at the site, not started.
    RUNNING: it was seen to run and not to end. OPEN: at the site, and nothing watches it. OVER: it
    ended at the site, and its results have not been fetched. WENT_ON: a segment that another one
    follows. LEFT: it may run unobserved.
    """

    PLANNED = "planned"
    SUBMITTING = "submitting"
    WAITING = "waiting"
    RUNNING = "running"
    OPEN = "waiting or running"
    OVER = "ended at the site"
    WENT_ON = "goes on"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LEFT = "left behind"

    @property
    def active(self) -> bool:
        """Whether the job may still do something."""
        return self in _ACTIVE

    @property
    def moving(self) -> bool:
        """Whether the site may change it without a controller."""
        return self in _MOVING


_MOVING = frozenset((Condition.SUBMITTING, Condition.WAITING, Condition.RUNNING, Condition.OPEN))
_ACTIVE = frozenset(Condition) - {Condition.SUCCEEDED, Condition.FAILED, Condition.CANCELLED}


@dataclass(frozen=True)
class Sight:
    """What a look at a site has shown of a try.

    Attributes:
        phase: UNKNOWN if it showed neither that the try waits nor that it runs.
        exit_code: of its marker; None without one.
        pending: the scheduler's reason why it waits; may be empty.
        started: when it began, in seconds since the epoch, where the scheduler says so.
        detail: how it ended according to the scheduler, in the site's words.
    """

    phase: Phase = Phase.UNKNOWN
    exit_code: int | None = None
    pending: str = ""
    started: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class JobOverview:
    """What is known of one try of a job.

    Attributes:
        number: how many tries the job has had with this one; several segments in a row are one.
        condition: what it does.
        waiting_since, running_since: in seconds since the epoch, where known; `waiting_since` is
            kept once it runs. A job waits in the queue from when those before it have ended.
        pending: the scheduler's reason why it waits.
        behind: names of the jobs, or the segment of its own, that it waits for at its site.
        awaited_by: names of the jobs that wait for it there.
        sight: what the last look at the site has shown; None without one.
    """

    record: TryRecord
    number: int
    condition: Condition
    waiting_since: float | None = None
    running_since: float | None = None
    pending: str = ""
    behind: tuple[str, ...] = ()
    awaited_by: tuple[str, ...] = ()
    sight: Sight | None = None

    def waited(self, now: float) -> float | None:
        """Return the seconds that it has waited so far, or did, where known."""
        if self.record.waited is not None or self.waiting_since is None:
            return self.record.waited
        if self.condition is Condition.RUNNING:
            return max(0.0, self.running_since - self.waiting_since) if self.running_since else None
        return max(0.0, now - self.waiting_since) if self.condition is Condition.WAITING else None

    def waited_for_jobs(self, now: float) -> float | None:
        """Return the seconds at its site before its turn came; None if it waited for no job."""
        record = self.record
        if record.times.behind is not None or not record.before or record.submitted is None:
            return record.times.behind
        turn = now if self.condition.active else None
        turn = turn if self.waiting_since is None else self.waiting_since
        return max(0.0, turn - record.submitted) if turn is not None else None

    def ran(self, now: float) -> float | None:
        """Return the seconds that it has run so far, or did, where known."""
        if self.record.ran is not None or self.condition is not Condition.RUNNING:
            return self.record.ran
        return max(0.0, now - self.running_since) if self.running_since else None

    def ran_words(self, now: float) -> str:
        """Return how long it has run so far, or did; with `~` if its script did not report it."""
        ran = self.ran(now)
        about = "~" if self.record.times.told_by else ""
        return f"{about}{humanize_duration(ran)}" if ran is not None else ""

    def share(self, now: float) -> float | None:
        """Return how much of its walltime a running job has used, from 0 to 1, where known."""
        ran = self.ran(now) if self.condition is Condition.RUNNING else None
        return ran / self.record.runtime if ran is not None and self.record.runtime else None

    @property
    def words(self) -> str:
        """A description for a table: what it does, or how it ended, and why."""
        record = self.record
        if record.left_behind:
            return f"{record.outcome}; may still run"
        if record.reason:
            return record.outcome.replace("failed", f"failed ({Reason(record.reason).words})", 1)
        if record.outcome:
            return record.outcome
        return _WORDS.get(self.condition, lambda _: self.condition.value)(self)

    def as_json(self, now: float) -> dict[str, Any]:
        """Return all of it as a value for JSON; times are seconds since the epoch."""
        record = self.record
        return {
            "job": record.name,
            "rule": record.rule,
            "id": record.id,
            "try": self.number,
            "segment": record.segment + 1 if record.segments else None,
            "segments": record.segments or None,
            "site": record.site,
            "queue": record.queue,
            "site_jobs": list(record.site_jobs),
            "state": self.condition.value,
            "outcome": record.outcome,
            "failure": record.reason,
            "exit_code": self.sight.exit_code if self.sight is not None else None,
            "pending": self.pending,
            "pending_words": explain_pending(self.pending) if self.pending else "",
            "cannot_start": record.hindrance,
            "expected_start": record.expected if self.condition is Condition.WAITING else None,
            "behind": list(self.behind),
            "awaited_by": list(self.awaited_by),
            "waiting_since": self.waiting_since,
            "running_since": self.running_since,
            "finished": record.finished,
            "waited": self.waited(now),
            "waited_for_jobs": self.waited_for_jobs(now),
            "ran": self.ran(now),
            "ran_told_by": record.times.told_by or None,
            "ended": record.times.ended,
            "walltime": record.runtime,
            "log": record.log,
            "log_files": list(record.log_files),
        }


def _running(job: JobOverview) -> str:
    limit = job.record.runtime
    return f"running, at most {humanize_duration(limit)}" if limit else "running"


def _waiting(job: JobOverview) -> str:
    if job.record.hindrance and job.pending in ("", job.record.hindrance):
        return f"cannot start: {explain_pending(job.record.hindrance)}"
    if job.behind:
        return f"queued behind {', '.join(job.behind)}"
    words = f"waiting: {explain_pending(job.pending)}" if job.pending else "waiting"
    if job.record.expected is not None:
        when = time.strftime("%d %b %H:%M", time.localtime(job.record.expected))
        words += f"{',' if job.pending else ':'} expected to start on {when}"
    return words


def _over(job: JobOverview) -> str:
    sight = job.sight
    if sight is None:
        return "ended, outputs not accepted yet"
    code = f" with exit code {sight.exit_code}" if sight.exit_code is not None else ""
    detail = f" ({sight.detail})" if sight.detail and not code else ""
    return f"ended at the site{code}{detail}; the next run fetches its results"


_WORDS = {Condition.RUNNING: _running, Condition.WAITING: _waiting, Condition.OVER: _over}


_PHASES = {
    Phase.WAITING: Condition.WAITING,
    Phase.RUNNING: Condition.RUNNING,
    Phase.ENDED: Condition.OVER,
}


def present_tries(records: Iterable[TryRecord]) -> list[TryRecord]:
    """Return the last try of each job, and all tries that may still run.

    Segments that wait for others, or were given up while they did, do not count.
    """
    records = list(records)
    ahead = segments_ahead(records)
    turned = [record for record in records if record.id not in ahead]
    last = {record.job: record.id for record in turned}
    return [record for record in turned if record.id == last[record.job] or record.may_run]


def segments_ahead(records: Iterable[TryRecord]) -> set[str]:
    """Return the ids of the segments whose turn has not come, or never came."""
    known: dict[str, TryRecord] = {}
    ahead: set[str] = set()
    for record in records:  # the oldest first
        known[record.id] = record
        before = known.get(record.follows)
        if before is not None and (before.id in ahead or not _came(before, record)):
            ahead.add(record.id)
    return ahead


def _came(before: TryRecord, record: TryRecord) -> bool:
    """Return whether a segment's turn came when the one before ended."""
    if before.goes_on or before.outcome.startswith(WENT_ON):
        return True
    return before.finished is not None and record.created >= before.finished


def overview_jobs(
    records: Sequence[TryRecord],
    *,
    controlled: bool,
    sights: Mapping[str, Sight] | None = None,
) -> list[JobOverview]:
    """Return an overview of each try, in the order of `records`, which has all tries of the jobs.

    `controlled` says whether a controller runs, which watches the tries that are at a site.
    `sights` are by the tries' ids.
    """
    open_names = {r.id: r.name for r in records if r.may_run}
    known_tries = {record.id: record for record in records}
    awaiting: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for record in records:
        for maker in record.makers.values() if record.may_run else ():
            awaiting[maker][record.name] = None
    numbers: Counter[str] = Counter()
    number_of: dict[str, int] = {}
    followed: set[str] = set()
    open_parts = {r.id: r.part for r in records if r.may_run and r.part}
    found = []
    for record in records:
        if record.follows not in number_of or record.follows in followed:
            numbers[record.job] += 1
        number_of[record.id] = numbers[record.job]
        followed.add(record.follows)
        sight = (sights or {}).get(record.id)
        makers = dict.fromkeys(record.makers.values()) if record.may_run else {}
        behind = tuple(open_names[maker] for maker in makers if maker in open_names)
        if record.may_run and record.follows in open_parts:
            behind = (*behind, open_parts[record.follows])
        known = sight.started if sight is not None else None
        found.append(
            JobOverview(
                record,
                number_of[record.id],
                _condition(record, sight, behind, controlled=controlled),
                waiting_since=_turn(record, known_tries),
                running_since=record.started or known,
                pending=sight.pending if sight is not None and sight.pending else record.pending,
                behind=behind,
                awaited_by=tuple(awaiting[record.id]) if record.may_run else (),
                sight=sight,
            )
        )
    return found


def _turn(record: TryRecord, known: Mapping[str, TryRecord]) -> float | None:
    """Return since when nothing but the queue keeps a try from running; None if not yet."""
    if record.submitted is None or not record.before:
        return record.submitted
    if record.times.behind is not None:
        return record.submitted + record.times.behind
    before = [known[one] for one in record.before if one in known]
    turn = turn_of(before) if before else record.submitted
    return max(record.submitted, turn) if turn is not None else None


def _condition(
    record: TryRecord, sight: Sight | None, behind: Sequence[str], *, controlled: bool
) -> Condition:
    if record.left_behind:
        return Condition.LEFT
    if record.outcome.startswith(WENT_ON):
        return Condition.WENT_ON
    if record.outcome:
        ends = (Condition.SUCCEEDED, Condition.FAILED)
        return next((e for e in ends if record.outcome.startswith(e.value)), Condition.CANCELLED)
    if record.state in (TryState.PLANNED, TryState.ENDED):
        return Condition.PLANNED if record.state is TryState.PLANNED else Condition.OVER
    seen = _seen(sight)
    if seen is Condition.OVER or record.started is None:
        unseen = Condition.WAITING if behind or record.waits else None
        unseen = unseen or (Condition.SUBMITTING if record.state is TryState.SUBMITTING else None)
        return seen or unseen or (Condition.WAITING if controlled else Condition.OPEN)
    return Condition.RUNNING


def _seen(sight: Sight | None) -> Condition | None:
    if sight is None:
        return None
    if sight.exit_code is not None:
        return Condition.OVER
    return _PHASES.get(sight.phase)


@dataclass(frozen=True)
class SiteTotal:
    """How many jobs of a site are in which condition."""

    site: str
    jobs: Mapping[Condition, int]

    @property
    def words(self) -> str:
        """The numbers as one line, without those that are 0."""
        numbers = [f"{self.jobs[c]} {c.value}" for c in Condition if self.jobs.get(c)]
        return f"{self.site}: {', '.join(numbers)}"


def site_totals(jobs: Iterable[JobOverview]) -> list[SiteTotal]:
    """Count the jobs of each site by their condition; `jobs` has one try of each."""
    found: dict[str, Counter[Condition]] = {}
    for job in jobs:
        found.setdefault(job.record.site, Counter())[job.condition] += 1
    return [SiteTotal(site, counts) for site, counts in sorted(found.items())]
