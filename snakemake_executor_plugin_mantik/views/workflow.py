"""What a workflow's jobs are and did, from the journal: one model, which all views show."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ..common.errors import UserError, shorten_list
from ..common.humanize import humanize_duration
from ..jobs.paths import display_path, nearest
from ..jobs.pools import parse_job_id
from ..jobs.reasons import Reason, find_cause
from ..journal import WENT_ON, Asked, AttemptRecord, AttemptState, Used, read_history, turn_of
from .picture import Node, NodeState


class Condition(StrEnum):
    """The condition of an attempt, as far as it is known.

    PLANNED: not submitted yet. SUBMITTING: the site may know it. WAITING: at the site, not started.
    RUNNING: it was seen to run and not to end. OPEN: at the site, and nothing watches it. OVER: it
    ended at the site, and its results have not been fetched. WENT_ON: a segment that another one
    follows. ORPHANED: it may run unobserved.
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
    ORPHANED = "orphaned"

    @property
    def active(self) -> bool:
        """Whether the job may still do something."""
        return self not in (Condition.SUCCEEDED, Condition.FAILED, Condition.CANCELLED)

    @property
    def moving(self) -> bool:
        """Whether the site may change it without a controller."""
        return self is Condition.RUNNING or _PICTURED[self] is NodeState.QUEUED


_PICTURED: Final = {
    Condition.PLANNED: NodeState.WAITING,
    Condition.SUBMITTING: NodeState.QUEUED,
    Condition.WAITING: NodeState.QUEUED,
    Condition.OPEN: NodeState.QUEUED,
    Condition.RUNNING: NodeState.RUNNING,
    Condition.OVER: NodeState.RUNNING,
    Condition.WENT_ON: NodeState.SUCCEEDED,
    Condition.SUCCEEDED: NodeState.SUCCEEDED,
    Condition.FAILED: NodeState.FAILED,
    Condition.CANCELLED: NodeState.CANCELLED,
    Condition.ORPHANED: NodeState.ORPHANED,
}


