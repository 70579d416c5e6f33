"""Remove files at a site that no longer exist here, mostly `temp()` outputs.

Snakemake removes them here once no job needs them. At the site they would take up space until the
end of the run, and a command that lists its directory would see files that are gone.
"""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.engine.compare import find_empty
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.jobs.paths import OUTSIDE, local_path
from snakemake_executor_plugin_mantik.journal import FileLedger, FileRecord
from snakemake_executor_plugin_mantik.sites.base import Site, is_rest_safe


class RemoteCleanup:
    """Remove files from one place that are gone here."""

    def __init__(
        self, site: Site, place: str, ledger: FileLedger, retry: SiteRetry, workdir: Path
    ) -> None:
        self._site = site
        self._place = place
        self._ledger = ledger
        self._retry = retry
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
            self._used.clear()
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
        await self._remove(self._ledger.remote_files(self._place))

    async def _remove(self, files: Iterable[FileRecord]) -> None:
        """Remove those of `files` that no longer exist here, and directories that become empty.

        Sources, files below hidden directories except `.mantik/outside`, and names that the file
        API cannot carry stay.
        """
        gone = [
            file.path
            for file in files
            if not (file.source or file.stored or self._ledger.is_stored(file.path))
            and not self._here(file.path).exists()
            and is_rest_safe(file.path)
            and (not file.path.startswith(".") or file.path.startswith(f"{OUTSIDE}/"))
        ]
        await asyncio.gather(*(self._site.remove(path) for path in gone))
        self._ledger.forget_remote_files(self._place, gone)
        # The directories of a temp(directory()) are left.
        left = {
            parent.as_posix()
            for path in gone
            for parent in PurePosixPath(path).parents
            if not self._here(f"{parent}/").exists()
        }
        for directory in await find_empty(self._site, left):
            await self._site.remove(directory)

    def _here(self, path: str) -> Path:
        return local_path(path, self._workdir)
