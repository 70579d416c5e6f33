"""Ending: what is not wanted is stopped for certain, what is done leaves nothing at the site."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import (
    JournalError,
    SiteError,
    SiteNotFound,
    SiteRejected,
)
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine import claims
from snakemake_executor_plugin_mantik.engine.fetch import Fetcher, log_path
from snakemake_executor_plugin_mantik.engine.observer import JobEnd, Observer
from snakemake_executor_plugin_mantik.engine.salvage import SALVAGE_WAIT_S, salvage_files
from snakemake_executor_plugin_mantik.engine.scheduler_poller import LOST_S
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.watch import Watcher
from snakemake_executor_plugin_mantik.jobs.paths import parse_marker_name
from snakemake_executor_plugin_mantik.journal import Journal, TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import Phase, Site

CANCEL_WAIT_S = 180.0
"""Seconds that cancelled jobs have to be confirmed as ended; after that the user is told. One that
leaves no marker takes longest: it must have missed some heartbeats before a site is believed that
it has ended. A UNICORE server that runs jobs itself says so of each that it is asked to abort, and
lets it run."""
_CANCELLED_IN_WAIT = 500
"""Jobs that a site can be told to end in that time, at least: two requests for each."""
ENDED_AT_ONCE = 16
"""Jobs that a site is told to end at the same time: with all of them at once, none of them would be
over before nearly all are."""
_CANCEL_AGAIN_S = 5.0
"""Seconds after the grace of a cancelled job (TermGrace) when it is told again to end."""
_MISSED_BEATS = 2.5
_SILENT_S = 90.0
"""A site is believed that it has ended a job after so many missed heartbeats, and so many seconds
of silence: file systems show a file's size up to a minute late."""
_CONFIRM_EVERY_S = 1.0
_CONFIRM_LONGEST_S = 15.0
"""Seconds between two looks at a job that was told to end, at first and in the end."""
_SETTLE_WAIT_S = 20.0
"""Seconds that a site has at the end of a run to forget the jobs that are over."""


@dataclass
class _Signs:
    """The signs of life of a job that was asked to end.

    Attributes:
        looked: when they were last looked for.
        silent: for how many seconds there was none, of those in which the site let us look.
        bytes: how large its claim was then; None if there was none.
        denied: whether the site says that it has ended.
        after_all: whether there was one after the site had said so.
        nameless: since when its claim, which is there, tells nobody's name.
    """

    looked: float
    silent: float = 0.0
    bytes: int | None = None
    denied: bool = False
    after_all: bool = False
    nameless: float | None = None

    def see(self, now: float, size: int | None) -> None:
        """Note how large the claim is now. That it is there no more is no silence of the job's."""
        self.silent += min(now - self.looked, 2 * _CONFIRM_LONGEST_S)
        self.looked = now
        if size != self.bytes:
            self.after_all = self.denied and size is not None and self.bytes is not None
            self.bytes, self.silent = size, 0.0