@dataclass(frozen=True)
class Sight:
    """What a look at a site has shown of an attempt.

    Attributes:
        condition: WAITING, RUNNING, OVER or CANCELLED; None if it showed none of these.
        exit_code: of its marker; None without one.
        pending: the scheduler's reason why it waits; may be empty.
        started: when it began, in seconds since the epoch, where the scheduler says so.
        detail: how it ended according to the scheduler, in the site's words, or without it.
    """

    condition: Condition | None = None
    exit_code: int | None = None
    pending: str = ""
    started: float | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class JobView(Node):
    """What is known of one attempt of a job; its id is that of the attempt.

    A job waits in the queue from when those before it have ended: its `queued`.

    Attributes:
        number: how many attempts the job has had with this one; several segments in a row are one.
        upcoming: whether it is a segment whose turn has not come, or never came.
        last: whether no later attempt of the job replaces it.
        waits_for: names of the jobs, or the segment of its own, that it waits for at its site.
        awaited_by: names of the jobs that wait for it there.
        asked, used: what it requested and used, as far as it is known.
        watched: whether a controller would have seen its end, or a look at its site has not.
    """

    record: AttemptRecord
    number: int
    condition: Condition
    upcoming: bool
    last: bool
    pending: str = ""
    waits_for: tuple[str, ...] = ()
    awaited_by: tuple[str, ...] = ()
    sight: Sight = field(default_factory=Sight)
    asked: Asked = field(default_factory=Asked)
    used: Used = field(default_factory=Used)
    watched: bool = True

    @property
    def pool(self) -> str:
        """The pool whose allocations run it; empty if it is a job of the scheduler's own."""
        return next((found[0] for found in map(parse_job_id, self.record.site_jobs) if found), "")

    @property
    def present(self) -> bool:
        """Whether it is the last attempt of its job, or may still run; not if it is `upcoming`."""
        return not self.upcoming and (self.last or self.record.may_run)

    def waited(self, now: float) -> float | None:
        """Return the seconds that it has waited so far, or did, where known."""
        known = self.condition is Condition.WAITING
        known |= self.condition is Condition.RUNNING and self.started is not None
        return self.queued_s(now) if known and self.record.waited is None else self.record.waited

    def waited_for_jobs(self, now: float) -> float | None:
        """Return the seconds at its site before its turn came; None if it waited for no job."""
        known = self.record.times.behind
        return self.behind_s(now) if known is None and self.record.before else known

    def ran(self, now: float) -> float | None:
        """Return the seconds that it has run so far, or did, where known."""
        running = self.condition is Condition.RUNNING and self.watched and self.record.ran is None
        return self.running_s(now) if running else self.record.ran

    def ran_words(self, now: float) -> str:
        """Return how long it has run so far, or did; with `~` if its script did not report it."""
        ran = self.ran(now)
        about = "~" if self.used.told_by else ""
        return f"{about}{humanize_duration(ran)}" if ran is not None else ""

    def core_hours(self, now: float) -> float | None:
        """Return its cores times its hours so far; None if its cores are unknown."""
        cores = self.asked.cores
        return cores * (self.ran(now) or 0.0) / 3600 if cores is not None else None

    @property
    def cause(self) -> str:
        """Why it failed, or else how it ended."""
        return find_cause(self.record.outcome, self.record.name, self.site)

    @property
    def exit_code(self) -> int | None:
        """Of its marker; None if that is not known."""
        return self.sight.exit_code if self.used.exit_code is None else self.used.exit_code

    @property
    def words(self) -> str:
        """A description for a table: what it does, or how it ended, and why."""
        record = self.record
        if record.left_behind:
            return f"{record.outcome}; may still run"
        if record.reason and self.condition is Condition.FAILED:
            return f"failed ({Reason(record.reason).words}): {self.cause}"
        if record.outcome:
            return record.outcome
        if self.condition is Condition.RUNNING:
            most = f", at most {humanize_duration(record.runtime)}" if record.runtime else ""
            return f"running{most}" if self.watched else "running when last seen"
        if self.condition is Condition.WAITING:
            return self._waiting()
        over = self.condition in (Condition.OVER, Condition.CANCELLED)
        return self._over() if over else self.condition.value

    def _waiting(self) -> str:
        record = self.record
        if record.hindrance and self.pending in ("", record.hindrance):
            return f"cannot start: {_explained(record.hindrance)}"
        if self.waits_for:
            return f"waits for {', '.join(self.waits_for)}"
        words = f"waiting: {_explained(self.pending)}" if self.pending else "waiting"
        if record.expected is not None:
            when = time.strftime("%d %b %H:%M", time.localtime(record.expected))
            words += f"{',' if self.pending else ':'} expected to start on {when}"
        return words

    def _over(self) -> str:
        if self.sight.condition is None:
            return "ended, outputs not accepted yet"
        if self.sight.condition is Condition.CANCELLED:
            return f"{self.sight.detail}; the next run submits it again"
        words = f" ({self.sight.detail})" if self.sight.detail else ""
        if self.sight.exit_code is not None:
            words = f" with exit code {self.sight.exit_code}"
        return f"ended at the site{words}; the next run fetches its results"

    @property
    def remark(self) -> str:
        """A line for a tooltip: its segment, how it ended, and who tells how long it ran."""
        words = self.words if self.state is not NodeState.SUCCEEDED else ""
        told = self.record.times.words
        return ", ".join(filter(None, [self.record.part, words, f"ran {told}" if told else ""]))

    def as_json(self, now: float) -> dict[str, Any]:
        """Return all of it as a value for JSON; times are seconds since the epoch."""
        record = self.record
        known = {
            "job": record.name,
            "rule": record.rule,
            "id": record.id,
            "attempt": self.number,
            "segment": record.segment + 1 if record.segments else None,
            "segments": record.segments or None,
            "site": record.site,
            "queue": record.queue,
            "site_jobs": list(record.site_jobs),
            "pool": self.pool,
            "allocation": self.used.allocation,
            "state": self.condition.value,
            "outcome": record.outcome,
            "failure": record.reason,
            "exit_code": self.exit_code,
            "pending": self.pending,
            "pending_words": _explained(self.pending),
            "cannot_start": record.hindrance,
            "expected_start": record.expected if self.condition is Condition.WAITING else None,
            "waits_for": list(self.waits_for),
            "awaited_by": list(self.awaited_by),
            "waiting_since": self.queued,
            "running_since": self.started,
            "finished": record.finished,
            "waited": self.waited(now),
            "waited_for_jobs": self.waited_for_jobs(now),
            "ran": self.ran(now),
            "ran_told_by": record.times.told_by,
            "ended": record.times.ended,
            "walltime": record.runtime,
            "cores": self.asked.cores,
            "memory": self.asked.memory_mib and self.asked.memory_mib << 20,
            "memory_used": self.used.memory_bytes,
            "log": record.log,
            "log_files": list(record.log_files),
        }
        return {key: None if value == "" else value for key, value in known.items()}


