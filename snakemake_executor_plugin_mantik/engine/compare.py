"""Compare records of files with what their site lists."""

import asyncio
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteError, SiteNotFound
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.journal import FileRecord
from snakemake_executor_plugin_mantik.sites.base import Entry, Site, is_rest_safe

_SUMMER_S: Final = 3600.0
_TIMES_DIFFER_S: Final = 2.0
"""Seconds by which a site's file API and a job may report different times of the same change."""
_FRESH_S: Final = 120.0
"""Age from which outputs are compared when a job ended unnoticed. A file system may show newer ones
late, and no centre purges them."""
_MOST_DIRECTORIES: Final = 12
"""How many directories of outputs of such jobs are listed in a run, at most."""


class LateOutputs:
    """Outputs that stay at a site and whose job ended long before its end was noticed.

    Belongs to the event loop's thread.
    """

    def __init__(self, site: Site, retry: SiteRetry) -> None:
        self._site = site
        self._retry = retry
        self._listings: dict[str, Mapping[str, Entry]] = {}
        self._turn = asyncio.Lock()  # jobs whose ends are noticed together share a listing

    async def lost(self, files: Sequence[FileRecord], ended: float | None) -> list[str]:
        """Return the paths of `files` that are gone, or are not as their job left them.

        What cannot be listed counts as being there: the job that reads it compares it.

        Args:
            files: the records of a job's outputs.
            ended: when the job ended, by its node's clock, in seconds since the epoch; None if that
                is unknown.
        """
        now = self._site.clock
        if now is not None and ended is not None and now - ended < _FRESH_S:
            return []
        by_directory: dict[str, list[FileRecord]] = {}
        for file in files:
            by_directory.setdefault(directory_of(file.path), []).append(file)
        lost = []
        async with self._turn:
            for directory, here in by_directory.items():
                lost += await self._lost_in(directory, here)
        return lost

    async def _lost_in(self, directory: str, files: Sequence[FileRecord]) -> list[str]:
        known = self._listings.get(directory)
        if known is not None and all(is_listed(file, known) for file in files):
            return []
        many = known is None and len(self._listings) >= _MOST_DIRECTORIES
        if many or not is_rest_safe(directory):
            return []
        paths = [file.path for file in files]
        try:
            entries = await self._retry.found(lambda: list_targets(self._site, directory, paths))
        except SiteNotFound:
            entries = {}
        except SiteError:
            return []
        self._listings[directory] = entries
        return [file.path for file in files if not is_listed(file, entries)]


def is_listed(file: FileRecord, entries: Mapping[str, Entry]) -> bool:
    """Check whether a directory's entries contain a file as it was recorded."""
    entry = entries.get(file.path.rpartition("/")[2])
    if entry is None or (file.sha256 and entry.size != file.size):
        return False
    return not file.stored or same_time(entry.modified, file.modified)


def same_time(one: float, other: float) -> bool:
    """Return whether two times are those of the same change of a file, in seconds.

    firecREST lists local times without a zone: after a change to or from summer time they differ by
    an hour.
    """
    return min(abs(one - other), abs(abs(one - other) - _SUMMER_S)) < _TIMES_DIFFER_S


def directory_of(path: str) -> str:
    """Return the directory of a path in a workspace."""
    return path.rpartition("/")[0]


async def list_targets(site: Site, directory: str, paths: Iterable[str]) -> dict[str, Entry]:
    """Return the entries of a directory by name; of those `paths` that are links, their targets'.

    Raises:
        SiteError: it cannot be listed.
    """
    entries = await site.list(directory)
    for path in paths:
        name = posixpath.basename(path)
        if name in entries and entries[name].link:
            target = await site.stat(path)
            if target is None:
                del entries[name]
            else:
                entries[name] = target
    return entries
