"""Watch the tries at one site with one listing per cycle, however many tries there are.

The marker decides how a try ended. The scheduler is queried only about overdue tries: those that
have had no claim for a while, or miss a heartbeat. An unknown, missing or unreachable state alone
never ends a try. Long jobs get a longer lifetime at the site, whose default may be a day.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress

from snakemake_executor_plugin_mantik.common.errors import SiteError
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.jobs.paths import LIVE
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import Entry, JobState, Site

from .evidence import Evidence, Finding, find_markers, judge, list_claims
from .scheduler_poller import FIRST_CHECK_S, SchedulerPoller, Watched
from .site_retry import TRANSIENT, SiteRetry

_LONGEST_WAIT_S = 86400.0
"""Longest wait before a try without a trace is submitted again. The wait starts at the configured
one and doubles each time: the server may have forgotten a try that is in the scheduler's queue."""
INTERRUPTED_WAIT_S = 15.0
"""How long to wait for a trace of a try that an earlier process submitted: unlike a request that is
still being answered, that one has arrived by now or never will. If it arrives late after all, the
claim lets the try run once."""
_MISTAKES = 5
"""Consecutive cycles that may fail on a bug of ours before the jobs get the error."""


class Watcher:
    """Watch all tries at one site. Call all methods from the event loop's thread."""

    def __init__(
        self,
        site: Site,
        settings: SiteSettings,
        retry: SiteRetry,
        on_found: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        on_seen: Callable[[str, Iterable[Entry]], None] = lambda _, __: None,
        on_started: Callable[[TryRecord, bool], None] = lambda _, __: None,
        on_logged: Callable[[TryRecord, int], None] = lambda _, __: None,
        on_waiting: Callable[[TryRecord, str], None] = lambda _, __: None,
        on_pending: Callable[[TryRecord, str, JobState], None] = lambda _, __, ___: None,
    ) -> None:
        """Make a watcher, which looks at the site as long as tries are watched.

        Args:
            site: where the tries are.
            settings: the site's waits and limits.
            retry: records whether the site answers.
            on_found: called with a try's id and a job id of the site that was found for it.
            clock: seconds, monotonic.
            on_seen: called with each listed directory of claims and its entries.
            on_started: called with a try when it is first seen to run, and whether it began since
                it was watched or submitted.
            on_waiting: called with a waiting try and the scheduler's reason why it cannot start,
                whenever that changes; empty if the try only waits its turn, or has started.
            on_pending: called with a waiting try, the scheduler's reason why it has not started,
                its turn among the reasons, and its state, whenever the reason or the start that
                the scheduler expects changes.
            on_logged: called at each look with each try that logs live, and the bytes logged.
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
        self._last: dict[int, tuple[float, dict[str, tuple[int, Entry]]]] = {}
        self._changed = clock()
        self._wake = asyncio.Event()
        self._mistakes = 0
        self._running: asyncio.Task[None] | None = None
        self._poller = SchedulerPoller(
            site, settings, retry, self, on_found=on_found, on_waiting=on_waiting,
            on_pending=on_pending, clock=clock,
        )  # fmt: skip
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
    ) -> "asyncio.Future[Evidence]":
        """Watch a try; return a future of what is known of it when it is over.

        Args:
            record: the try.
            ids: the site's ids of it; empty if the submission's fate is unknown.
            sent: how often it was submitted.
            live: whether it reports what it logs while it runs.
            interrupted: whether an earlier process submitted it and may have died meanwhile.
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

    def stop(self, record: TryRecord, ids: Iterable[str], *, revoked: bool) -> Watched:
        """Watch a try that has started, and that the site was asked to end now.

        `revoked` says whether its claim was replaced, since it had been purged.
        """
        watched = self._new(record, ids, 1)
        grace_s = self._settings.term_grace_s + self._settings.timing.marker_grace_s
        watched.claimed, watched.told, watched.revoked = True, True, revoked
        watched.may_end, watched.next_extension = watched.seen + grace_s, math.inf
        self._add(watched)
        return watched

    def _new(self, record: TryRecord, ids: Iterable[str], sent: int) -> Watched:
        now = self._clock()
        return Watched(
            record=record, future=asyncio.get_running_loop().create_future(), ids=list(ids),
            sent=sent, denied_since=now, seen=now, next_check=now + FIRST_CHECK_S,
            next_extension=now + _EXTEND_AFTER_S, waits=record.waits, pending=record.pending,
        )  # fmt: skip

    def _add(self, watched: Watched) -> None:
        record = watched.record
        self._watched[record.id] = self._in_bucket[record.bucket][record.id] = watched
        self.hurry()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    def count(self) -> tuple[int, int]:
        """Return how many watched tries run, and how many wait. Any thread may call this method."""
        watched = list(self._watched.values())
        running = sum(each.claimed for each in watched)
        return running, len(watched) - running

    def forget(self, try_id: str) -> bool:
        """Stop watching a try; return whether it has been seen to run."""
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
        """Look again soon."""
        self._changed = self._clock()
        self._wake.set()

    def interval(self) -> float:
        """Return the seconds until the next cycle, which grow with the time since a change."""
        quiet = self._clock() - self._changed
        return min(max(self._settings.timing.poll_min_s, quiet / 10), self._settings.poll_s)

    def close(self) -> None:
        """Stop looking; the tries that are still watched do not end."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        while self._watched:
            self._wake.clear()
            try:
                await self.cycle()
            except SiteError as error:
                # No error of a site while listing its jobs ends them.
                self._retry.failed(error)
            except Exception as error:  # noqa: BLE001 - a bug of ours: the jobs report it
                self._mistaken(error)
            else:
                self._mistakes = 0
                self._retry.answered()
            # A new try is worth an early look, but never more often than the shortest interval.
            await asyncio.sleep(self._settings.timing.poll_min_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval() - self._settings.timing.poll_min_s):
                    await self._wake.wait()

    def _mistaken(self, error: Exception) -> None:
        # If a bug of ours breaks each cycle, the jobs must not wait for ever.
        self._mistakes += 1
        if self._mistakes >= _MISTAKES:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Stop watching all tries; raise `error` where their ends are awaited."""
        for watched in self._watched.values():
            if not watched.future.done():
                watched.future.set_exception(error)
        self._watched.clear()
        self._in_bucket.clear()

    async def cycle(self) -> None:
        """List the open buckets once, query the scheduler about overdue tries, extend lifetimes.

        Raises:
            SiteError: the site did not answer for some tries; these are still watched.
        """
        self.cycles += 1
        await self.look(w.record for w in list(self._watched.values()))
        await self._poller.examine(list(self._watched.values()))
        await self._extender.extend(list(self._watched.values()))

    async def look(self, records: Iterable[TryRecord]) -> None:
        """List the buckets of `records`, each once.

        Raises:
            SiteError: a bucket could not be listed; the others have been.
        """
        failed: SiteError | None = None
        for bucket, directory in {r.bucket: r.paths.tries for r in records}.items():
            try:
                entries = await list_claims(self._site, self._retry, directory)
                self._see(bucket, entries)
                self._on_seen(directory, entries.values())
            except SiteError as error:
                failed = error
        if failed is not None:
            raise failed

    def _see(self, bucket: int, entries: dict[str, Entry]) -> None:
        now, markers = self._clock(), find_markers(entries)
        self._last[bucket] = now, markers
        for watched in list(self._in_bucket[bucket].values()):
            try_id = watched.record.id
            alive = watched.see(try_id, entries, now, 2.0 * self._settings.poll_s)
            if try_id in markers:
                watched.mark(*markers[try_id])
                self._waits_no_more(watched)
            found = judge(watched, now, self._settings)
            if found in (Finding.MARKER, Finding.REVOKED):
                self.end(watched, found)
                continue
            watched.began |= try_id not in entries
            if alive:
                self.alive(watched)
            if watched.live and (live := entries.get(f"{try_id}{LIVE}")):
                self._on_logged(watched.record, live.size)

    def alive(self, watched: Watched) -> None:
        now = self._clock()
        watched.next_check, watched.check_delay = now, FIRST_CHECK_S
        if not watched.told:
            watched.told, self._changed = True, now
            self._waits_no_more(watched)
            self._on_started(watched.record, watched.began)

    def _waits_no_more(self, watched: Watched) -> None:
        if watched.waits:
            watched.waits = ""
            self._on_waiting(watched.record, "")

    def end(self, watched: Watched, found: Finding, state: JobState | None = None) -> None:
        if self._watched.get(watched.record.id) is watched:  # not watched anew since a failure
            self._drop(watched.record.id)
        self._changed = self._clock()
        watched.found, watched.state = found, state
        if not watched.future.done():
            watched.future.set_result(watched)


