"""Bring stored outputs from the place where they were made to another one, through this machine."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.humanize import humanize_size
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.journal import FileLedger, is_checksum
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.staging.local import LocalFile, file_key
from snakemake_executor_plugin_mantik.staging.transfers import download_file


@dataclass(frozen=True)
class Source:
    """A place to fetch files from: a site that sees it, and a local directory for the files."""

    site: Site
    retry: SiteRetry
    scratch: Path


_Key = tuple[str, Path, str]
"""A content: its place, its path there, its checksum."""

Find = Callable[[str], Awaitable[Source]]
"""Opens the place with an identity."""


class Crossing:
    """Brings files from place to place. Belongs to the event loop's thread.

    A file is downloaded once, verified, and kept on this machine until the run ends; the place that
    needs it gets it as it gets any file of this machine.
    """

    def __init__(self, ledger: FileLedger, find: Find, notify: Callable[[str], None]) -> None:
        """Make it; `notify` writes a line to the user's log."""
        self._ledger = ledger
        self._find = find
        self._notify = notify
        self._coming: dict[_Key, asyncio.Task[Path]] = {}

    async def bring(self, files: Iterable[LocalFile], place: str) -> list[LocalFile]:
        """Return `files` as they are needed at `place`.

        Those that are stored at another place are there already, or are fetched to this machine.

        Raises:
            MantikError: a file cannot be fetched.
            OSError: it cannot be written here.
        """
        files = list(files)
        self._announce([file for file in files if self._is_elsewhere(file, place)])
        return list(await asyncio.gather(*(self._brought(file, place) for file in files)))

    def _is_elsewhere(self, file: LocalFile, place: str) -> bool:
        if file.stored in ("", place):
            return False
        there = self._ledger.remote_file(place, file.path)
        return there is None or (there.size, there.sha256) != (file.size, file.sha256)

    async def _brought(self, file: LocalFile, place: str) -> LocalFile:
        if file.stored in ("", place):
            return file
        if file.directory:
            return LocalFile.holding(file.path, None)
        if not self._is_elsewhere(file, place):
            return LocalFile.at(place, file.record)
        key = _key(file)
        task = self._coming.get(key)
        if task is None or (task.done() and (task.exception() or not task.result().exists())):
            task = self._coming[key] = asyncio.create_task(self._fetch(file))
        local = await asyncio.shield(task)
        status = await asyncio.to_thread(local.stat)
        known = file_key(local, status)
        return LocalFile(file.path, local, file.size, known, file.sha256)

    def _announce(self, files: Sequence[LocalFile]) -> None:
        new = [f for f in files if _key(f) not in self._coming]
        if new:
            size = humanize_size(sum(file.size for file in new))
            more = f" and {len(new) - 1} more files" if len(new) > 1 else ""
            self._notify(
                f"Moving {display_path(new[0].path)}{more} ({size}) between sites, through this"
                " machine."
            )

    async def _fetch(self, file: LocalFile) -> Path:
        source = await self._find(file.stored)
        name = hashlib.sha256(f"{file.local}\0{file.sha256}".encode()).hexdigest()[:32]
        target = source.scratch / f"crossing-{name}"
        sha256 = file.sha256 if is_checksum(file.sha256) else ""
        try:
            await download_file(
                source.site, str(file.local), target, size=file.size, sha256=sha256,
                repeat=source.retry.insist,
            )  # fmt: skip
        except OSError as error:
            raise UserError(
                f"{display_path(file.path)} cannot be written here on its way to another site"
                f" ({error.strerror or error})",
                where=str(target.parent),
                do="Free space and start again: running jobs are taken up",
            ) from error
        return target


def _key(file: LocalFile) -> _Key:
    return file.stored, file.local, file.sha256
