"""Jobs of earlier runs that would put another file in the place of one that this run works with.

What was sent days ago may still start, or run. A small input travels in the script of the job that
needs it, and is unpacked when that starts: it may be another file by now, which a job of this run
makes, or reads. And a rule may have got another name since: then the job of the old one makes the
same files as that of the new one. None of this is seen by a job's own tries.
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
    """Makes way for the jobs of this run at one place."""

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
        # Of many jobs that find the same conflicts one deals with them.
        self._clearing = asyncio.Lock()

    def own(self, record: TryRecord) -> None:
        """This run goes on with a try: it is nobody's rival."""
        self._own.add(record.id)

    async def make_way(self, files: Iterable[LocalFile], makes: Iterable[str]) -> list[str]:
        """Before a job is sent: see to it that nothing old gets in its way.

        Args:
            files: what it reads.
            makes: paths of the files and directories that it makes.

        Returns:
            What the user is to be told.

        Raises:
            SiteRejected: the site does not let us make certain that a job never starts.
        """
        told: list[str] = []
        wanted = [(file.path, file.sha256) for file in files if not file.directory]
        for path, sha256 in [*wanted, *((path, MADE) for path in makes)]:
            if not self._stager.conflicts(path, sha256):
                continue
            if makers := self._among(path, sha256, makes=True):
                await self._give_up(makers)
                why = f"since another job of this run has to do with {display_path(path)}"
                told += [ended_since_message(record, why) for record in makers]
            if self._among(path, sha256, makes=False):
                async with self._clearing:
                    late = self._among(path, sha256, makes=False)
                    never_run = await asyncio.gather(*map(self._keep_from_starting, late))
                why = f"since these changed: {display_path(path)}"
                told += [ended_since_message(record, why) for record in compress(late, never_run)]
        return told

    def _among(self, path: str, sha256: str, *, makes: bool) -> list[TryRecord]:
        """The tries of earlier runs that make what lies at a path, or carry another content."""
        conflicts = [r for r in self._stager.conflicts(path, sha256) if not r.bundle]
        return self._journal.tries(
            r.id for r in conflicts if r.makes is makes and r.id not in self._own
        )

    async def _keep_from_starting(self, record: TryRecord) -> bool:
        """Whether a try will never run. Else it has unpacked already, and is in nobody's way."""
        if await self._retry.found(lambda: claims.revoke_try(self._site, record)):
            await self._give_up([record])
            return True
        self._journal.files.landed(record.id)
        return False
