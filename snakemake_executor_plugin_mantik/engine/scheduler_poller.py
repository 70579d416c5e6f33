"""Asking the scheduler about tries that the markers say nothing of.

Its word counts only where the job itself can write nothing any more, or never started: what is
unknown, missing or unreachable never ends a try.

A try is asked about when it is not claimed soon, and when its first heartbeat is missing; then
again and again, at a pace that depends on how long it has been waiting and on how many others are
asked about, not on luck. With the defaults an end without a marker is known within half a minute.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
from snakemake_executor_plugin_mantik.engine import claims
from snakemake_executor_plugin_mantik.engine.attempt import UNKNOWN, TryEnd, TryEndKind, Watched
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site

_CHECK_GROWTH = 3.0
_CHECK_S = 20.0
"""Seconds between two questions about a try, once it has been asked about a few times."""
SPACING_S = 0.5
"""Seconds between two questions, if a site is asked about each try with a request of its own: the
load that we are for a site does not grow with the number of jobs."""
_WAITED_SHARE = 20.0
"""A try that has been waiting for a long time is asked about after a twentieth of it, ..."""
_LONGEST_CHECK_S = 300.0
"""... but after so many seconds at the latest."""
_TOGETHER_S = 5.0
"""Tries that are due within so many seconds are asked about together: a site may need one request
for all of them."""
_LATE_BEATS = 1.25
"""Heartbeats after which one is missing."""
_DETAILS_AT_ONCE = 5
"""Jobs whose details are asked for together, at a site whose states lag behind its scheduler's."""
_ABNORMAL_GRACE_S = 10.0
"""How long to wait at most for the marker of a job of which the scheduler says that something ended
it. What the file system of the site's server may not show yet, it shows after a write of its own:
an NFS client reads a directory again once it has changed it."""
_USUAL_ENDS = frozenset({None, Reason.SUCCESS, Reason.EXIT_CODE})
"""Ends of jobs that write a marker; it is waited for as long as the user has set."""
LOST_S = 1800.0
"""Seconds without a heartbeat, and with the site denying the job, after which a try is lost.

Only seconds in which the site let us look count: after an outage everything seems silent.
"""
_LOST_LOOKS = 5
"""Looks that must have found no heartbeat by then: a site may well deny a directory once."""


LOOK = ".look"
"""A file that is written to a directory of claims before it is listed for the last time."""


class PollTarget(Protocol):
    """What the poller does to the tries that are watched."""

    async def look(self, records: Iterable[TryRecord]) -> None:
        """List the markers of `records` again."""

    def alive(self, watched: Watched) -> None:
        """Note a sign of life."""

    def hurry(self) -> None:
        """Look again soon."""

    def end(self, watched: Watched, end: TryEnd) -> None:
        """End a try."""


