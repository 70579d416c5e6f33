"""Watching the tries at one site: one listing per cycle, whatever their number.

The marker is the truth about a try's end; the scheduler is asked only about tries that are overdue:
without a claim for a while, or without a heartbeat. What is unknown, missing or unreachable never
ends a try.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine import claims
from snakemake_executor_plugin_mantik.engine.patience import TRANSIENT, Patience
from snakemake_executor_plugin_mantik.errors import (
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.paths import marker_name
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import Entry, JobState, Phase, Site

FIRST_CHECK_S = 5.0
"""Seconds after submission when an unclaimed try is first asked about."""
CHECK_GROWTH = 3.0
LONGEST_CHECK_S = 1800.0
MISSED_BEATS = 2.5
"""Heartbeats that must be missing before the scheduler is asked about a claimed try."""
LOST_S = 1800.0
"""Seconds without a heartbeat, and with the site denying the job, after which a try is lost.

Only seconds in which the site let us look count: after an outage everything seems silent.
"""
LONGEST_WAIT_S = 86400.0
"""A try without a trace is sent again after the wait that is set, each time after twice as long up
to this: behind a server that forgot it, it may be waiting in the scheduler's queue."""
EXTEND_AFTER_S = 60.0
EXTEND_BY_S = 30 * 86400.0
EXTEND_AGAIN_S = 7 * 86400.0
"""Jobs that last get a longer life at the site: its default may be a day, then it cancels them.

Those whose ids are not known yet are looked for each time."""
EXTEND_REFUSED_S = 3600.0
"""Seconds after which a site that refused that is asked again."""
MISTAKES = 5
"""Cycles in a row that may break on a mistake of ours before the jobs are told of it."""
_UNKNOWN = JobState(Phase.UNKNOWN)


class EndKind(Enum):
    """How a try's end became known."""

    MARKER = "marker"
    SCHEDULER = "scheduler"
    VANISHED = "vanished"
    REVOKED = "revoked"


@dataclass(frozen=True)
class End:
    """The end of a try.

    Attributes:
        kind: MARKER: the job wrote how it ended. SCHEDULER: it can write nothing any more, or never
            started and never will: the scheduler's word counts. VANISHED: no trace of it; the same
            try may be submitted again. REVOKED: it never started and never will, because an earlier
            run, or somebody else, gave it up.
        exit_code: from the marker's name.
        state: the scheduler's word.
        claimed: whether the job is known to have started.
        ids: the site's ids of it that are known by now.
    """

    kind: EndKind
    exit_code: int | None = None
    state: JobState | None = None
    claimed: bool = False
    ids: tuple[str, ...] = ()


@dataclass
class _Watched:
    """A try and what was seen of it.

    Times are the clock's; durations count only seconds in which the site could be looked at.

    Attributes:
        wait_s: how long to wait for a trace of it.
        waited: since it was submitted.
        silent: since it showed a sign of life.
        seen: when it was last looked for.
        owner: who holds the claim, once that was asked.
        revoked: whether we have revoked it.
        ended_since: since when the scheduler says that it ended.
        word: the scheduler's word that it ended.
    """

    record: TryRecord
    future: "asyncio.Future[End]"
    ids: list[str]
    runtime_s: float | None
    wait_s: float
    seen: float
    next_check: float
    next_extension: float
    waited: float = 0.0
    silent: float = 0.0
    claimed: bool = False
    claim_bytes: int = -1
    owner: claims.Owner | None = None
    revoked: bool = False
    check_delay: float = FIRST_CHECK_S
    ended_since: float | None = None
    word: tuple[str, JobState] = ("", _UNKNOWN)


