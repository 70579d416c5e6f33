"""End jobs of earlier runs that would overwrite files of this run.

A job that was submitted days ago may still start, or run. A small input travels in the script of
the job that needs it, and is unpacked when that job starts. By then, a job of this run may make or
read another content of the file. And if a rule was renamed, the jobs of the old and the new rule
make the same files. A job's own tries show none of this.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import compress

from snakemake_executor_plugin_mantik.engine import claims
from snakemake_executor_plugin_mantik.engine.adopt import ended_since_message
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.stage import Stager
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.journal import MADE, Journal, TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.staging.local import LocalFile


class WriteConflicts:
    """End conflicting tries of earlier runs at one place."""

    def __init__(
        self,
        site: Site,
        journal: Journal,
        stager: Stager,
        retry: SiteRetry,
        give_up: Callable[[Sequence[TryRecord]], Awaitable[None]],
    ) -> None:
        self._site = site
        self._journal = journal
        self._stager = stager
        self._give_up = give_up
        self._retry = retry
        self._own: set[str] = set()
        # Of many jobs that find the same conflicts, one resolves them.
        self._clearing = asyncio.Lock()

    def own(self, record: TryRecord) -> None:
        """Note that a try belongs to this run, so that it is no conflict."""
        self._own.add(record.id)

    async def make_way(self, files: Iterable[LocalFile], makes: Iterable[str]) -> list[str]:
        """End tries of earlier runs that conflict with a job to be submitted; return messages.

        The job reads `files`, and makes the files and directories at the paths `makes`.

        Raises:
            SiteRejected: the site does not allow making certain that a job never starts.
        """
        messages: list[str] = []
        wanted = [(file.path, file.sha256) for file in files if not file.directory]
        for path, sha256 in [*wanted, *((path, MADE) for path in makes)]:
            if not self._stager.conflicts(path, sha256):
                continue
            if makers := self._among(path, sha256, makes=True):
                await self._give_up(makers)
                why = f"since another job of this run uses {display_path(path)}"
                messages += [ended_since_message(record, why) for record in makers]
            if self._among(path, sha256, makes=False):
                async with self._clearing:
                    late = self._among(path, sha256, makes=False)
                    never_run = await asyncio.gather(*map(self._keep_from_starting, late))
                why = f"since these changed: {display_path(path)}"
                stopped = compress(late, never_run)
                messages += [ended_since_message(record, why) for record in stopped]
        return messages

    def _among(self, path: str, sha256: str, *, makes: bool) -> list[TryRecord]:
        """Return tries of earlier runs that make `path`, or those with another content of it."""
        conflicts = [r for r in self._stager.conflicts(path, sha256) if not r.bundle]
        return self._journal.tries(
            r.id for r in conflicts if r.makes is makes and r.id not in self._own
        )

    async def _keep_from_starting(self, record: TryRecord) -> bool:
        """Revoke and give up a try; return False if it runs already.

        Such a try has unpacked its files already, so it no longer conflicts.
        """
        if await self._retry.found(lambda: claims.revoke_try(self._site, record)):
            await self._give_up([record])
            return True
        self._journal.files.landed(record.id)
        return False
