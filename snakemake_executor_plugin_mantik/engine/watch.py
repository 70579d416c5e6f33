"""Watching the tries at one site: one listing per cycle, whatever their number.

The marker is the truth about a try's end; the scheduler is asked only about tries that are overdue:
without a claim for a while, or without a heartbeat. What is unknown, missing or unreachable never
ends a try.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine.patience import Patience
from snakemake_executor_plugin_mantik.errors import SiteError, SiteNotFound, SiteRejected
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
"""Seconds without a heartbeat, and with the site denying the job, after which a try is lost."""
EXTEND_AFTER_S = 60.0
EXTEND_BY_S = 30 * 86400.0
EXTEND_AGAIN_S = 7 * 86400.0
"""Jobs that last get a longer life at the site: its default may be a day, then it cancels them."""


class EndKind(Enum):
    """How a try's end became known."""

    MARKER = "marker"
    SCHEDULER = "scheduler"
    VANISHED = "vanished"


@dataclass(frozen=True)
class End:
    """The end of a try.

    Attributes:
        kind: MARKER: the job wrote how it ended. SCHEDULER: it can write nothing any more, or never
            started and never will: the scheduler's word counts. VANISHED: no trace of it; the same
            try may be submitted again.
        exit_code: from the marker's name.
        marker_bytes: size of the marker.
        state: the scheduler's word.
        claimed: whether the job is known to have started.
    """

    kind: EndKind
    exit_code: int | None = None
    marker_bytes: int = 0
    state: JobState | None = None
    claimed: bool = False


