"""Watch the attempts at one site with one listing per cycle, however many attempts there are.

The scheduler is queried only about overdue attempts: those that have had no claim for some seconds,
or miss a heartbeat. The interval of further queries depends on how long the attempt has been
waiting and on how many others are queried. With the defaults, an end of a running job without a
marker is usually known within half a minute if the scheduler reports it as abnormal. Long jobs get
a longer lifetime at the site, whose default may be a day.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from ..config.settings import SiteSettings
from ..jobs.paths import LIVE
from ..jobs.reasons import Reason
from ..journal import AttemptRecord
from ..sites.base import Entry, JobState, Phase, Site
from .evidence import (
    LOOK,
    UNKNOWN,
    Evidence,
    Finding,
    find_markers,
    judge,
    list_claims,
    read_owner,
    revoke_attempt,
)
from .site_retry import TRANSIENT, SiteRetry

FIRST_CHECK_S = 5.0
"""Seconds from the submission to the first query about an unclaimed attempt."""
_CHECK_GROWTH = 3.0
_CHECK_S = 20.0
"""Seconds between two queries about an attempt after the first few, unless it has waited for long
or many are queried."""
SPACING_S = 0.5
"""Seconds between two queries if each attempt takes a request of its own: the load on a site must
not grow with the number of jobs."""
_WAITED_SHARE = 20.0
"""A long-waiting attempt is queried again after a twentieth of the time that it has waited, ..."""
_LONGEST_CHECK_S = 300.0
"""... but after at most this many seconds."""
_TOGETHER_S = 5.0
"""Attempts that are due within this many seconds are queried together: a site may need one request
for all of them."""
_LATE_BEATS = 1.25
"""Heartbeat intervals after which a heartbeat is missing."""
_DETAILS_AT_ONCE = 5
"""Most jobs per cycle to query for details, at a site whose states lag behind its scheduler's."""
_OVER = (Finding.ENDED, Finding.LOST)
_LONGEST_WAIT_S = 86400.0
"""Longest wait before an attempt without a trace is submitted again. The wait starts at the
configured one and doubles each time: the server may have forgotten one that is in the queue."""
INTERRUPTED_WAIT_S = 15.0
"""How long to wait for a trace of an attempt that an earlier process submitted: unlike a request
that is still being answered, that one has arrived by now or never will. If it arrives late after
all, the claim lets the attempt run once."""
_MISTAKES = 5
"""Consecutive cycles that may fail on a bug of ours before the jobs get the error."""
_EXTEND_AFTER_S = 60.0
EXTEND_BY_S = 30 * 86400.0
_EXTEND_AGAIN_S = 7 * 86400.0
"""Seconds before the first extension of a job's lifetime at the site, length of the new lifetime,
and seconds between extensions. The site's default may be a day, after which it cancels the job.
Each extension looks up ids that are still unknown."""
_EXTEND_AT_ONCE = 500
"""Most attempts that one cycle extends: the next listing of all attempts waits for this."""
_EXTEND_REFUSED_S = 3600.0
"""Seconds before the next request if the site refused one, or while ids are still unknown."""


_Key = tuple[str, bool]


@dataclass(kw_only=True)
class Watched(Evidence):
    """A watched attempt.

    Attributes:
        sent: how often it was submitted; some ids may still be unknown.
        live: whether it reports what it logs while it runs.
        detailed: when the scheduler's details of it were last requested.
        waits: the scheduler's reason why it cannot start.
        pending: the scheduler's reason why it has not started.
        expected: the start that the scheduler expects (`starts_after` and `started` of its state).
        began: whether it can only have begun to run since it was watched or submitted.
        reported: whether its start was.
        revived: whether it has shown a sign of life after the site had reported its end.
    """

    record: AttemptRecord
    future: "asyncio.Future[Evidence]"
    sent: int
    next_check: float
    next_extension: float
    live: bool = False
    check_delay: float = FIRST_CHECK_S
    detailed: float = 0.0
    waits: str = ""
    pending: str = ""
    expected: tuple[float | None, float | None] = (None, None)
    began: bool = True
    reported: bool = False
    revived: bool = False

    @property
    def key(self) -> _Key:
        """Return its key: an attempt may be adopted while another job has it ended."""
        return self.record.id, self.may_end is not None

    def lives(self) -> None:
        self.revived |= self.ended_since is not None
        super().lives()


