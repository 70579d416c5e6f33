"""Watch the tries at one site with one listing per cycle, however many tries there are.

The marker decides how a try ended. The scheduler is asked only about tries that are overdue:
without a claim for a while, or without a heartbeat. What is unknown, missing or unreachable never
ends a try. Jobs that last get a longer lifetime at the site, where its default may be a day.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from snakemake_executor_plugin_mantik.common.errors import SiteError
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine import claims
from snakemake_executor_plugin_mantik.engine.attempt import (
    FIRST_CHECK_S,
    TryEnd,
    TryEndKind,
    Watched,
)
from snakemake_executor_plugin_mantik.engine.scheduler_poller import SchedulerPoller
from snakemake_executor_plugin_mantik.engine.site_retry import TRANSIENT, SiteRetry
from snakemake_executor_plugin_mantik.jobs.paths import LIVE, parse_marker_name
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import Entry, Site

_LONGEST_WAIT_S = 86400.0
"""A try without a trace is sent again after the wait that is set, each time after twice as long up
to this: behind a server that forgot it, it may be waiting in the scheduler's queue."""
INTERRUPTED_WAIT_S = 15.0
"""How long to wait for a trace of a try whose submission this process did not live to see: unlike a
request that is still being answered, that one has arrived by now or never will. If it comes late
after all, the claim lets the try run once."""
_MISTAKES = 5
"""Cycles in a row that may break on a mistake of ours before the jobs are told of it."""


class Watcher:
    """Watches all tries at one site. All methods belong to the event loop's thread."""

    def __init__(
        self,
        site: Site,
        settings: SiteSettings,
        retry: SiteRetry,
        on_found: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        on_seen: Callable[[str, Iterable[Entry]], None] = lambda _, __: None,
        on_started: Callable[[TryRecord], None] = lambda _: None,
        on_logged: Callable[[TryRecord, int], None] = lambda _, __: None,
        on_waiting: Callable[[TryRecord, str], None] = lambda _, __: None,
    ) -> None:
        """Make a watcher; `run` must be running for anything to happen.

        Args:
            site: where the tries are.
            settings: its waits and limits.
            retry: hears whether the site answers.
            on_found: called with a try's id and a site's job id that was found for it.
            clock: seconds that only grow.
            on_seen: called with each directory of claims that is looked at, and what is in it.
            on_started: called with a try that has been seen to run.
            on_waiting: called with a try that waits and the scheduler's word for why it cannot
                start, whenever that is another one; empty if it only waits its turn.
            on_logged: called at each look with a try that tells what it logs, and how much that is.
        """
        self._site = site
        self._on_logged = on_logged
        self._on_started = on_started
        self._on_waiting = on_waiting
        self._on_seen = on_seen
        self._settings = settings
        self._retry = retry
        self._clock = clock
        self._watched: dict[str, Watched] = {}
        self._in_bucket: defaultdict[int, dict[str, Watched]] = defaultdict(dict)
        self._changed = clock()
        self._wake = asyncio.Event()
        self._mistakes = 0
        self._poller = SchedulerPoller(
            site, settings, retry, self, on_found=on_found, on_waiting=on_waiting, clock=clock
        )
        self._extender = _Extender(site, retry, self._poller, clock)
        self.cycles = 0

    def watch(
        self,
        record: TryRecord,
        ids: Iterable[str],
        *,
        sent: int = 1,
        live: bool = False,
        interrupted: bool = False,
    ) -> "asyncio.Future[TryEnd]":
        """Watch a try until its end.

        Args:
            record: the try.
            ids: the site's ids of it, empty where the submission's fate is unknown.
            sent: how often it was submitted.
            live: whether it tells what it logs while it runs.
            interrupted: whether an earlier process submitted it, which may have died meanwhile.
        """
        now = self._clock()
        future: asyncio.Future[TryEnd] = asyncio.get_running_loop().create_future()
        wait = min(self._settings.unknown_wait_s * 2.0 ** min(sent - 1, 30), _LONGEST_WAIT_S)
        if interrupted:
            wait = min(wait, INTERRUPTED_WAIT_S)
        watched = Watched(
            record, future, list(ids), sent, wait, denied_since=now, seen=now,
            next_check=now + FIRST_CHECK_S, next_extension=now + _EXTEND_AFTER_S, live=live,
            waits=record.waits,
        )  # fmt: skip
        self._watched[record.id] = self._in_bucket[record.bucket][record.id] = watched
        self.hurry()
        return future

    def forget(self, try_id: str) -> bool:
        """Watch a try no longer; whether it has been seen to run."""
        watched = self._drop(try_id)
        if watched is None:
            return False
        watched.future.cancel()
        return watched.claimed

    def _drop(self, try_id: str) -> Watched | None:
        watched = self._watched.pop(try_id, None)
        if watched is not None:
            of_bucket = self._in_bucket[watched.record.bucket]
            of_bucket.pop(try_id, None)
            if not of_bucket:
                del self._in_bucket[watched.record.bucket]
        return watched

    def hurry(self) -> None:
        """Something happened: look soon."""
        self._changed = self._clock()
        self._wake.set()

    def interval(self) -> float:
        """Seconds until the next cycle: they grow with the time since anything changed."""
        quiet = self._clock() - self._changed
        return min(max(self._settings.poll_min_s, quiet / 10), self._settings.poll_max_s)

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
                self._retry.failed(error)
            except Exception as error:  # noqa: BLE001 - ours: handed to the jobs, which report it
                self._mistaken(error)
            else:
                self._mistakes = 0
                self._retry.answered()
            # A new try is worth an early look, but never more often than the shortest interval.
            await asyncio.sleep(self._settings.poll_min_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval() - self._settings.poll_min_s):
                    await self._wake.wait()

    def _mistaken(self, error: Exception) -> None:
        """A cycle broke on a mistake of ours: if that goes on, the jobs must not wait for ever."""
        self._mistakes += 1
        if self._mistakes >= _MISTAKES:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Watch nothing any more: whoever waits for a try gets the error instead of its end."""
        for watched in self._watched.values():
            if not watched.future.done():
                watched.future.set_exception(error)
        self._watched.clear()
        self._in_bucket.clear()

    async def cycle(self) -> None:
        """One look: list the open buckets, then ask about what is overdue.

        Raises:
            SiteError: the site could not be asked about some of the tries; about those nothing has
                changed.
        """
        self.cycles += 1
        await self.look(w.record for w in list(self._watched.values()))
        await self._poller.examine(list(self._watched.values()))
        await self._extender.extend(list(self._watched.values()))

    async def look(self, records: Iterable[TryRecord]) -> None:
        """List the buckets of `records`, each once."""
        failed: SiteError | None = None
        for bucket, directory in {r.bucket: r.paths.tries for r in records}.items():
            try:
                entries = await claims.list_claims(self._site, self._retry, directory)
                self._see(bucket, entries)
                self._on_seen(directory, entries.values())
            except SiteError as error:
                failed = error
        if failed is not None:
            raise failed

    def _see(self, bucket: int, entries: dict[str, Entry]) -> None:
        ends = {}
        for entry in entries.values():
            if not entry.directory and (marker := parse_marker_name(entry.name)) is not None:
                ends[marker[0]] = TryEnd(TryEndKind.MARKER, marker[1], entry.size, claimed=True)
        now = self._clock()
        for watched in list(self._in_bucket[bucket].values()):
            # What lies between two looks that are further apart was an outage.
            passed = min(now - watched.seen, 2.0 * self._settings.poll_max_s)
            watched.seen, watched.waited = now, watched.waited + passed
            watched.looked, watched.silent = True, watched.silent + passed
            claim = entries.get(watched.record.id)
            if (end := ends.get(watched.record.id)) is not None:
                self._waits_no_more(watched)
                self.end(watched, end)
            elif claim is None:
                continue
            elif claim.directory:
                if not watched.revoked:
                    self.end(watched, TryEnd(TryEndKind.REVOKED))
            else:
                if claim.size != watched.claim_bytes:
                    watched.claim_bytes = claim.size
                    self.alive(watched)
                if watched.live and (live := entries.get(f"{watched.record.id}{LIVE}")):
                    self._on_logged(watched.record, live.size)

    def alive(self, watched: Watched) -> None:
        """A sign of life."""
        now = self._clock()
        watched.silent, watched.ended_since = 0.0, None
        watched.next_check, watched.check_delay = now, FIRST_CHECK_S
        if not watched.claimed:
            watched.claimed, self._changed = True, now
            self._waits_no_more(watched)
            self._on_started(watched.record)

    def _waits_no_more(self, watched: Watched) -> None:
        """A try has started: what kept it from that is over."""
        if watched.waits:
            watched.waits = ""
            self._on_waiting(watched.record, "")

    def end(self, watched: Watched, end: TryEnd) -> None:
        """A try has ended: whoever waits for it hears of it."""
        if self._watched.get(watched.record.id) is watched:  # not watched anew since a failure
            self._drop(watched.record.id)
        self._changed = self._clock()
        if not watched.future.done():
            watched.future.set_result(replace(end, ids=tuple(watched.ids)))


_EXTEND_AFTER_S = 60.0
_EXTEND_BY_S = 30 * 86400.0
_EXTEND_AGAIN_S = 7 * 86400.0
"""Jobs that last get a longer life at the site: its default may be a day, then it cancels them.

