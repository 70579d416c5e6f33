"""Measure what lies in a workspace, and remove it."""

import asyncio
import posixpath
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..common.errors import SiteError, SiteNotFound
from ..jobs.paths import (
    ATTEMPTS,
    CONDA,
    IMAGES,
    OURS,
    OUTSIDE,
    PLACE,
    PYTHONS,
    UP,
    UPS,
    is_at,
    way_down,
)
from ..journal import FileRecord, Journal
from ..sites.base import Entry, Site
from .compare import find_empty

MOST_LISTINGS = 500
"""Most directories to list for a workspace's size: environments have thousands."""

WORKFLOW_FILES = "files of the workflow"
_PARTS = {
    CONDA: "conda environments",
    PYTHONS: "virtual environments",
    IMAGES: "container images",
    OUTSIDE: WORKFLOW_FILES,
    UP: WORKFLOW_FILES,
    OURS: "attempts, logs and archives",
}
"""What lies below a directory; the first match counts."""

_DIRECTORIES = ["", *(f"{UP}/{up}" for up in UPS)]
"""The workspace and those above it."""
_STORAGE_LINK = ".snakemake/storage/mantik"
"""By which commands name remote outputs, unless `--local-storage-prefix` is set."""
_NOT_FILES = frozenset({PLACE, UP, _STORAGE_LINK, *(f"{UP}/{up}/{way_down(up)}" for up in UPS)})
"""What the present controller made, links, and the way from those above to the workspace."""


@dataclass
class WorkspacePart:
    """Files of one kind in a workspace.

    Attributes:
        files: their number; with `more` a lower bound.
        size: their size in bytes.
        more: whether some directories were not listed.
    """

    files: int = 0
    size: int = 0
    more: bool = False

    def add(self, size: int) -> None:
        self.files += 1
        self.size += size


class Clearer:
    """Measure and empty one workspace."""

    def __init__(self, site: Site, place: str, journal: Journal, *, shared: bool) -> None:
        """Make a clearer for an opened site.

        `place` is the identity of its place, which the workflow owns. `shared` says whether the
        workspace's path was configured, so that it may contain files of others: only `.mantik` and
        the files in the journal then count.
        """
        self._site = site
        self._place = place
        self._journal = journal
        self._shared = shared

    async def measure(self) -> dict[str, WorkspacePart]:
        """Return the numbers and sizes of the files there, by kind."""
        found = defaultdict[str, WorkspacePart](WorkspacePart)
        level = list(_DIRECTORIES)
        if self._shared:
            level = [OURS]
            for file in self._known():
                found[WORKFLOW_FILES].add(file.size)
        looked = 0
        while level:
            if looked + len(level) > MOST_LISTINGS:
                for path in level[max(0, MOST_LISTINGS - looked) :]:
                    found[_part(path)].more = True
                level = level[: max(0, MOST_LISTINGS - looked)]
            looked += len(level)
            below = []
            listings = await asyncio.gather(*map(self._entries, level))
            for directory, entries in zip(level, listings, strict=True):
                if directory and any(entry.name == OURS for entry in entries):
                    continue  # a link to the workspace, or a job's shadow directory full of links
                for entry in entries:
                    path = posixpath.join(directory, entry.name)
                    if path in _NOT_FILES:
                        continue
                    if entry.directory:
                        below.append(path)
                    else:
                        found[_part(path)].add(entry.size)
            level = below
        return found

    async def remove(self, also_here: Iterable[str] = ()) -> list[str]:
        """Remove all files there that count, but not the workspace's directory itself.

        `also_here` are paths of remote outputs that this machine has, too.

        Returns the paths that could not be removed, each with the reason. First the journal forgets
        the files. At the site the attempts are removed first, so that a job that it starts late
        cannot make a claim.
        """
        known, place = self._known(), self._place
        for bucket in self._journal.retire_buckets(place):
            self._journal.bucket_gone(place, bucket)
        stored = [output.path for output in self._journal.files.all_stored(place)]
        self._journal.files.lose(stored)
        self._journal.files.forget_stored(also_here)
        self._journal.files.forget_remote_files(place, [f.path for f in known])
        for bundle in self._journal.files.bundles(place):
            self._journal.files.forget_bundle(bundle)
        left = await self._remove([ATTEMPTS])
        if self._shared:
            left += await self._remove([OURS, *(file.path for file in known)])
            await self._remove_empty({p for f in known for p in PurePosixPath(f.path).parents})
        else:
            for directory in _DIRECTORIES:
                there = [posixpath.join(directory, e.name) for e in await self._entries(directory)]
                left += await self._remove(path for path in there if path not in _NOT_FILES)
        return left

    def _known(self) -> list[FileRecord]:
        return self._journal.files.remote_files(self._place)

    async def _remove(self, paths: Iterable[str]) -> list[str]:
        async def one(path: str) -> str | None:
            try:
                await self._site.remove(path)
            except SiteError as error:
                return f"{path} ({error.what})"
            return None

        results = await asyncio.gather(*map(one, paths))
        return [path for path in results if path is not None]

    async def _remove_empty(self, directories: Iterable[PurePosixPath]) -> None:
        paths = [directory.as_posix() for directory in directories if directory.parts]
        for path in await find_empty(self._site, paths):
            with suppress(SiteError):
                await self._site.remove(path)

    async def _entries(self, path: str) -> list[Entry]:
        try:
            return list((await self._site.list(path or ".")).values())
        except SiteNotFound:
            return []


def _part(path: str) -> str:
    for directory, name in _PARTS.items():
        if is_at(path, directory):
            return name
    return WORKFLOW_FILES