def site_ids(record: AttemptRecord) -> str:
    """Return its ids at the site; of a pool's job, the pool and the allocation, as far as known."""
    pool = next((f"pool {found[0]}" for found in map(parse_job_id, record.site_jobs) if found), "")
    ids = filter(None, [pool, record.what_used.allocation])
    return ": ".join(ids) if pool else ", ".join(record.site_jobs)


def _explained(reason: str) -> str:
    # Not above: the process that publishes MLflow runs loads nothing that talks to sites.
    from ..sites.slurm import explain_pending

    return explain_pending(reason) if reason else ""


def overview_jobs(
    records: Sequence[AttemptRecord],
    *,
    controlled: bool,
    sights: Mapping[str, Sight] | None = None,
    members: Mapping[str, tuple[str, ...]] | None = None,
) -> list[JobView]:
    """Return a view of each attempt, in the order of `records`, which has all attempts of the jobs.

    `controlled` says whether a controller runs, which watches the attempts that are at a site.
    `sights` and the identities of the `members` of groups are by the attempts' ids.
    """
    known = {record.id: record for record in records}
    awaiting: dict[str, dict[str, None]] = {}
    for record in records:
        for maker in record.makers.values() if record.may_run else ():
            awaiting.setdefault(maker, {})[record.name] = None
    upcoming = _upcoming_segments(records)
    last = {record.job: record.id for record in records if record.id not in upcoming}
    numbers: Counter[str] = Counter()
    number_of: dict[str, int] = {}
    followed: set[str] = set()
    found = []
    for record in records:
        if record.follows not in number_of or record.follows in followed:
            numbers[record.job] += 1
        number_of[record.id] = numbers[record.job]
        followed.add(record.follows)
        sight = (sights or {}).get(record.id, Sight())
        before = [known[one] for one in record.before if one in known and record.may_run]
        waits_for = dict.fromkeys(
            one.part if one.id == record.follows else one.name for one in before if one.may_run
        )
        waits_for.pop("", None)
        condition = _condition(record, sight, waits=bool(waits_for), controlled=controlled)
        view = JobView(
            record=record,
            id=record.id,
            name=f"{record.name} ({record.part})" if record.part else record.name,
            rule=record.rule,
            state=_PICTURED[condition],
            site=record.site,
            jobs=(members or {}).get(record.id, (record.job,)),
            number=number_of[record.id],
            condition=condition,
            upcoming=record.id in upcoming,
            last=last.get(record.job) == record.id,
            pending=sight.pending or record.pending,
            waits_for=tuple(waits_for),
            awaited_by=tuple(awaiting.get(record.id, ())) if record.may_run else (),
            sight=sight,
            asked=record.what_asked,
            used=record.what_used,
            watched=controlled or sight.condition is not None,
        )
        found.append(replace(view, **_times(view, known)))
    return found