class Watcher:
    """Watch all attempts at one site. Call all methods from the event loop's thread."""

    def __init__(
        self,
        site: Site,
        settings: SiteSettings,
        retry: SiteRetry,
        on_found: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        on_started: Callable[[AttemptRecord, bool], None] = lambda _, __: None,
        on_logged: Callable[[AttemptRecord, int], None] = lambda _, __: None,
        on_waiting: Callable[[AttemptRecord, str], None] = lambda _, __: None,
        on_pending: Callable[[AttemptRecord, str, JobState], None] = lambda _, __, ___: None,
    ) -> None:
        """Make a watcher, which looks at the site as long as attempts are watched.

        It calls `on_found` with an attempt's id and a job id of the site that was found for it;
        `on_started` with an attempt when it is first seen to run, and whether it began since it was
        watched or submitted; `on_logged` at each look with each attempt that logs live, and the
        bytes logged; `on_waiting` whenever the scheduler's reason changes why an attempt cannot
        start, which is empty if it only waits its turn, or has started; `on_pending` whenever the
        reason changes why it has not started, its turn among the reasons, or the start that the
        scheduler expects.
        """
        self._site = site
        self._on_logged = on_logged
        self._on_started = on_started
        self._on_waiting = on_waiting
        self._settings = settings
        self._retry = retry
        self._clock = clock
        self._watched: dict[_Key, Watched] = {}
        self._last: dict[int, tuple[float, dict[str, tuple[int, Entry]]]] = {}
        self._changed = clock()
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._on_found = on_found
        self._on_pending = on_pending
        self.cycles = 0

    def watch(
        self,
        record: AttemptRecord,
        ids: Iterable[str],
        *,
        sent: int = 1,
        live: bool = False,
        interrupted: bool = False,
    ) -> "asyncio.Future[Evidence]":
        """Watch an attempt; return a future of the evidence with which it ends.

        `ids` are empty if the submission's fate is unknown. For `sent` and `live` see `Watched`.
        `interrupted` is set if an earlier process submitted it and may have died meanwhile.
        """
        wait = min(self._settings.timing.unknown_wait_s * 2.0 ** min(sent - 1, 30), _LONGEST_WAIT_S)
        if interrupted:
            wait = min(wait, INTERRUPTED_WAIT_S)
        watched = self._new(record, ids, sent)
        watched.live, watched.wait_s, watched.began = live, wait, not interrupted
        at, markers = self._last.get(record.bucket, (0.0, {}))
        if record.id in markers and watched.seen - at <= self._settings.poll_s:
            watched.mark(*markers[record.id])  # nobody watched it
            watched.found = Finding.MARKER
            watched.future.set_result(watched)
        else:
            self._add(watched)
        return watched.future

    def stop(self, record: AttemptRecord, ids: Iterable[str], *, revoked: bool) -> Watched:
        """Watch an attempt that has started, and that the site was asked to end now.

        `revoked` says whether its claim was replaced, since it had been purged.
        """
        watched = self._new(record, ids, 1)
        grace_s = self._settings.term_grace_s + self._settings.timing.marker_grace_s
        watched.claimed, watched.reported, watched.revoked = True, True, revoked
        watched.may_end, watched.next_extension = watched.seen + grace_s, math.inf
        self._add(watched)
        return watched

    def _new(self, record: AttemptRecord, ids: Iterable[str], sent: int) -> Watched:
        now = self._clock()
        return Watched(
            record=record, future=asyncio.get_running_loop().create_future(), ids=list(ids),
            sent=sent, denied_since=now, seen=now, next_check=now + FIRST_CHECK_S,
            next_extension=now + _EXTEND_AFTER_S, waits=record.waits, pending=record.pending,
        )  # fmt: skip

    def _add(self, watched: Watched) -> None:
        self._watched[watched.key] = watched
        self.hurry()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    def count(self) -> tuple[int, int]:
        """Return how many watched attempts run, and how many wait. Any thread may call this."""
        watched = list(self._watched.values())
        running = sum(each.claimed for each in watched)
        return running, len(watched) - running

    def forget(self, attempt_id: str) -> bool:
        """Stop watching an attempt that is not being ended; return whether it was seen to run."""
        watched = self._watched.get((attempt_id, False))
        if watched is None:
            return False
        self.drop(watched)
        watched.future.cancel()
        return watched.claimed

    def has_started(self, attempt_id: str) -> bool:
        """Return whether an attempt is watched that has been seen to run."""
        watched = self._watched.get((attempt_id, False))
        return watched is not None and watched.claimed

    def drop(self, watched: Watched) -> None:
        """Stop watching, unless it has been watched anew since a failure."""
        if self._watched.get(watched.key) is watched:
            del self._watched[watched.key]

    def hurry(self) -> None:
        """Look again soon."""
        self._changed = self._clock()
        self._wake.set()

    def interval(self) -> float:
        """Return the seconds until the next cycle, which grow with the time since a change."""
        quiet = self._clock() - self._changed
        return min(max(self._settings.timing.poll_min_s, quiet / 10), self._settings.poll_s)

    def close(self) -> None:
        """Stop looking; the attempts that are still watched do not end."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        mistakes = 0
        while self._watched:
            self._wake.clear()
            try:
                await self.cycle()
            except SiteError as error:
                # No error of a site while listing its jobs ends them.
                self._retry.failed(error)
            except Exception as error:  # noqa: BLE001 - a bug of ours: the jobs report it
                # If it breaks each cycle, they must not wait for ever.
                mistakes += 1
                if mistakes >= _MISTAKES:
                    self.fail(error)
            else:
                mistakes = 0
                self._retry.answered()
            # A new attempt is worth an early look, but never more often than the shortest interval.
            await asyncio.sleep(self._settings.timing.poll_min_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval() - self._settings.timing.poll_min_s):
                    await self._wake.wait()

    def fail(self, error: Exception) -> None:
        """Stop watching all attempts; raise `error` where their ends are awaited."""
        for watched in self._watched.values():
            if not watched.future.done():
                watched.future.set_exception(error)
                watched.future.exception()  # nobody may wait for it any more
        self._watched.clear()

    async def cycle(self) -> None:
        """List the open buckets once, query the scheduler about overdue attempts, extend lifetimes.

        Raises:
            SiteError: the site did not answer for some attempts; these are still watched.
        """
        self.cycles += 1
        await self._look(list(self._watched.values()))
        await self._examine(list(self._watched.values()))
        await self._extend(list(self._watched.values()))

    async def _look(self, attempts: Iterable[Watched]) -> None:
        """List the buckets of `attempts`, each once.

        Raises:
            SiteError: a bucket could not be listed; the others have been.
        """
        failed: SiteError | None = None
        for bucket, directory in {
            w.record.bucket: w.record.paths.attempts for w in attempts
        }.items():
            try:
                entries = await list_claims(self._site, self._retry, directory)
                self._see(bucket, entries)
            except SiteError as error:
                failed = error
        if failed is not None:
            raise failed

    def _see(self, bucket: int, entries: dict[str, Entry]) -> None:
        now, markers = self._clock(), find_markers(entries)
        self._last[bucket] = now, markers
        for watched in [w for w in self._watched.values() if w.record.bucket == bucket]:
            attempt_id = watched.record.id
            alive = watched.see(attempt_id, entries, now, 2.0 * self._settings.poll_s)
            if attempt_id in markers:
                watched.mark(*markers[attempt_id])
                self._waits_no_more(watched)
            found = judge(watched, now, self._settings)
            if found in (Finding.MARKER, Finding.REVOKED):
                self._end(watched, found)
                continue
            watched.began |= attempt_id not in entries
            if alive:
                self._alive(watched)
            if watched.live and (live := entries.get(f"{attempt_id}{LIVE}")):
                self._on_logged(watched.record, live.size)

    def _alive(self, watched: Watched) -> None:
        now = self._clock()
        watched.next_check, watched.check_delay = now, FIRST_CHECK_S
        if not watched.reported:
            watched.reported, self._changed = True, now
            self._waits_no_more(watched)
            self._on_started(watched.record, watched.began)

    def _waits_no_more(self, watched: Watched) -> None:
        if watched.waits:
            watched.waits = ""
            self._on_waiting(watched.record, "")

    def _end(self, watched: Watched, found: Finding, state: JobState | None = None) -> None:
        self.drop(watched)
        self._changed = self._clock()
        watched.found, watched.state = found, state
        if not watched.future.done():
            watched.future.set_result(watched)

    # Lifetimes at the site

    async def _extend(self, attempts: Iterable[Watched]) -> None:
        """Keep the site from ending jobs whose lifetime there is over."""
        now = self._clock()
        due = [w for w in attempts if now >= w.next_extension][:_EXTEND_AT_ONCE]
        for watched in due:
            watched.next_extension = now + _EXTEND_AFTER_S
        unsure = [w for w in due if len(w.ids) < w.sent]
        sure = [w for w in due if len(w.ids) >= w.sent]
        known = [w for w in [*sure, *(unsure and await self._identify(unsure))] if w.ids]
        if not known:
            return
        wait = _EXTEND_AGAIN_S
        try:
            await self._site.extend([i for w in known for i in w.ids], EXTEND_BY_S)
        except TRANSIENT:
            return
        except SiteError as error:
            wait = _EXTEND_REFUSED_S
            self._retry.note(f"it may end jobs whose lifetime there is over. {error}")
        for watched in known:
            all_known = len(watched.ids) >= watched.sent
            watched.next_extension = now + (wait if all_known else _EXTEND_REFUSED_S)

    # What the scheduler says

    def _overdue(self, watched: Watched, now: float) -> bool:
        # With many buckets the last listing of one may be older than the attempt.
        if now < watched.next_check or not watched.looked:
            return False
        if watched.may_end is not None:
            return now > watched.may_end
        return (
            not watched.claimed
            or watched.silent > _LATE_BEATS * self._settings.timing.script.heartbeat_s
        )

    async def _examine(self, attempts: Iterable[Watched]) -> None:
        """Query the scheduler about those of `attempts` that are overdue.

        Raises:
            SiteError: the site did not answer; the attempts that this concerns are still watched.
        """
        now, attempts = self._clock(), list(attempts)
        if not any(self._overdue(watched, now) for watched in attempts):
            return
        overdue = [watched for watched in attempts if self._overdue(watched, now + _TOGETHER_S)]
        for watched in overdue:
            watched.next_check = now + watched.check_delay
        known = await self._identify(overdue)
        states = await self._states(known)
        over = []
        for watched in known:
            delay = min(watched.check_delay * _CHECK_GROWTH, _longest_delay(watched, len(known)))
            watched.check_delay = max(watched.check_delay, delay)
            watched.hear(states)
            first = watched.ended_since is None
            finding = judge(watched, now, self._settings)
            watched.next_check = min(now + watched.check_delay, watched.due)
            if first and watched.ended_since is not None:
                self.hurry()
            if finding is Finding.VANISHED:
                self._end(watched, finding)
            elif finding in _OVER:
                over.append(watched)
        stuck = [watched for watched in known if self._report_waiting_reason(watched, states)]
        await self._each(stuck, self._give_up)
        over = await self._each(over, self._certain)
        if over:
            # A marker that has appeared meanwhile wins, and so does a new sign of life.
            await self._look(over)
            await self._each([w for w in over if w.shown], self._explain)

    async def _each(
        self, attempts: Sequence[Watched], act: Callable[[Watched], Awaitable[bool]]
    ) -> list[Watched]:
        """Call `act` for all attempts; return those for which it returns True.

        An error of one does not stop the others. Errors other than the site's are raised after all
        have been called.
        """
        answers = await asyncio.gather(*map(act, attempts), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, SiteError):
                self._retry.failed(answer)
            elif isinstance(answer, BaseException):
                raise answer
        return [w for w, yes in zip(attempts, answers, strict=True) if yes is True]

    async def _identify(self, attempts: Sequence[Watched]) -> list[Watched]:
        """Look up the owners and ids of attempts; return the attempts that can be queried."""
        known = await self._each(attempts, self._own)
        incomplete = {w.record.id: w for w in known if len(w.ids) < w.sent}
        if not incomplete:
            return known
        try:
            found = await self._site.find({w.record.id: w.record.name for w in incomplete.values()})
        except SiteError as error:
            if _is_silent(error) or isinstance(error, SiteNotFound):
                self._retry.failed(error)
                return [watched for watched in known if watched.record.id not in incomplete]
            # The site answers but cannot list jobs, and may never be able to.
            self._retry.note(
                "it cannot list your jobs. Submissions that it did not confirm are repeated"
                f" without looking for them; each job still runs only once. {error}"
            )
            return known
        for attempt_id, site_jobs in found.items():
            ids = incomplete[attempt_id].ids
            for site_job in [i for i in site_jobs if i not in ids]:
                ids.append(site_job)
                self._on_found(attempt_id, site_job)
        return known

    async def _own(self, watched: Watched) -> bool:
        if watched.claimed and watched.owner is None:
            watched.owner = await read_owner(self._site, watched.record)
        return True

    async def _states(self, attempts: list[Watched]) -> dict[str, JobState]:
        ids = [job_id for watched in attempts for job_id in watched.ids]
        if not ids:
            return {}
        try:
            states = await self._site.states(ids)
        except SiteError as error:
            if _is_silent(error):
                raise
            return {}  # it lists directories, but has no states of these jobs
        if self._site.states_lag:
            return states | await self._current(attempts, states)
        return states

    async def _current(
        self, attempts: list[Watched], states: dict[str, JobState]
    ) -> dict[str, JobState]:
        """Return the scheduler's own states of some jobs that the site does not report as ended.

        Jobs with missing heartbeats come first; the others take turns, after some time.
        """

        def open_ids(watched: Watched) -> list[str]:
            found = ((i, states.get(i, UNKNOWN)) for i in watched.ids)
            known = ((i, s) for i, s in found if s.phase is not Phase.UNKNOWN or s.scheduler_id)
            return [i for i, s in known if s.phase is not Phase.ENDED]

        doubtful = [w for w in attempts if (w.claimed or w.waited >= _CHECK_S) and open_ids(w)]
        doubtful.sort(key=lambda w: (not w.claimed, w.detailed))
        current: dict[str, JobState] = {}

        async def explain(watched: Watched) -> bool:
            watched.detailed = self._clock()
            for job_id in open_ids(watched):
                with suppress(SiteNotFound, SiteRejected):
                    state = await self._site.explain(job_id)
                    if state.phase is not Phase.UNKNOWN:
                        current[job_id] = state
            return True

        await self._each(doubtful[:_DETAILS_AT_ONCE], explain)
        return current

    def _report_waiting_reason(self, watched: Watched, states: Mapping[str, JobState]) -> bool:
        """Report a new reason why an attempt cannot start; return whether it never will."""
        known = [states[i] for i in watched.ids if i in states]
        waiting = [state for state in known if state.phase is Phase.WAITING]
        reasons = [state.waits for state in waiting if state.waits is not None]
        if watched.claimed or not reasons or len(waiting) < len(known):
            return False
        pending = next((state.pending for state in reversed(waiting) if state.pending), "")
        expected = waiting[-1].starts_after, waiting[-1].started
        if pending != watched.pending or expected != watched.expected:
            watched.pending, watched.expected = pending, expected
            self._on_pending(watched.record, pending, waiting[-1])
        why = reasons[-1]
        if why != watched.waits:
            watched.waits = why
            self._on_waiting(watched.record, why)
            return False  # a single odd answer must not end an attempt
        return all(state.never for state in waiting)

    async def _give_up(self, watched: Watched) -> bool:
        """End an attempt that would wait for ever, unless it has started after all."""
        if not await self._certain(watched):
            return False
        with suppress(SiteNotFound, SiteRejected):
            await self._site.cancel(watched.ids)
        detail = f"it would wait for ever in the queue: {watched.waits}"
        state = JobState(Phase.ENDED, Reason.REJECTED, detail)
        self._end(watched, Finding.ENDED, state)
        return True

    async def _certain(self, watched: Watched) -> bool:
        """Revoke an attempt that has not started; return False if it has started after all.

        For one that has started, make the file system show a marker that may be there already.
        """
        if watched.claimed:
            with suppress(SiteRejected):  # no room, for example: rely on a listing with the claim
                await self._site.put(f"{watched.record.paths.attempts}/{LOOK}", b"\n")
            return True
        watched.revoked = True
        if await revoke_attempt(self._site, watched.record):
            return True
        watched.lives()
        self._alive(watched)
        return False

    async def _explain(self, watched: Watched) -> bool:
        """End an attempt with the scheduler's state, in detail where it has details."""
        finding = judge(watched, self._clock(), self._settings)
        if watched.future.done() or finding not in _OVER:
            return False
        state = watched.last_state
        with suppress(SiteNotFound, SiteRejected):
            if watched.job:
                explained = await self._site.explain(watched.job)
                state = explained if explained.phase is Phase.ENDED else state
        self._end(watched, finding, state)
        return True


def _is_silent(error: SiteError) -> bool:
    """Check whether a site gave no answer, was busy or refused our credentials: proves nothing.

    An error with an HTTP status, such as 500, is an answer.
    """
    if isinstance(error, SiteUnreachable):
        return error.status is None
    return isinstance(error, SiteBusy | SiteUnauthorized)


def _longest_delay(watched: Watched, number: int) -> float:
    """Return the most seconds to the next query about an attempt, with `number` queried now."""
    passed = watched.silent if watched.claimed else watched.waited
    return min(_LONGEST_CHECK_S, max(_CHECK_S, SPACING_S * number, passed / _WAITED_SHARE))
