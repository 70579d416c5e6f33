"""Remove files at a site that no longer exist here, mostly `temp()` outputs.

Snakemake removes them here once no job needs them. At the site they would take up space until the
end of the run, and a command that lists its directory would see files that are gone. What a job
still uses, perhaps one of an earlier run, stays until that has ended.
"""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.jobs.paths import is_outside, local_path
from snakemake_executor_plugin_mantik.journal import FileRecord
from snakemake_executor_plugin_mantik.sites.base import is_rest_safe

from .compare import find_empty
from .in_use import InUse


class RemoteCleanup:
    """Remove files from one place that are gone here."""

    def __init__(self, in_use: InUse, workdir: Path) -> None:
        self._in_use = in_use
        self._site = in_use.site
        self._place = in_use.place
        self._ledger = in_use.journal.files
        self._retry = in_use.retry
        self._workdir = workdir
        self._used: dict[str, None] = {}
        self._sweeping = asyncio.Lock()

    def used(self, paths: Iterable[str]) -> None:
        """Note inputs and outputs of a job that has ended: Snakemake may remove some of them."""
        self._used.update(dict.fromkeys(paths))

    async def follow(self) -> None:
        """Remove `used` paths that are gone; return when no other call is removing, either."""
        async with self._sweeping:
            if not self._used:
                return
            gone = [path for path in self._used if not os.path.lexists(self._here(path))]
            self._used = {p: None for p in gone if self._in_use.by(p)}
            known = (self._ledger.remote_file(self._place, path) for path in gone)
            files = [file for file in known if file is not None]
            for path in gone:
                files += self._ledger.remote_files(self._place, below=path)
            # A failed removal is no reason for a job to fail.
            with suppress(SiteRejected):
                await self._retry(lambda: self._remove(files))

    async def finish(self) -> None:
        """Remove all files that are gone, at the end of a run.

        Raises:
            SiteError: the site does not answer.
        """
        files = self._ledger.remote_files(self._place)
        users = {r.id: r for file in self._gone(files) for r in self._in_use.by(file.path)}
        await self._in_use.settle(users.values())
        await self._remove(files)

    async def _remove(self, files: Iterable[FileRecord]) -> None:
        """Remove those of `files` that no longer exist here, and directories that become empty.

        What is in use stays, and in the manifest, so that it is removed later.
        """
        gone = [file.path for file in self._gone(files) if not self._in_use.by(file.path)]
        await asyncio.gather(*(self._site.remove(path) for path in gone))
        self._ledger.forget_remote_files(self._place, gone)
        # The directories of a temp(directory()) are left.
        left = {
            parent.as_posix()
            for path in gone
            for parent in PurePosixPath(path).parents
            if not self._here(f"{parent}/").exists() and not self._in_use.by(parent.as_posix())
        }
        for directory in await find_empty(self._site, left):
            await self._site.remove(directory)

    def _gone(self, files: Iterable[FileRecord]) -> list[FileRecord]:
        """Return those of `files` that no longer exist here and that may be removed there.

        Sources, files below hidden directories of the working directory, and names that the file
        API cannot carry stay.
        """
        return [
            file
            for file in files
            if not (file.source or file.stored or self._ledger.is_stored(file.path))
            and not self._here(file.path).exists()
            and is_rest_safe(file.path)
            and (not file.path.startswith(".") or is_outside(file.path))
        ]

    def _here(self, path: str) -> Path:
        return local_path(path, self._workdir)