def present_attempts(records: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """Return the last attempt of each job, and all that may run, without upcoming segments."""
    return [job.record for job in overview_jobs(records, controlled=False) if job.present]


def _upcoming_segments(records: Iterable[AttemptRecord]) -> set[str]:
    """Return the ids of the segments whose turn has not come, or never came."""
    known: dict[str, AttemptRecord] = {}
    upcoming: set[str] = set()
    for record in records:  # the oldest first
        known[record.id] = record
        before = known.get(record.follows)
        if before is not None:
            came = before.goes_on or before.outcome.startswith(WENT_ON)
            came = came or (before.finished is not None and record.created >= before.finished)
            if before.id in upcoming or not came:
                upcoming.add(record.id)
    return upcoming


def _condition(record: AttemptRecord, sight: Sight, *, waits: bool, controlled: bool) -> Condition:
    if record.left_behind:
        return Condition.ORPHANED
    if record.outcome:
        ends = (Condition.WENT_ON, Condition.SUCCEEDED, Condition.FAILED)
        return next((e for e in ends if record.outcome.startswith(e.value)), Condition.CANCELLED)
    if record.state in (AttemptState.PLANNED, AttemptState.ENDED):
        return Condition.PLANNED if record.state is AttemptState.PLANNED else Condition.OVER
    if sight.condition is Condition.OVER or record.started is None:
        unseen = Condition.WAITING if controlled else Condition.OPEN
        if record.state is AttemptState.SUBMITTING:
            unseen = Condition.SUBMITTING
        if waits or record.waits:
            unseen = Condition.WAITING
        return sight.condition or unseen
    return Condition.RUNNING


def _times(job: JobView, known: Mapping[str, AttemptRecord]) -> dict[str, Any]:
    """Return the times of an attempt by their names in `Node`, by what is most exact."""
    record, used = job.record, job.used
    submitted, ran = record.submitted, record.ran
    # Since when nothing but the queue keeps it from running; None if not yet.
    queued, before = submitted, [known[i] for i in record.before if i in known]
    turn = turn_of(before)
    if submitted is not None and used.behind is not None:
        queued = submitted + used.behind
    elif submitted is not None and before:
        queued = max(submitted, turn) if turn is not None else None

    started = record.started or job.sight.started
    if used.ended is not None and ran is not None:
        started = used.ended - ran
    elif not started and submitted is not None and record.waited is not None:
        started = submitted + (used.behind or 0.0) + record.waited
    elif not started and record.finished is not None and ran is not None:
        started = record.finished - ran
    ended = None
    if record.outcome and not record.left_behind:
        measured = started + ran if started and ran is not None else record.finished
        ended = measured if used.ended is None else used.ended

    started = _earlier(started or None, ended)
    if started is not None and turn is not None and turn <= (ended or turn):
        started = max(started, turn)  # clocks tell less exactly that it ran after those before it
    queued = _earlier(queued, started)
    submitted = _earlier(submitted, queued)
    fetched = None
    if ended is not None and job.state in (NodeState.SUCCEEDED, NodeState.FAILED):
        fetched = max(ended, record.finished or ended)
    return {
        "prepared": record.created if submitted is not None else None, "submitted": submitted,
        "queued": queued, "started": started, "ended": ended, "fetched": fetched,
    }  # fmt: skip


def _earlier(moment: float | None, other: float | None) -> float | None:
    return min(moment, other) if moment is not None and other is not None else moment


_SHORTEST_ID: Final = 8
"""Minimum number of characters of an attempt's id to name it."""


def is_meant(text: str, record: AttemptRecord) -> bool:
    """Return whether a text names an attempt.

    It does by the job's name, its rule, its rule and some of its wildcards (`train sample=a`), an
    id at the site as the site or a table has it, or at least eight characters of the attempt's own.
    """
    ids = {part for job in record.site_jobs for part in (job, job.rstrip("/").rsplit("/", 1)[-1])}
    if text in {record.name, record.rule, site_ids(record), *ids}:
        return True
    rule, *given = text.replace(",", " ").split() or [""]
    wildcards = record.name.removeprefix(record.rule).replace(",", " ").split()
    named = rule == record.rule and bool(given) and set(given) <= set(wildcards)
    return named or (len(text) >= _SHORTEST_ID and record.id.startswith(text))


def _makes(text: str, record: AttemptRecord) -> bool:
    outputs = set(map(display_path, record.basis.get("makes", ())))
    return any(nearest(to(text), outputs) for to in (os.path.normpath, os.path.relpath))


def find_attempt(directory: Path, text: str) -> AttemptRecord:
    """Return the last attempt of the one job that a text names; `directory` is the state directory.

    A name of a member of a group means the group. An output or a log file names its job, too.

    Raises:
        UserError: it names no job, or several, which are listed.
        JournalError: there is no journal, or it cannot be read.
    """
    records = read_history(directory)
    found = [r for r in records if r.id.startswith(text)] if len(text) >= _SHORTEST_ID else []
    found = found[:1]
    if not found:
        present = present_attempts(records)
        found = [record for record in present if is_meant(text, record)]
        # A job may have the name of a rule whose other jobs have wildcards.
        found = [record for record in found if text == record.name] or found
        found = found or read_history(directory, text)[-1:]
        found = found or [record for record in present if _makes(text, record)]
    names = dict.fromkeys(record.name for record in found)
    if len(names) == 1:
        return found[-1]
    if not names:
        known = list_names(dict.fromkeys(record.name for record in records))
        raise UserError(
            f"no job is named {text!r}; these were submitted:{known or ' none'}",
            do="Use a name, a rule or an id that smk-mantik jobs shows, or the path of an output",
        )
    raise UserError(
        f"{text!r} names {len(names)} jobs:{list_names(names)}",
        do="Name one of them, with its wildcards or its id at the site",
    )


def list_names(names: Iterable[str]) -> str:
    """Return the first of some jobs' names, in a line each, and how many more there are."""
    return "".join(f"\n  {name}" for name in shorten_list(names))
