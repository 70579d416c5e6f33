"""What attempts use at a place, also those of earlier runs: what must stay, and what yields.

The journal says which paths an attempt uses (`journal.uses`). Nobody watches an attempt that this
run was not asked for: whether it has ended, the site shows.

A job that was submitted days ago may still start, or run. A small input travels in the script of
the job that needs it, and is unpacked when that job starts. By then, a job of this run may make or
read another content of the file. And if a rule was renamed, the jobs of the old and the new rule
make the same files. And a job that still runs may read what a job of this run is about to make
again: it would go on with what is left of it. A job's own attempts show none of this.
"""

import asyncio
import math
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path, PurePosixPath

from ..common.errors import SiteRejected
from ..jobs.paths import display_path, is_outside, local_path
from ..journal import MADE, AttemptRecord, FileRecord
from ..sites.base import is_rest_safe
from ..staging.local import LocalFile
from .adopt import ended_since_message
from .compare import find_empty
from .evidence import find_markers, list_claims, revoke_attempt
from .workflow_context import PlaceContext

_LOOK_AGAIN_S = 10.0
"""Seconds between two looks at jobs of this run that must end first: they are watched anyway."""
_REMOVED_S = 60.0
"""Seconds after the end of a job in which Snakemake removes what nobody needs any more."""
_FRESH_S = 1.0
"""Seconds for which one listing of a directory of claims serves all callers."""


