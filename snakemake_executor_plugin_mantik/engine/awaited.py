"""Watch tries that were submitted while their files are on the way, and send these meanwhile.

Of an adopted try an earlier run has broken the uploads off: they are continued. If one cannot be,
the try is ended, unless its job has started: its script then ends by itself after a while
(`jobs/bash/arrival.sh.j2`), and the job is submitted again.
"""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from snakemake_executor_plugin_mantik.engine.attempt import Attempt, TryEnd
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.stage import Stager
from snakemake_executor_plugin_mantik.journal import Journal, TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.staging.bundle import FileChanged
from snakemake_executor_plugin_mantik.staging.local import LocalFile


class AwaitedFiles:
    """Sends what tries at one site wait for. Call all methods from the event loop's thread."""

    def __init__(
        self,
        site: Site,
        stager: Stager,
        journal: Journal,
        *,
        retry: SiteRetry,
        assure: Callable[[], Awaitable[None]],
        give_up: Callable[[Sequence[TryRecord]], Awaitable[None]],
    ) -> None:
        """Prepare; `assure` checks with the site that this controller still leads."""
        self._site = site
        self._stager = stager
        self._journal = journal
        self._retry = retry
        self._assure = assure
        self._give_up = give_up

    async def watch(
        self, end: "asyncio.Future[TryEnd]", attempt: Attempt, files: Callable[[], list[LocalFile]]
    ) -> TryEnd:
        """Return the end of a try that is watched; until then send what it waits for.

        `files` returns those that it was submitted with.

        Raises:
            FileChanged: what it waits for does not come any more, since newer contents have
                replaced it. The try may still start.
            MantikError: what it waits for cannot be sent. The try is over, unless the error is
                `PlaceTaken`: then another controller follows it.
        """
        record = attempt.record
        left = self._journal.arrivals.awaited_by(record.id)
        if record.state is TryState.ENDED:
            left = []
        try:
            while left and not end.done():
                uploads: dict[str, asyncio.Task[None]] = {}
                for bundle in left:
                    try:
                        task = await self._stager.go_on(bundle, files())
                    except FileChanged as error:
                        await self._judge(error, bundle, attempt)
                        task = None
                    if task is not None:
                        uploads[bundle] = task
                if uploads:
                    waited_for: list[asyncio.Future[Any]] = [end, *uploads.values()]
                    await asyncio.wait(waited_for, return_when=FIRST_COMPLETED)
                left = list(uploads)
                for bundle, task in uploads.items():
                    failed = task.exception() if task.done() and not task.cancelled() else None
                    if failed is not None:
                        left.remove(bundle)
                        if not end.done():
                            await self._judge(failed, bundle, attempt)
        except asyncio.CancelledError:
            end.cancel()
            raise
        return await end

    async def _judge(self, error: BaseException, bundle: str, attempt: Attempt) -> None:
        """Raise the error of an upload, after ending the try, unless the try needs no ending.

        That is so if its files are there after all, or if its job has started: it ends by itself.
        """
        await self._assure()
        if await self._stager.is_unpacked(bundle):
            return
        if isinstance(error, FileChanged):
            raise error
        record = attempt.record
        claim = await self._retry(lambda: self._site.stat(record.paths.claim))
        if claim is not None and not claim.directory:
            return
        sent = replace(record, state=TryState.SUBMITTED, site_jobs=tuple(attempt.ids))
        await self._give_up([sent])
        raise error