_EXTEND_AFTER_S = 60.0
EXTEND_BY_S = 30 * 86400.0
_EXTEND_AGAIN_S = 7 * 86400.0
"""Seconds before the first extension of a job's lifetime at the site, length of the new lifetime,
and seconds between extensions. The site's default may be a day, after which it cancels the job.
Each extension looks up ids that are still unknown."""
_EXTEND_AT_ONCE = 500
"""Most tries that one cycle extends: the next listing of all tries waits for this."""
_EXTEND_REFUSED_S = 3600.0
"""Seconds before the next request if the site refused one, or while ids are still unknown."""


class _Extender:
    """Keep the site from ending jobs whose lifetime there is over."""

    def __init__(
        self, site: Site, retry: SiteRetry, poller: SchedulerPoller, clock: Callable[[], float]
    ) -> None:
        self._site = site
        self._retry = retry
        self._poller = poller
        self._clock = clock

    async def extend(self, tries: Iterable[Watched]) -> None:
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
            await self._site.extend([i for w in known for i in w.ids], EXTEND_BY_S)
        except TRANSIENT:
            return
        except SiteError as error:
            wait = _EXTEND_REFUSED_S
            self._retry.note(f"it may end jobs whose lifetime there is over. {error}")
        for watched in known:
            all_known = len(watched.ids) >= watched.sent
            watched.next_extension = now + (wait if all_known else _EXTEND_REFUSED_S)
