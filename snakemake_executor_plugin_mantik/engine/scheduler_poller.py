"""Query the scheduler about tries that have no marker.

The first query about a try comes when it has had no claim for some seconds, or misses its first
heartbeat. The interval of further queries depends on how long the try has been waiting and on how
many others are queried. With the defaults, an end of a running job without a marker is usually
known within half a minute if the scheduler reports it as abnormal.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site

from .evidence import LOOK, UNKNOWN, Evidence, Finding, judge, read_owner, revoke_try
from .site_retry import SiteRetry

FIRST_CHECK_S = 5.0
"""Seconds from the submission to the first query about an unclaimed try."""
_CHECK_GROWTH = 3.0
_CHECK_S = 20.0
"""Seconds between two queries about a try after the first few, unless it has waited for long or
many tries are queried."""
SPACING_S = 0.5
"""Seconds between two queries if each try takes a request of its own: the load on a site must not
grow with the number of jobs."""
_WAITED_SHARE = 20.0
"""A long-waiting try is queried again after a twentieth of the time that it has waited, ..."""
_LONGEST_CHECK_S = 300.0
"""... but after at most this many seconds."""
_TOGETHER_S = 5.0
"""Tries that are due within this many seconds are queried together: a site may need one request for
all of them."""
_LATE_BEATS = 1.25
"""Heartbeat intervals after which a heartbeat is missing."""
_DETAILS_AT_ONCE = 5
"""Most jobs per cycle to query for details, at a site whose states lag behind its scheduler's."""
_OVER = (Finding.ENDED, Finding.LOST)


@dataclass(kw_only=True)
class Watched(Evidence):
    """A watched try.

    Attributes:
        sent: how often it was submitted; some ids may still be unknown.
        live: whether it reports what it logs while it runs.
        detailed: when the scheduler's details of it were last requested.
        waits: the scheduler's reason why it cannot start.
        pending: the scheduler's reason why it has not started.
        expected: the start that the scheduler expects (`starts_after` and `started` of its state).
        began: whether it can only have begun to run since it was watched or submitted.
        told: whether its start was reported.
        revived: whether it has shown a sign of life after the site had reported its end.
    """

    record: TryRecord
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
    told: bool = False
    revived: bool = False

    def lives(self) -> None:
        self.revived |= self.ended_since is not None
        super().lives()


class PollTarget(Protocol):
    """The watcher's methods that the poller calls."""

    async def look(self, records: Iterable[TryRecord]) -> None:
        """List the buckets of `records` again."""

    def alive(self, watched: Watched) -> None:
        """Look at a try again soon that has shown a sign of life."""

    def hurry(self) -> None:
        """Look again soon."""

    def end(self, watched: Watched, found: Finding, state: JobState | None = None) -> None:
        """End a try, with the scheduler's state if that counts."""


