"""End jobs of earlier runs that would overwrite files of this run, or read what it overwrites.

A job that was submitted days ago may still start, or run. A small input travels in the script of
the job that needs it, and is unpacked when that job starts. By then, a job of this run may make or
read another content of the file. And if a rule was renamed, the jobs of the old and the new rule
make the same files. And a job that still runs may read what a job of this run is about to make
again: it would go on with what is left of it. A job's own tries show none of this.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import compress

from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.journal import MADE, TryRecord
from snakemake_executor_plugin_mantik.staging.local import LocalFile

from . import claims
from .adopt import ended_since_message
from .in_use import InUse
from .stage import Stager

_LOOK_AGAIN_S = 10.0
"""Seconds between two looks at jobs of this run that must end first: they are watched anyway."""


class WriteConflicts:
    """End conflicting tries of earlier runs at one place."""

    def __init__(
        self,
        in_use: InUse,
        stager: Stager,
        give_up: Callable[[Sequence[TryRecord]], Awaitable[None]],
        notify: Callable[[str], None],
    ) -> None:
        self._in_use = in_use
        self._site = in_use.site
        self._journal = in_use.journal
        self._retry = in_use.retry
        self._stager = stager
        self._give_up = give_up
        self._notify = notify
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

    async def free(
        self, record: TryRecord, paths: Iterable[str], *, of_this_run: bool = True
    ) -> None:
        """Let a try remove or replace what is at some paths: nobody reads it or writes it then.

        Tries of earlier runs that use it are ended, those of this run awaited. With
        `of_this_run=False` these do not matter, since Snakemake knows in which order they run,
        except those that were submitted behind a former try of the same job: they are being ended.

        Raises:
            SiteRejected: the site does not allow making certain that a job never starts.
        """
        said = False
        for path in paths:
            # A job need not have read a file that nobody knows, in a directory that it reads.
            above = self._stager.knows(path)
            while users := await self._in_use.settle(self._others(record, path, above=above)):
                earlier = [user for user in users if user.id not in self._own]
                await self._give_up(earlier)
                why = f"since a job of this run changes {display_path(path)}, which it uses"
                for user in earlier:
                    self._notify(ended_since_message(user, why))
                awaited = [
                    user
                    for user in users
                    if user not in earlier and (of_this_run or self._was_behind(user, record))
                ]
                if not awaited and len(earlier) < len(users):
                    break
                if not awaited:
                    continue
                if not said:
                    names = ", ".join(dict.fromkeys(user.name for user in awaited))
                    self._notify(
                        f"{record.name}: it is submitted when {names} has ended, which uses"
                        f" {display_path(path)}."
                    )
                said = True
                await asyncio.sleep(_LOOK_AGAIN_S)

    def _was_behind(self, user: TryRecord, record: TryRecord) -> bool:
        makers = self._journal.tries(user.makers.values())
        return any(maker.job == record.job for maker in makers)

    def _others(self, record: TryRecord, path: str, *, above: bool) -> list[TryRecord]:
        """Return the tries of other jobs that use a path, without those that wait for the try."""
        found = [r for r in self._in_use.by(path, above=above) if r.job != record.job]
        waiting = {r.id for r in self._journal.all_dependents([record.id])} if found else ()
        return [user for user in found if user.id not in waiting]

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