@dataclass
class _Watched:
    record: TryRecord
    future: "asyncio.Future[End]"
    ids: list[str]
    runtime_s: float | None
    since: float
    claimed: bool = False
    claim_bytes: int = -1
    beat_at: float = 0.0
    next_check: float = 0.0
    check_delay: float = FIRST_CHECK_S
    ended_since: float | None = None
    next_extension: float = field(default=math.inf)


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
        self.cycles = 0

    def watch(
        self, record: TryRecord, ids: list[str], runtime_s: float | None
    ) -> "asyncio.Future[End]":
        """Watch a try until its end.

        Args:
            record: the try.
            ids: the site's ids of it, empty where the submission's fate is unknown.
            runtime_s: its walltime, where known.
        """
        now = self._clock()
        future: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._watched[record.id] = _Watched(
            record, future, list(ids), runtime_s, since=now, beat_at=now,
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
            else:
                self._patience.answered()
            # A new try is worth an early look, but never more often than the shortest interval.
            await asyncio.sleep(self._settings.poll_min_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval() - self._settings.poll_min_s):
                    await self._wake.wait()

    async def cycle(self) -> None:
        """One look: list the open buckets, then ask about what is overdue.

        Raises:
            SiteError: the site could not be asked; nothing has changed.
        """
        self.cycles += 1
        buckets = {w.record.bucket: w.record.paths.tries for w in self._watched.values()}
        for bucket, directory in buckets.items():
            try:
                entries = await self._site.list(directory)
            except SiteNotFound:
                entries = {}
            self._look(bucket, entries)
        await self._examine()
        await self._extend()

    def _look(self, bucket: int, entries: dict[str, Entry]) -> None:
        ends = {}
        for entry in entries.values():
            if (marker := marker_name(entry.name)) is not None:
                ends[marker[0]] = (marker[1], entry.size)
        now = self._clock()
        for watched in [w for w in self._watched.values() if w.record.bucket == bucket]:
            claim = entries.get(watched.record.id)
            if claim is not None and not claim.directory:
                if claim.size != watched.claim_bytes:
                    watched.claim_bytes, watched.beat_at = claim.size, now
                if not watched.claimed:
                    watched.claimed, self._changed = True, now
                    watched.ended_since = None
            if watched.record.id in ends:
                code, size = ends[watched.record.id]
                self._end(watched, End(EndKind.MARKER, code, size, claimed=True))

    def _end(self, watched: _Watched, end: End) -> None:
        self._watched.pop(watched.record.id, None)
        self._changed = self._clock()
        if not watched.future.done():
            watched.future.set_result(end)

    def _overdue(self, watched: _Watched, now: float) -> bool:
        if now < watched.next_check:
            return False
        silent = now - watched.beat_at
        return not watched.claimed or silent > MISSED_BEATS * self._settings.heartbeat_s

    async def _examine(self) -> None:
        now = self._clock()
        overdue = [w for w in self._watched.values() if self._overdue(w, now)]
        if not overdue:
            return
        for watched in overdue:
            if not watched.ids:
                watched.ids = await self._site.find(watched.record.id)
                for site_job in watched.ids:
                    self._on_found(watched.record.id, site_job)
            elif watched.claimed and len(watched.ids) > 1:
                watched.ids = [await self._owner(watched)]
        states = await self._site.states(list({i for w in overdue for i in w.ids}))
        for watched in overdue:
            watched.check_delay = min(watched.check_delay * CHECK_GROWTH, LONGEST_CHECK_S)
            watched.next_check = now + watched.check_delay
            phases = {states[i].phase for i in watched.ids}
            if phases == {Phase.ENDED}:
                await self._ended_without_marker(watched, now)
            elif phases <= {Phase.UNKNOWN}:
                self._unknown(watched, now)
            else:
                watched.ended_since = None

    async def _ended_without_marker(self, watched: _Watched, now: float) -> None:
        """The scheduler says that it ended: give slow file systems time, then believe it."""
        if watched.ended_since is None:
            watched.ended_since = now
        grace = self._settings.marker_grace_s
        if now - watched.ended_since < grace:
            watched.next_check = watched.ended_since + grace
            return
        if not watched.claimed and not await self._revoke(watched):
            return
        # A marker may have come in the meantime: it wins.
        entries = await self._site.list(watched.record.paths.tries)
        self._look(watched.record.bucket, entries)
        if watched.record.id in self._watched:
            state = await self._site.explain(watched.ids[-1])
            self._end(watched, End(EndKind.SCHEDULER, state=state, claimed=watched.claimed))

    async def _revoke(self, watched: _Watched) -> bool:
        """Whether the try is certain never to run from now on."""
        try:
            await self._site.make_directory(watched.record.paths.claim)
        except SiteRejected:
            watched.claimed, watched.ended_since = True, None
            watched.beat_at = self._clock()
            return False
        return True

    def _unknown(self, watched: _Watched, now: float) -> None:
        """The site knows no such job. That proves nothing: wait, and longer if it has started."""
        watched.ended_since = None
        wait = LOST_S if watched.claimed else self._settings.unknown_wait_s
        silent = now - (watched.beat_at if watched.claimed else watched.since)
        if silent < wait:
            watched.next_check = min(watched.next_check, now + wait - silent)
        elif watched.claimed:
            state = JobState(Phase.ENDED, detail="no heartbeat, and the site knows no such job")
            self._end(watched, End(EndKind.SCHEDULER, state=state, claimed=True))
        else:
            self._end(watched, End(EndKind.VANISHED))

    async def _owner(self, watched: _Watched) -> str:
        """The site's id of the job that holds the claim."""
        content = b"".join([part async for part in self._site.get(watched.record.paths.claim)])
        told = dict(
            line.split("=", 1)
            for line in content.decode(errors="replace").split("\n")
            if "=" in line
        )
        names = (told.get("site_job", ""), told.get("scheduler_job", ""))
        return next((i for i in watched.ids if i in names), watched.ids[-1])

    async def _extend(self) -> None:
        now = self._clock()
        due = [w for w in self._watched.values() if w.ids and now >= w.next_extension]
        for watched in due:
            watched.next_extension = now + EXTEND_AGAIN_S
        if due:
            await self._site.extend([i for w in due for i in w.ids], EXTEND_BY_S)