class Canceller:
    """Ends tries at one site."""

    def __init__(
        self,
        site: Site,
        journal: Journal,
        watcher: Watcher,
        fetcher: Fetcher,
        leftovers: set[str],
        *,
        settings: SiteSettings,
        retry: SiteRetry,
        notify: Callable[[str], None],
        observer: Observer | None = None,
        workdir: Path,
        logs: Path,
    ) -> None:
        self._site = site
        self._fetcher = fetcher
        self._logs = logs
        self._workdir = workdir
        self._observer = observer or Observer()
        # A site says that a job has ended as soon as it has passed on the wish, but the job has
        # this long to end, and writes its marker then.
        self._grace_s = settings.term_grace_s + settings.marker_grace_s
        self._marker_grace_s = settings.marker_grace_s
        # One that goes on after its grace has not heard of it.
        self._again_s = settings.term_grace_s + _CANCEL_AGAIN_S
        self._silent_s = max(_MISSED_BEATS * settings.heartbeat_s, _SILENT_S)
        self._journal = journal
        self._watcher = watcher
        self._notify = notify
        self._retry = retry
        self._looks = claims.ClaimLooks(site, retry)
        self._lanes = asyncio.Semaphore(ENDED_AT_ONCE)
        self._tidying: set[asyncio.Task[None]] = set()
        self._leftovers = leftovers

    async def done(
        self, try_id: str, ids: Sequence[str], *, let_end: bool = False, succeeded: bool = False
    ) -> None:
        """A try is committed: the site may forget it, some time.

        Args:
            try_id: the try.
            ids: the site's ids of it.
            let_end: whether the site still has a command to run after the job's own end: forgetting
                a job ends it.
            succeeded: whether its job ended well.
        """
        self._journal.done(try_id)
        if ids:
            # Of several jobs one has run, and the others have ended without a word.
            alone = succeeded and len(ids) == 1
            task = asyncio.create_task(self._forget(ids, let_end, succeeded=alone))
            self._tidying.add(task)
            task.add_done_callback(self._tidying.discard)
        self._drop_leftover(try_id)

    async def end_observed(
        self, record: TryRecord, words: str, deadline: float | None = None
    ) -> None:
        """A try that was stopped has ended: an observer gets what it left."""
        log = log_path(self._logs, record)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await asyncio.gather(self.rescue(record.id), self._rescue_log(record, log))
        self._observer.ended(record, JobEnd("killed", words, log=log if log.exists() else None))

    async def remove_secrets(self, record: TryRecord) -> None:
        """Remove the secrets of a try that is over and did not do so itself.

        What the site does not remove now is removed at the end of a run (`tidy`).
        """
        if self._journal.has_secrets(record.id):
            with suppress(SiteError, JournalError):
                await self._site.remove(record.paths.secrets)
                self._journal.secrets_gone(record.id)

    async def _rescue_log(self, record: TryRecord, target: Path) -> None:
        if record.state is TryState.PLANNED or self._observer.leftover(record.id) is None:
            return
        with suppress(TimeoutError, SiteError, OSError):
            async with asyncio.timeout(SALVAGE_WAIT_S):
                await self._fetcher.log(record, None, target)

    async def rescue(self, try_id: str) -> None:
        """Fetch what a try left to an observer and could not hand over itself."""
        if leftover := self._observer.leftover(try_id):
            await salvage_files(self._site, leftover, self._workdir)

    def _drop_leftover(self, try_id: str) -> None:
        """What an observer has at the site goes at the end of the run: with one request mostly."""
        if leftover := self._observer.leftover(try_id):
            self._leftovers.add(leftover)

    async def _forget(self, ids: Sequence[str], let_end: bool, *, succeeded: bool) -> None:
        # Records that stay behind do no harm: the site lets them expire.
        with suppress(SiteError):
            while let_end:
                states = await self._site.states(ids)
                let_end = any(s.phase in (Phase.WAITING, Phase.RUNNING) for s in states.values())
                await asyncio.sleep(_CONFIRM_EVERY_S if let_end else 0)
            await self._site.forget(ids, succeeded=succeeded)

    async def give_up(self, records: Iterable[TryRecord]) -> None:
        """See to it that these tries are over and will never run; nothing of them is wanted.

        Waits for that as long as it takes.

        Raises:
            SiteRejected: the site does not let us make that certain.
        """
        for record in records:
            # Of what was only planned, or has ended, nothing can come any more.
            if record.state not in (TryState.PLANNED, TryState.ENDED):
                await self._stop(record)
            await self.remove_secrets(record)
            outcome = "" if record.left_behind else record.outcome
            await self.end_observed(record, outcome or "given up")
            self._journal.abandoned(record.id, outcome or "cancelled")
            await self.done(record.id, record.site_jobs)

    async def cancel(
        self, records: Sequence[TryRecord], wait_s: float = CANCEL_WAIT_S
    ) -> list[TryRecord]:
        """Cancel tries at the end of a run; those that did not confirm it within `wait_s` seconds.

        Of many, the time is as much longer as it takes to tell the site. What was never sent is
        over at once; the others are ended one after the other, some at a time, so that whenever
        the time is over as many as possible are known to have ended. What has succeeded already
        stays as it is: the next run takes it up.
        """

        async def one(record: TryRecord, deadline: float) -> TryRecord | None:
            try:
                async with asyncio.timeout_at(deadline):
                    end = None
                    if record.state is not TryState.PLANNED and record.id not in succeeded:
                        end = await self._stop(record)
                    if end is None or end != 0:
                        await self.remove_secrets(record)
            except (TimeoutError, SiteError):
                return record
            if end != 0 and record.id not in succeeded:
                await self.end_observed(record, "cancelled", deadline)
                try:
                    self._journal.abandoned(record.id, "cancelled")
                except JournalError as error:  # the others are to be cancelled all the same
                    self._notify(f"{record.name}: it is cancelled. {error}")
                self._drop_leftover(record.id)
            return None

        succeeded: set[str] = set()
        sent = [record for record in records if record.state is not TryState.PLANNED]
        unsent = [record for record in records if record.state is TryState.PLANNED]
        now = asyncio.get_running_loop().time()
        deadline = now + wait_s * (1 + len(sent) / _CANCELLED_IN_WAIT)
        results = await asyncio.gather(*(one(record, deadline) for record in unsent))
        with suppress(TimeoutError, SiteError):
            async with asyncio.timeout_at(deadline):
                succeeded = await self._succeeded(sent)
        results += await asyncio.gather(*(one(record, deadline) for record in sent))
        return [record for record in results if record is not None]

    async def _succeeded(self, records: Sequence[TryRecord]) -> set[str]:
        """Those of the tries whose markers say that they succeeded."""
        found = set()
        for directory in {record.paths.tries for record in records}:
            with suppress(SiteNotFound):
                for name in await self._site.list(directory):
                    if (marker := parse_marker_name(name)) is not None and marker[1] == 0:
                        found.add(marker[0])
        return found

    async def _stop(self, record: TryRecord) -> int | None:
        """Revoke a try, or cancel it and wait until it is over; its exit code, if it tells one.

        Raises:
            SiteRejected: the site does not let us make certain that it never runs.
        """
        runs = self._watcher.forget(record.id)
        clock = asyncio.get_running_loop().time
        async with self._lanes:
            # A claim that was seen and is no longer there was purged: its job goes on.
            stays = await self._retry.found(lambda: claims.revoke_try(self._site, record))
            revoked = stays and not runs
            begun = told = asked = clock()
            signs = _Signs(begun)
            ids = list(record.site_jobs) or await self._find(record)
            await self._ask_to_end(ids)
        while not revoked:
            over, code = await self._is_over(record, ids, begun, signs)
            if over:
                return code
            passed = clock() - begun
            await asyncio.sleep(min(max(_CONFIRM_EVERY_S, passed / 20), _CONFIRM_LONGEST_S))
            if clock() - told > CANCEL_WAIT_S:
                told = clock()
                self._notify(
                    f"{record.name}: the job {', '.join(ids) or record.id} at {record.site} was"
                    f" told to end {humanize_duration(told - begun)} ago but has not confirmed it"
                    " yet; waiting for it."
                )
            if signs.after_all:
                self._notify(
                    f"{record.name}: {record.site} says that the job {', '.join(ids)} has ended,"
                    " but it goes on; it is told to end again."
                )
            if signs.after_all or clock() - asked > self._again_s:
                signs.denied = signs.after_all = False
                asked = clock()
                # It may be one that we do not know of that runs.
                ids = list(dict.fromkeys([*ids, *await self._find(record)]))
                await self._ask_to_end(ids)
        return None

    async def _find(self, record: TryRecord) -> list[str]:
        """The ids that the site knows of a try."""
        with suppress(SiteNotFound):
            names = {record.id: record.name}
            found = await self._retry.found(lambda: self._site.find(names), at_once=True)
            return found.get(record.id, [])
        return []

    async def _ask_to_end(self, ids: Sequence[str]) -> None:
        if ids:
            # One that the site does not let us end is waited for all the same.
            with suppress(SiteRejected, SiteNotFound):
                await self._retry(lambda: self._site.cancel(ids))

    async def _is_over(
        self, record: TryRecord, ids: Sequence[str], begun: float, signs: _Signs
    ) -> tuple[bool, int | None]:
        """Whether a try that has started has ended, and the exit code that its marker tells.

        Without a marker the scheduler's word on the job that holds the claim counts. `begun` is
        when it was asked to end. A site that knows nothing of it is believed as late as the watcher
        would: not while its heartbeats tell that it goes on.
        """
        try:
            seen = await self._looks.look(record.paths.tries)
            if record.id in seen.codes:
                return True, seen.codes[record.id]
            now, entries = seen.at, seen.entries
            signs.see(now, entries[record.id].size if record.id in entries else None)
            if now - begun <= self._grace_s:
                return False, None
            states = await self._site.states(ids) if ids else {}
            holder = await claims.read_owner(self._site, record)
        except SiteError:
            return False, None
        phases = {s.phase for i, s in states.items() if holder is None or holder.is_job(i, s)}
        if phases <= {Phase.UNKNOWN}:
            return signs.silent > LOST_S, None
        signs.denied = phases == {Phase.ENDED}
        signs.nameless = (
            (signs.nameless or now) if holder is None and record.id in entries else None
        )
        # It was read in half, perhaps: whose end the site tells may be known at the next look.
        if signs.nameless is not None and now - signs.nameless <= self._marker_grace_s:
            return False, None
        return signs.denied and signs.silent > self._silent_s, None

    async def settle(self) -> None:
        """At the end of a run: see to it that the site has forgotten what it may forget."""
        with suppress(TimeoutError, SiteError):
            async with asyncio.timeout(_SETTLE_WAIT_S):
                await asyncio.gather(*self._tidying, return_exceptions=True)
                for record in self._journal.forgotten_secrets(self._site.name):
                    await self.remove_secrets(record)

    async def close(self) -> None:
        """Give up what is still being tidied up; the next run or the site's own expiry does it."""
        for task in self._tidying:
            task.cancel()
        await asyncio.gather(*self._tidying, return_exceptions=True)