class InUse:
    """What attempts use at one place, compared with the site.

    Files that no longer exist here, mostly `temp()` outputs, are removed there once no attempt uses
    them. Attempts of earlier runs end that would overwrite files of this run, or read what it
    makes.
    """

    def __init__(self, at: PlaceContext, assure: Callable[[], Awaitable[None]]) -> None:
        """Prepare; `assure` raises PlaceTaken once another controller leads the place."""
        self._assure = assure
        self._place, self._site, self._retry = at.id, at.site, at.retry
        self._journal, self._workdir = at.workflow.journal, at.workflow.workdir
        self._give_up, self._notify = at.workflow.give_up, at.workflow.notify
        self._ledger = self._journal.files
        self._looking = asyncio.Lock()
        self._ended: dict[str, tuple[float, Collection[str]]] = {}
        self._used: dict[str, float] = {}
        self._sweeping = asyncio.Lock()
        self.mine: set[str] = set()
        """The attempts of this run, which are no conflicts."""
        self.sending: set[str] = set()
        """The attempts that are on their way to the site."""
        # Of many jobs that find the same conflicts, one resolves them.
        self._clearing = asyncio.Lock()
        self._ending = defaultdict[str, asyncio.Lock](asyncio.Lock)

    def _by(self, path: str, *, above: bool = True) -> list[AttemptRecord]:
        """Return the attempts because of which a path must stay; see `UseLedger.of`."""
        return self._journal.uses.of(self._place, path, above=above)

    async def _settle(self, records: Iterable[AttemptRecord]) -> list[AttemptRecord]:
        """Return those attempts that may still run; what the others have used is free from now on.

        One may be on its way to the site: its use is noted before that.

        Raises:
            SiteError: the site does not answer.
        """
        open_attempts = []
        for record in records:
            if not (record.may_run or record.id in self.sending):
                continue
            if record.id in await self._look(record.paths.attempts):
                self._journal.uses.end(record.id)
            else:
                open_attempts.append(record)
        return open_attempts

    async def _look(self, directory: str) -> Collection[str]:
        """Return the ids of ended attempts; one listing serves all callers for a second."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            at, ended = self._ended.get(directory, (-math.inf, ()))
            if now - at >= _FRESH_S:
                look = partial(list_claims, self._site, self._retry, directory)
                ended = find_markers(await self._retry(look))
                self._ended[directory] = now, ended
            return ended

    # Removing what is gone here

    def used(self, paths: Iterable[str]) -> None:
        """Note inputs and outputs of a job that has ended: Snakemake may remove some of them."""
        self._used.update(dict.fromkeys(paths, asyncio.get_running_loop().time()))

    async def follow(self) -> None:
        """Remove `used` paths that are gone; return when no other call is removing, either."""
        async with self._sweeping:
            if not self._used:
                return
            gone = {path for path in self._used if not os.path.lexists(self._here(path))}
            late = asyncio.get_running_loop().time() - _REMOVED_S
            self._used = {
                path: noted
                for path, noted in self._used.items()
                if (self._by(path) if path in gone else noted > late)
            }
            files = self._ledger.remote_files_at(self._place, sorted(gone))
            # A failed removal is no reason for a job to fail.
            with suppress(SiteRejected):
                await self._retry(lambda: self._remove(files))

    async def finish(self) -> None:
        """Remove all files that are gone, at the end of a run.

        Raises:
            SiteError: the site does not answer.
        """
        files = self._ledger.remote_files(self._place)
        users = {r.id: r for file in self._gone(files) for r in self._by(file.path)}
        await self._settle(users.values())
        await self._remove(files)

    async def _remove(self, files: Iterable[FileRecord]) -> None:
        """Remove those of `files` that no longer exist here, and directories that become empty.

        What is in use stays, and in the manifest, so that it is removed later.
        """
        gone = [file.path for file in self._gone(files) if not self._by(file.path)]
        await asyncio.gather(*(self._site.remove(path) for path in gone))
        self._ledger.forget_remote_files(self._place, gone)
        # The directories of a temp(directory()) are left.
        left = {
            parent.as_posix()
            for path in gone
            for parent in PurePosixPath(path).parents
            if not self._here(f"{parent}/").exists() and not self._by(parent.as_posix())
        }
        for directory in await find_empty(self._site, left):
            await self._site.remove(directory)

    def _gone(self, files: Iterable[FileRecord]) -> list[FileRecord]:
        """Return those of `files` that no longer exist here and that may be removed there.

        Project files, files below hidden directories of the working directory, and names that the
        file API cannot carry stay.
        """
        return [
            file
            for file in files
            if not (file.project or file.stored or self._ledger.is_stored(file.path))
            and not self._here(file.path).exists()
            and is_rest_safe(file.path)
            and (not file.path.startswith(".") or is_outside(file.path))
        ]

    def _here(self, path: str) -> Path:
        return local_path(path, self._workdir)

    # Ending conflicts

    async def make_way(self, files: Iterable[LocalFile], makes: Iterable[str]) -> list[str]:
        """End attempts of earlier runs that conflict with a job to be submitted; return messages.

        The job reads `files`, and makes the files and directories at the paths `makes`.

        Raises:
            SiteRejected: the site does not allow making certain that a job never starts.
        """
        messages: list[str] = []
        wanted = [(f.path, f.sha256, f.stored == self._place) for f in files if not f.directory]
        for path, sha256, there in [*wanted, *((path, MADE, False) for path in makes)]:
            if not self._ledger.conflicts(self._place, path, sha256):
                continue
            makers = self._among(path, sha256, makes=True)
            if there:  # made by one that has ended, which an older journal may not know
                makers = await self._settle(makers)
            if makers:
                why = f"since another job of this run uses {display_path(path)}"
                messages += await self._end(makers, why)
            if self._among(path, sha256, makes=False):
                async with self._clearing:
                    late = self._among(path, sha256, makes=False)
                    never_run = await asyncio.gather(*map(self._keep_from_starting, late))
                why = f"since these changed: {display_path(path)}"
                stopped = compress(late, never_run)
                messages += [ended_since_message(record, why) for record in stopped]
        return messages

    async def free(
        self, record: AttemptRecord, paths: Iterable[str], *, of_this_run: bool = True
    ) -> None:
        """Let an attempt remove or replace what is at some paths: nobody uses it then.

        Attempts of earlier runs that use it are ended, those of this run awaited. With
        `of_this_run=False` these do not matter, since Snakemake knows in which order they run,
        except those that were submitted behind a former attempt of the same job: they are being
        ended.

        Raises:
            PlaceTaken: another controller leads the place now, and may not end what is awaited.
            SiteRejected: the site does not allow making certain that a job never starts.
        """
        said = False
        for path in paths:
            # A job need not have read a file that nobody knows, in a directory that it reads.
            above = bool(self._ledger.remote_files_at(self._place, [path]))
            while users := await self._settle(self._others(record, path, above=above)):
                earlier = [user for user in users if user.id not in self.mine]
                why = f"since a job of this run changes {display_path(path)}, which it uses"
                for message in await self._end(earlier, why):
                    self._notify(message)
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
                await self._assure()

    async def _end(self, records: Iterable[AttemptRecord], why: str) -> list[str]:
        """End attempts of earlier runs, unless this run has adopted them; return messages."""
        messages = []
        for record in records:
            async with self._ending[record.id]:
                if record.id in self.mine:
                    continue
                for known in self._journal.attempts([record.id]):
                    if known.left_behind or not known.state.final:
                        await self._give_up([known])
                        messages.append(ended_since_message(known, why))
        return messages

    async def ended(self, records: Collection[AttemptRecord]) -> None:
        """Wait until no other job is ending one of these attempts."""
        while busy := [r for r in records if r.id in self._ending and self._ending[r.id].locked()]:
            async with self._ending[busy[0].id]:
                pass

    def _was_behind(self, user: AttemptRecord, record: AttemptRecord) -> bool:
        makers = self._journal.attempts(user.makers.values())
        return any(maker.job == record.job for maker in makers)

    def _others(self, record: AttemptRecord, path: str, *, above: bool) -> list[AttemptRecord]:
        """Return other jobs' attempts that use a path, without those that wait for the attempt."""
        found = [r for r in self._by(path, above=above) if r.job != record.job]
        waiting = {r.id for r in self._journal.all_dependents([record.id])} if found else ()
        return [user for user in found if user.id not in waiting]

    def _among(self, path: str, sha256: str, *, makes: bool) -> list[AttemptRecord]:
        """Return attempts of earlier runs that make `path`, or those with another content of it."""
        return self._journal.attempts(
            one.id
            for one in self._ledger.conflicts(self._place, path, sha256)
            if not one.bundle and one.makes is makes and one.id not in self.mine
        )

    async def _keep_from_starting(self, record: AttemptRecord) -> bool:
        """Revoke and give up an attempt; return False if it runs already.

        Such an attempt has unpacked its files already, so it no longer conflicts.
        """
        if await self._retry.found(lambda: revoke_attempt(self._site, record)):
            await self._give_up([record])
            return True
        self._journal.files.landed(record.id)
        return False