class SchedulerPoller:
    """Query the scheduler, whose state yields to a marker, from the event loop's thread."""

    def __init__(
        self,
        site: Site,
        settings: SiteSettings,
        retry: SiteRetry,
        watching: PollTarget,
        *,
        on_found: Callable[[str, str], None],
        on_waiting: Callable[[TryRecord, str], None],
        on_pending: Callable[[TryRecord, str, JobState], None],
        clock: Callable[[], float],
    ) -> None:
        self._site = site
        self._settings = settings
        self._retry = retry
        self._watching = watching
        self._on_found = on_found
        self._on_waiting = on_waiting
        self._on_pending = on_pending
        self._clock = clock

    def _overdue(self, watched: Watched, now: float) -> bool:
        # With many buckets the last listing of one may be older than the try.
        if now < watched.next_check or not watched.looked:
            return False
        if watched.may_end is not None:
            return now > watched.may_end
        return (
            not watched.claimed
            or watched.silent > _LATE_BEATS * self._settings.timing.script.heartbeat_s
        )

    async def examine(self, tries: Iterable[Watched]) -> None:
        """Query the scheduler about those of `tries` that are overdue.

        Raises:
            SiteError: the site did not answer; the tries that this concerns are still watched.
        """
        now = self._clock()
        tries = list(tries)
        if not any(self._overdue(watched, now) for watched in tries):
            return
        overdue = [watched for watched in tries if self._overdue(watched, now + _TOGETHER_S)]
        for watched in overdue:
            watched.next_check = now + watched.check_delay
        known = await self.identify(overdue)
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
                self._watching.hurry()
            if finding is Finding.VANISHED:
                self._watching.end(watched, finding)
            elif finding in _OVER:
                over.append(watched)
        stuck = [watched for watched in known if self._report_waiting_reason(watched, states)]
        await self.each(stuck, self._give_up)
        over = await self.each(over, self._certain)
        if over:
            # A marker that has appeared meanwhile wins, and so does a new sign of life.
            await self._watching.look(w.record for w in over)
            await self.each([w for w in over if w.shown], self._explain)

    async def each(
        self, tries: Sequence[Watched], act: Callable[[Watched], Awaitable[bool]]
    ) -> list[Watched]:
        """Call `act` for all tries; return those for which it returns True.

        An error of one does not stop the others. Errors other than the site's are raised after all
        have been called.
        """
        answers = await asyncio.gather(*map(act, tries), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, SiteError):
                self._retry.failed(answer)
            elif isinstance(answer, BaseException):
                raise answer
        return [w for w, yes in zip(tries, answers, strict=True) if yes is True]

    async def identify(self, tries: Sequence[Watched]) -> list[Watched]:
        """Look up the owners and ids of tries; return the tries that can be queried."""
        known = await self.each(tries, self._own)
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
        for try_id, site_jobs in found.items():
            for site_job in site_jobs:
                if site_job not in incomplete[try_id].ids:
                    incomplete[try_id].ids.append(site_job)
                    self._on_found(try_id, site_job)
        return known

    async def _own(self, watched: Watched) -> bool:
        if watched.claimed and watched.owner is None:
            watched.owner = await read_owner(self._site, watched.record)
        return True

    async def _states(self, tries: list[Watched]) -> dict[str, JobState]:
        ids = [job_id for watched in tries for job_id in watched.ids]
        if not ids:
            return {}
        try:
            states = await self._site.states(ids)
        except SiteError as error:
            if _is_silent(error):
                raise
            return {}  # it lists directories, but has no states of these jobs
        if self._site.states_lag:
            return states | await self._current(tries, states)
        return states

    async def _current(
        self, tries: list[Watched], states: dict[str, JobState]
    ) -> dict[str, JobState]:
        """Return the scheduler's own states of some jobs that the site does not report as ended.

        Jobs with missing heartbeats come first; the others take turns, after some time.
        """

        def open_ids(watched: Watched) -> list[str]:
            found = ((i, states.get(i, UNKNOWN)) for i in watched.ids)
            known = ((i, s) for i, s in found if s.phase is not Phase.UNKNOWN or s.scheduler_id)
            return [i for i, s in known if s.phase is not Phase.ENDED]

        doubtful = [w for w in tries if (w.claimed or w.waited >= _CHECK_S) and open_ids(w)]
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

        await self.each(doubtful[:_DETAILS_AT_ONCE], explain)
        return current

    def _report_waiting_reason(self, watched: Watched, states: Mapping[str, JobState]) -> bool:
        """Report a new reason why a try cannot start; return whether it never will."""
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
            return False  # a single odd answer must not end a try
        return all(state.never for state in waiting)

    async def _give_up(self, watched: Watched) -> bool:
        """End a try that would wait for ever, unless it has started after all."""
        if not await self._certain(watched):
            return False
        with suppress(SiteNotFound, SiteRejected):
            await self._site.cancel(watched.ids)
        detail = f"it would wait for ever in the queue: {watched.waits}"
        state = JobState(Phase.ENDED, Reason.REJECTED, detail)
        self._watching.end(watched, Finding.ENDED, state)
        return True

    async def _certain(self, watched: Watched) -> bool:
        """Revoke a try that has not started; return False if it has started after all.

        For one that has started, make the file system show a marker that may be there already.
        """
        if watched.claimed:
            with suppress(SiteRejected):  # no room, for example: rely on a listing with the claim
                await self._site.put(f"{watched.record.paths.tries}/{LOOK}", b"\n")
            return True
        watched.revoked = True
        if await revoke_try(self._site, watched.record):
            return True
        watched.lives()
        self._watching.alive(watched)
        return False

    async def _explain(self, watched: Watched) -> bool:
        """End a try with the scheduler's state, in detail where it has details."""
        finding = judge(watched, self._clock(), self._settings)
        if watched.future.done() or finding not in _OVER:
            return False
        state = watched.last_state
        with suppress(SiteNotFound, SiteRejected):
            if watched.job:
                explained = await self._site.explain(watched.job)
                state = explained if explained.phase is Phase.ENDED else state
        self._watching.end(watched, finding, state)
        return True


def _is_silent(error: SiteError) -> bool:
    """Check whether a site gave no answer, was busy or refused our credentials: proves nothing.

    An error with an HTTP status, such as 500, is an answer.
    """
    if isinstance(error, SiteUnreachable):
        return error.status is None
    return isinstance(error, SiteBusy | SiteUnauthorized)


def _longest_delay(watched: Watched, number: int) -> float:
    """Return the most seconds until the next query about a try, with `number` tries queried now."""
    passed = watched.silent if watched.claimed else watched.waited
    return min(_LONGEST_CHECK_S, max(_CHECK_S, SPACING_S * number, passed / _WAITED_SHARE))