Those whose ids are not known yet are looked for each time."""
_EXTEND_AT_ONCE = 500
"""Tries that one cycle extends at most: the next look at all of them waits for it."""
_EXTEND_REFUSED_S = 3600.0
"""Seconds after which a site that refused that, or did not tell all ids, is asked again."""


class _Extender:
    """Sees to it that the site does not end jobs because its own time for them is over."""

    def __init__(
        self, site: Site, retry: SiteRetry, poller: SchedulerPoller, clock: Callable[[], float]
    ) -> None:
        """Make an extender; `poller` finds the ids that are not known yet."""
        self._site = site
        self._retry = retry
        self._poller = poller
        self._clock = clock

    async def extend(self, tries: Iterable[Watched]) -> None:
        """Extend the life of those of `tries` for which it is time."""
        now = self._clock()
        due = [w for w in tries if now >= w.next_extension][:_EXTEND_AT_ONCE]
        if not due:
            return
        for watched in due:
            watched.next_extension = now + _EXTEND_AFTER_S
        unsure = [w for w in due if len(w.ids) < w.sent]
        sure = [w for w in due if len(w.ids) >= w.sent]
        known = [w for w in [*sure, *await self._poller.identify(unsure)] if w.ids]
        if not known:
            return
        wait = _EXTEND_AGAIN_S
        try:
            await self._site.extend([i for w in known for i in w.ids], _EXTEND_BY_S)
        except TRANSIENT:
            return
        except SiteError as error:
            wait = _EXTEND_REFUSED_S
            self._retry.note(f"Jobs may end when the site's own time for them is over. {error}")
        for watched in known:
            all_known = len(watched.ids) >= watched.sent
            watched.next_extension = now + (wait if all_known else _EXTEND_REFUSED_S)