class Watcher:
    """Watches all tries at one site. All methods belong to the event loop's thread."""

    def __init__(
        self,
        site: Site,
        settings: SiteSettings,
        patience: Patience,
        on_found: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a watcher; `run` must be running for anything to happen.

        Args:
            site: where the tries are.
            settings: its waits and limits.
            patience: hears whether the site answers.
            on_found: called with a try's id and a site's job id that was found for it.
            clock: seconds that only grow.
        """
        self._site = site
        self._settings = settings
        self._patience = patience
        self._on_found = on_found
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._changed = clock()
        self._wake = asyncio.Event()
        self._mistakes = 0
        self.cycles = 0

    def watch(
        self, record: TryRecord, ids: Iterable[str], runtime_s: float | None, *, sent: int = 1
    ) -> "asyncio.Future[End]":
        """Watch a try until its end.

        Args:
            record: the try.
            ids: the site's ids of it, empty where the submission's fate is unknown.
            runtime_s: its walltime, where known.
            sent: how often it was submitted.
        """
        now = self._clock()
        future: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        wait = min(self._settings.unknown_wait_s * 2.0 ** min(sent - 1, 30), LONGEST_WAIT_S)
        self._watched[record.id] = _Watched(
            record, future, list(ids), runtime_s, wait, seen=now,
            next_check=now + FIRST_CHECK_S, next_extension=now + EXTEND_AFTER_S,
        )  # fmt: skip
        self.hurry()
        return future

    def forget(self, try_id: str) -> None:
        """Watch a try no longer."""
        watched = self._watched.pop(try_id, None)
        if watched is not None:
            watched.future.cancel()

    def hurry(self) -> None:
        """Something happened: look soon."""
        self._changed = self._clock()
        self._wake.set()

    def interval(self) -> float:
        """Seconds until the next cycle.

        They grow with the time since anything changed, up to a twentieth of the shortest walltime
        (the end of a job of ten minutes is worth a look each half minute), within the limits.
        """
        low, high = float(self._settings.poll_min_s), float(self._settings.poll_max_s)
        walltimes = [w.runtime_s for w in self._watched.values() if w.runtime_s]
        if walltimes:
            high = min(high, max(low, min(walltimes) / 20))
        return min(max(low, (self._clock() - self._changed) / 10), high)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self._wake.clear()
            if not self._watched:
                await self._wake.wait()
                continue
            try:
                await self.cycle()
            except SiteError as error:
                # Whatever a site says to a look at its jobs: they stay active.
                self._patience.failed(error)
            except Exception as error:  # noqa: BLE001 - ours: handed to the jobs, which report it
                self._mistaken(error)
            else:
                self._mistakes = 0
                self._patience.answered()
            # A new try is worth an early look, but never more often than the shortest interval.
            await asyncio.sleep(self._settings.poll_min_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval() - self._settings.poll_min_s):
                    await self._wake.wait()

    def _mistaken(self, error: Exception) -> None:
        """A cycle broke on a mistake of ours: if that goes on, the jobs must not wait for ever."""
        self._mistakes += 1
        if self._mistakes < MISTAKES:
            return
        for watched in self._watched.values():
            if not watched.future.done():
                watched.future.set_exception(error)
        self._watched.clear()

    async def cycle(self) -> None:
        """One look: list the open buckets, then ask about what is overdue.

        Raises:
            SiteError: the site could not be asked about some of the tries; about those nothing has
                changed.
        """
        self.cycles += 1
        await self._list(w.record for w in list(self._watched.values()))
        await self._examine()
        await self._extend()

    async def _list(self, records: Iterable[TryRecord]) -> None:
        """List the buckets of `records`, each once."""
        failed: SiteError | None = None
        for bucket, directory in {r.bucket: r.paths.tries for r in records}.items():
            try:
                self._look(bucket, await self._site.list(directory))
            except SiteNotFound:
                self._look(bucket, {})
            except SiteError as error:
                failed = error
        if failed is not None:
            raise failed

    def _look(self, bucket: int, entries: dict[str, Entry]) -> None:
        ends = {}
        for entry in entries.values():
            if not entry.directory and (marker := marker_name(entry.name)) is not None:
                ends[marker[0]] = marker[1]
        now = self._clock()
        for watched in [w for w in self._watched.values() if w.record.bucket == bucket]:
            # What lies between two looks that are further apart was an outage.
            passed = min(now - watched.seen, 2.0 * self._settings.poll_max_s)
            watched.seen, watched.waited = now, watched.waited + passed
            watched.silent += passed
            claim = entries.get(watched.record.id)
            if watched.record.id in ends:
                self._end(watched, End(EndKind.MARKER, ends[watched.record.id], claimed=True))
            elif claim is None:
                continue
            elif claim.directory:
                if not watched.revoked:
                    self._end(watched, End(EndKind.REVOKED))
            elif claim.size != watched.claim_bytes:
                watched.claim_bytes = claim.size
                self._alive(watched)

    def _alive(self, watched: _Watched) -> None:
        """A sign of life."""
        now = self._clock()
        watched.silent, watched.ended_since = 0.0, None
        watched.next_check, watched.check_delay = now, FIRST_CHECK_S
        if not watched.claimed:
            watched.claimed, self._changed = True, now

    def _end(self, watched: _Watched, end: End) -> None:
        self._watched.pop(watched.record.id, None)
        self._changed = self._clock()
        if not watched.future.done():
            watched.future.set_result(replace(end, ids=tuple(watched.ids)))

    def _overdue(self, watched: _Watched, now: float) -> bool:
        if now < watched.next_check:
            return False
        return not watched.claimed or watched.silent > MISSED_BEATS * self._settings.heartbeat_s

    async def _examine(self) -> None:
        """Ask the scheduler about the tries that are overdue."""
        now = self._clock()
        overdue = [w for w in self._watched.values() if self._overdue(w, now)]
        if not overdue:
            return
        for watched in overdue:
            watched.next_check = now + watched.check_delay
        asked = await self._each(overdue, self._identify)
        states = await self._states([i for w in asked for i in w.ids])
        over = []
        for watched in asked:
            watched.check_delay = min(watched.check_delay * CHECK_GROWTH, LONGEST_CHECK_S)
            watched.next_check = now + watched.check_delay
            if self._judge(watched, {i: states.get(i, _UNKNOWN) for i in watched.ids}, now):
                over.append(watched)
        over = await self._each(over, self._certain)
        if over:
            # A marker may have come in the meantime: it wins, and so does a new sign of life.
            await self._list(w.record for w in over)
            await self._each([w for w in over if w.ended_since is not None], self._explain)

    async def _each(
        self, tries: list[_Watched], act: Callable[[_Watched], Awaitable[bool]]
    ) -> list[_Watched]:
        """Do `act` for all; those for which it said yes. One's trouble does not stop the others."""
        answers = await asyncio.gather(*map(act, tries), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, SiteError):
                self._patience.failed(answer)
            elif isinstance(answer, BaseException):
                raise answer
        return [w for w, yes in zip(tries, answers, strict=True) if yes is True]

    async def _identify(self, watched: _Watched) -> bool:
        """See to it that we know whom to ask about."""
        if not watched.ids:
            watched.ids = await self._site.find(watched.record.id)
            for site_job in watched.ids:
                self._on_found(watched.record.id, site_job)
        if watched.claimed and watched.owner is None:
            watched.owner = await claims.owner(self._site, watched.record)
        return True

    async def _states(self, ids: list[str]) -> dict[str, JobState]:
        if not ids:
            return {}
        try:
            return await self._site.states(ids)
        except TRANSIENT as error:
            if isinstance(error, SiteUnreachable) and error.status is not None:
                # It was reached, lists directories, and cannot speak of these jobs.
                return {}
            raise
        except SiteError:
            return {}

    def _judge(self, watched: _Watched, states: dict[str, JobState], now: float) -> bool:
        """Whether the scheduler's word is that the try ended, for some time already.

        What the site does not know proves nothing: wait, and longer if the job has started.
        """
        known = dict(states)
        if watched.claimed and watched.owner is not None:
            known = {i: s for i, s in states.items() if watched.owner.is_job(i, s)}
        phases = {state.phase for state in known.values()}
        if phases & {Phase.WAITING, Phase.RUNNING}:
            watched.ended_since = None
            return False
        patient = watched.silent < LOST_S if watched.claimed else watched.waited < watched.wait_s
        if Phase.ENDED in phases and (Phase.UNKNOWN not in phases or not patient):
            watched.word = [(i, s) for i, s in known.items() if s.phase is Phase.ENDED][-1]
            if watched.ended_since is None:
                watched.ended_since = now
            over = watched.ended_since + self._settings.marker_grace_s
            watched.next_check = min(watched.next_check, over)
            return now >= over
        watched.ended_since = None
        if patient:
            left = LOST_S - watched.silent if watched.claimed else watched.wait_s - watched.waited
            watched.next_check = min(watched.next_check, now + left)
        elif watched.claimed:
            state = JobState(Phase.ENDED, detail="no heartbeat, and the site knows no such job")
            self._end(watched, End(EndKind.SCHEDULER, state=state, claimed=True))
        else:
            self._end(watched, End(EndKind.VANISHED))
        return False

    async def _certain(self, watched: _Watched) -> bool:
        """Whether nothing can come of the try any more; one that has not started is revoked."""
        if watched.claimed:
            return True
        watched.revoked = True
        if await claims.revoke(self._site, watched.record):
            return True
        self._alive(watched)
        return False

    async def _explain(self, watched: _Watched) -> bool:
        """End a try with the scheduler's word, and its own details where it has some."""
        if watched.record.id not in self._watched:
            return False
        job_id, state = watched.word
        with suppress(SiteNotFound, SiteRejected):
            explained = await self._site.explain(job_id)
            state = explained if explained.phase is Phase.ENDED else state
        self._end(watched, End(EndKind.SCHEDULER, state=state, claimed=watched.claimed))
        return True

    async def _extend(self) -> None:
        """See to it that the site does not end jobs because its own time for them is over."""
        now = self._clock()
        due = [w for w in self._watched.values() if now >= w.next_extension]
        if not due:
            return
        for watched in due:
            watched.next_extension = now + EXTEND_AFTER_S
        known = [w for w in await self._each(due, self._identify) if w.ids]
        if not known:
            return
        wait = EXTEND_AGAIN_S
        try:
            await self._site.extend([i for w in known for i in w.ids], EXTEND_BY_S)
        except TRANSIENT:
            return
        except SiteError as error:
            wait = EXTEND_REFUSED_S
            self._patience.note(f"Jobs may end when the site's own time for them is over. {error}")
        for watched in known:
            watched.next_extension = now + wait
