"""Ending: what is not wanted is stopped for certain, what is done leaves nothing at the site."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from snakemake_executor_plugin_mantik.engine.patience import TRANSIENT
from snakemake_executor_plugin_mantik.engine.watch import Watcher
from snakemake_executor_plugin_mantik.errors import SiteError, SiteNotFound, SiteRejected
from snakemake_executor_plugin_mantik.jobs.paths import BUNDLES, TRIES, WORK
from snakemake_executor_plugin_mantik.journal import Journal, TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import Phase, Site, rest_safe

CANCEL_WAIT_S = 60.0
"""Seconds that cancelled jobs have to be confirmed as ended."""
CONFIRM_EVERY_S = 1.0
TIDY_WAIT_S = 30.0
"""Seconds that tidying up at the end of a run may take; what is left goes at the next run's."""


class Ender:
    """Ends tries at one site and tidies up after them."""

    def __init__(
        self, site: Site, journal: Journal, watcher: Watcher, tell: Callable[[str], None]
    ) -> None:
        self._site = site
        self._journal = journal
        self._watcher = watcher
        self._tell = tell
        self._tidying: set[asyncio.Task[None]] = set()

    async def done(self, try_id: str, ids: Sequence[str], *, let_end: bool = False) -> None:
        """A try is committed: the site may forget it, some time.

        Args:
            try_id: the try.
            ids: the site's ids of it.
            let_end: whether the site still has a command to run after the job's own end: forgetting
                a job ends it.
        """
        self._journal.done(try_id)
        if ids:
            task = asyncio.create_task(self._forget(ids, let_end))
            self._tidying.add(task)
            task.add_done_callback(self._tidying.discard)

    async def _forget(self, ids: Sequence[str], let_end: bool) -> None:
        # Records that stay behind do no harm: the site lets them expire.
        with suppress(SiteError):
            while let_end:
                states = await self._site.states(ids)
                let_end = any(s.phase in (Phase.WAITING, Phase.RUNNING) for s in states.values())
                await asyncio.sleep(CONFIRM_EVERY_S if let_end else 0)
            await self._site.forget(ids)

    async def give_up(self, records: Iterable[TryRecord]) -> None:
        """See to it that these tries are over and will never run; nothing of them is wanted.

        Raises:
            SiteUnreachable: the site cannot be asked for longer than that may take.
        """
        for record in records:
            if record.state is not TryState.PLANNED and not await self._stop(record):
                self._tell(
                    f"{record.name}: the job {', '.join(record.site_jobs)} at {record.site} was"
                    " told to end but has not confirmed it yet; waiting for it."
                )
                while not await self._is_over(record):
                    await asyncio.sleep(CONFIRM_EVERY_S)
            self._journal.abandoned(record.id, "cancelled")
            await self.done(record.id, record.site_jobs)

    async def cancel(self, records: Sequence[TryRecord]) -> list[TryRecord]:
        """Cancel tries at the end of a run; those that did not confirm it in time."""

        async def one(record: TryRecord) -> TryRecord | None:
            try:
                async with asyncio.timeout(CANCEL_WAIT_S):
                    confirmed = await self._stop(record)
            except (TimeoutError, SiteError):
                return record
            if not confirmed:
                return record
            self._journal.abandoned(record.id, "cancelled")
            return None

        results = await asyncio.gather(*(one(record) for record in records))
        return [record for record in results if record is not None]

    async def _stop(self, record: TryRecord) -> bool:
        """Revoke and cancel a try; whether it is confirmed to be over within the waiting time."""
        self._watcher.forget(record.id)
        try:
            await self._site.make_directory(record.paths.claim)
            revoked = True
        except SiteRejected:
            revoked = False
        ids = list(record.site_jobs) or await self._site.find(record.id)
        if ids:
            await self._site.cancel(ids)
        if revoked:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_WAIT_S):
                while not await self._is_over(record):
                    await asyncio.sleep(CONFIRM_EVERY_S)
                return True
        return False

    async def _is_over(self, record: TryRecord) -> bool:
        """Whether a try that has started has ended: by its marker, or by the scheduler's word."""
        try:
            entries = await self._site.list(record.paths.tries)
            if any(name.startswith(f"{record.id}.") for name in entries):
                return True
            ids = list(record.site_jobs) or await self._site.find(record.id)
            states = await self._site.states(ids)
        except TRANSIENT:
            return False
        return bool(states) and all(s.phase is Phase.ENDED for s in states.values())

    async def tidy(self, workdir: Path) -> None:
        """At the end of a run: remove what nobody needs any more, as far as the site answers.

        That is our own directories once no try is open, and the site's copies of files that are no
        longer here (`temp()` outputs, mostly).
        """
        with suppress(TimeoutError, SiteError):
            async with asyncio.timeout(TIDY_WAIT_S):
                await asyncio.gather(*self._tidying, return_exceptions=True)
                await self._sweep(workdir)
                if not any(r.site == self._site.name for r in self._journal.all_open_tries()):
                    await self._empty()

    async def _empty(self) -> None:
        if not self._journal.retire_buckets(self._site.name):
            return
        for bundle in self._journal.pending_bundles(self._site.name):
            self._journal.set_bundle(bundle, "gone")
        await asyncio.gather(*(self._site.remove(path) for path in (TRIES, WORK, BUNDLES)))

    async def _sweep(self, workdir: Path) -> None:
        gone = [
            file.path
            for file in self._journal.remote_files(self._site.name)
            if not file.source
            and not (workdir / file.path).exists()
            and rest_safe(file.path)
            and not file.path.startswith(".")
        ]
        await asyncio.gather(*(self._site.remove(path) for path in gone))
        self._journal.forget_remote_files(self._site.name, gone)
        # Of a temp(directory()) the directories are left.
        left = {
            parent.as_posix()
            for path in gone
            for parent in PurePosixPath(path).parents
            if not (workdir / parent).exists()
        }
        for directory in sorted(left, key=len, reverse=True):
            with suppress(SiteNotFound):
                if not await self._site.list(directory):
                    await self._site.remove(directory)