class SchedulerPoller:
    """Asks the scheduler, whose word comes second to a marker's, on the event loop's thread."""

    def __init__(
        self,
        site: Site,
        settings: SiteSettings,
        retry: SiteRetry,
        watching: PollTarget,
        *,
        on_found: Callable[[str, str], None],
        on_waiting: Callable[[TryRecord, str], None],
        clock: Callable[[], float],
    ) -> None:
        """Make it; the arguments are those of the watcher, and the watcher itself."""
        self._site = site
        self._settings = settings
        self._retry = retry
        self._watching = watching
        self._on_found = on_found
        self._on_waiting = on_waiting
        self._clock = clock

    def _overdue(self, watched: Watched, now: float) -> bool:
        # With many buckets the look at one may be older than the try.
        if now < watched.next_check or not watched.looked:
            return False
        return not watched.claimed or watched.silent > _LATE_BEATS * self._settings.heartbeat_s

    async def examine(self, tries: Iterable[Watched]) -> None:
        """Ask the scheduler about those of `tries` that are overdue.

        Raises:
            SiteError: it could not be asked; nothing has changed.
        """
        now = self._clock()
        tries = list(tries)
        if not any(self._overdue(watched, now) for watched in tries):
            return
        overdue = [watched for watched in tries if self._overdue(watched, now + _TOGETHER_S)]
        for watched in overdue:
            watched.next_check = now + watched.check_delay
        asked = await self.identify(overdue)
        states = await self._states(asked)
        over = []
        for watched in asked:
            delay = min(watched.check_delay * _CHECK_GROWTH, _longest_delay(watched, len(asked)))
            watched.check_delay = max(watched.check_delay, delay)
            watched.next_check = now + watched.check_delay
            if self._judge(watched, {i: states.get(i, UNKNOWN) for i in watched.ids}, now):
                over.append(watched)
        stuck = [watched for watched in asked if self._hears_why_it_waits(watched, states)]
        await self.each(stuck, self._give_up)
        over = await self.each(over, self._certain)
        if over:
            # A marker may have come in the meantime: it wins, and so does a new sign of life.
            await self._watching.look(w.record for w in over)
            await self.each([w for w in over if w.ended_since is not None], self._explain)

    async def each(
        self, tries: Sequence[Watched], act: Callable[[Watched], Awaitable[bool]]
    ) -> list[Watched]:
        """Do `act` for all; those for which it said yes. One's trouble does not stop the others."""
        answers = await asyncio.gather(*map(act, tries), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, SiteError):
                self._retry.failed(answer)
            elif isinstance(answer, BaseException):
                raise answer
        return [w for w, yes in zip(tries, answers, strict=True) if yes is True]

    async def identify(self, tries: Sequence[Watched]) -> list[Watched]:
        """Find out the owners and the ids of tries; those of which we know whom to ask about."""
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
            # It answers, and cannot list jobs: waiting for that could take for ever.
            self._retry.note(
                "It cannot list your jobs. Submissions that it did not confirm are made again"
                f" without looking for them; each job runs once all the same. {error}"
            )
            return known
        for try_id, site_jobs in found.items():
            for site_job in site_jobs:
                if site_job not in incomplete[try_id].ids:
                    incomplete[try_id].ids.append(site_job)
                    self._on_found(try_id, site_job)
        return known

    async def _own(self, watched: Watched) -> bool:
        """See to it that we know who holds the claim of a try, if it has one."""
        if watched.claimed and watched.owner is None:
            watched.owner = await claims.read_owner(self._site, watched.record)
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
            return {}  # it lists directories, and cannot speak of these jobs
        if self._site.states_lag:
            return states | await self._current(tries, states)
        return states

    async def _current(
        self, tries: list[Watched], states: dict[str, JobState]
    ) -> dict[str, JobState]:
        """What the scheduler itself says of some jobs of which the site tells no end.

        Those whose heartbeats are missing come first; the others take turns, after some time.
        """

        def open_ids(watched: Watched) -> list[str]:
            told = ((i, states.get(i, UNKNOWN)) for i in watched.ids)
            known = ((i, s) for i, s in told if s.phase is not Phase.UNKNOWN or s.scheduler_id)
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

    def _judge(self, watched: Watched, states: dict[str, JobState], now: float) -> bool:
        """Whether the scheduler's word is that the try ended, for some time already.

        What the site does not know proves nothing: wait, and longer if the job has started.
        """
        known = dict(states)
        if watched.claimed and watched.owner is not None:
            known = {i: s for i, s in states.items() if watched.owner.is_job(i, s)}
        phases = {state.phase for state in known.values()}
        if phases & {Phase.WAITING, Phase.RUNNING}:
            watched.ended_since = watched.denied_since = None
            return False
        if watched.denied_since is None:
            watched.denied_since = now
        limit, passed = watched.wait_s, watched.waited
        if watched.claimed:
            limit = max(LOST_S, _LOST_LOOKS * self._settings.poll_max_s)
            passed = watched.silent
        left = limit - min(passed, now - watched.denied_since)
        patient = left > 0
        if Phase.ENDED in phases and (Phase.UNKNOWN not in phases or not patient):
            watched.word = [(i, s) for i, s in known.items() if s.phase is Phase.ENDED][-1]
            if watched.ended_since is None:
                watched.ended_since = now
                self._watching.hurry()
            over = watched.ended_since + self._grace_s(watched)
            watched.next_check = min(watched.next_check, over)
            return now >= over
        watched.ended_since = None
        if patient:
            watched.next_check = min(watched.next_check, now + left)
        elif watched.claimed:
            state = JobState(Phase.ENDED, detail="no heartbeat, and the site knows no such job")
            self._watching.end(watched, TryEnd(TryEndKind.SCHEDULER, state=state, claimed=True))
        else:
            self._watching.end(watched, TryEnd(TryEndKind.VANISHED))
        return False

    def _hears_why_it_waits(self, watched: Watched, states: Mapping[str, JobState]) -> bool:
        """Report why a try cannot start, once; whether it never will."""
        known = [states[i] for i in watched.ids if i in states]
        waiting = [state for state in known if state.phase is Phase.WAITING]
        told = [state.waits for state in waiting if state.waits is not None]
        if watched.claimed or not told or len(waiting) < len(known):
            return False
        why = told[-1]
        if why != watched.waits:
            watched.waits = why
            self._on_waiting(watched.record, why)
            return False  # an odd answer alone ends nothing
        return all(state.never for state in waiting)

    async def _give_up(self, watched: Watched) -> bool:
        """End a try that would wait for ever, unless it has started after all."""
        if not await self._certain(watched):
            return False
        with suppress(SiteNotFound, SiteRejected):
            await self._site.cancel(watched.ids)
        detail = f"it would wait for ever in the queue: {watched.waits}"
        state = JobState(Phase.ENDED, Reason.REJECTED, detail)
        self._watching.end(watched, TryEnd(TryEndKind.SCHEDULER, state=state))
        return True

    def _grace_s(self, watched: Watched) -> float:
        """How long the marker of a try may still come whose end the scheduler has told."""
        usual = watched.word[1].reason in _USUAL_ENDS
        limit = self._settings.marker_grace_s
        return limit if usual else min(limit, _ABNORMAL_GRACE_S)

    async def _certain(self, watched: Watched) -> bool:
        """Whether nothing can come of the try any more; one that has not started is revoked."""
        if watched.claimed:
            with suppress(SiteRejected):  # no room, say: then what is listed has to do
                await self._site.put(f"{watched.record.paths.tries}/{LOOK}", b"\n")
            return True
        watched.revoked = True
        if await claims.revoke_try(self._site, watched.record):
            return True
        self._watching.alive(watched)
        return False

    async def _explain(self, watched: Watched) -> bool:
        """End a try with the scheduler's word, and its own details where it has some."""
        if watched.future.done():
            return False
        job_id, state = watched.word
        with suppress(SiteNotFound, SiteRejected):
            explained = await self._site.explain(job_id)
            state = explained if explained.phase is Phase.ENDED else state
        self._watching.end(
            watched, TryEnd(TryEndKind.SCHEDULER, state=state, claimed=watched.claimed)
        )
        return True


def _is_silent(error: SiteError) -> bool:
    """Whether a site did not answer at all, or refuses us: then nothing follows from that."""
    if isinstance(error, SiteUnreachable):
        return error.status is None
    return isinstance(error, SiteBusy | SiteUnauthorized)


def _longest_delay(watched: Watched, number: int) -> float:
    """Seconds until a try is asked about again, at most; `number` tries are asked about now."""
    passed = watched.silent if watched.claimed else watched.waited
    return min(_LONGEST_CHECK_S, max(_CHECK_S, SPACING_S * number, passed / _WAITED_SHARE))
