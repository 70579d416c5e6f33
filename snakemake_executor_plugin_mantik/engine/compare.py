"""Compare records of files with what their site lists, and decide what is gone: see `look`."""

import asyncio
import math
import posixpath
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..common.errors import SiteError, SiteNotFound, SiteRejected
from ..jobs.paths import PLACE
from ..journal import FileRecord
from ..sites.base import Entry, Site, is_rest_safe
from .leases import Lease
from .site_retry import SiteRetry

_SUMMER_S: Final = 3600.0
_TIMES_DIFFER_S: Final = 2.0
"""Seconds by which a site's file API and a job may report different times of the same change."""
_FRESH_S: Final = 120.0
"""Age from which outputs are compared when a job ended unnoticed. A file system may show newer ones
late, and no centre purges them."""
MOST_DIRECTORIES: Final = 12
"""How many directories with outputs are listed at a place, at most, before a job needs them."""
_AGAIN_S: Final = 3.0
"""Seconds between two looks: a server that restarts, or a file system that is mounted again, was
seen to give wrong answers for one or two."""
_LOOKS: Final = 5
"""Most looks at a directory whose listing and files contradict each other."""
_ASKED: Final = 16
"""Files that are asked for directly, at most; of more, so many that are spread over all."""


@dataclass(frozen=True)
class Sight:
    """What a look at a directory has shown.

    Attributes:
        entries: its entries by name; of those files that are links, their targets'.
        gone: the paths of the files that are certainly not there. What is neither here nor among
            the entries is unknown, and counts as being there.
    """

    entries: Mapping[str, Entry]
    gone: frozenset[str] = frozenset()

    def lacks(self, file: FileRecord) -> bool:
        """Return whether a file is gone, or is not as it was recorded."""
        if file.path.rpartition("/")[2] in self.entries:
            return not is_listed(file, self.entries)
        return file.path in self.gone

    def is_unknown(self, path: str) -> bool:
        """Return whether a file that was looked at may be there although it is not listed."""
        return path not in self.gone and posixpath.basename(path) not in self.entries


async def look(
    site: Site, retry: SiteRetry, place: str, directory: str, paths: Iterable[str], *, dear: bool
) -> Sight:
    """Look at files in a directory of a place.

    Servers give wrong answers for a moment: an empty listing, a part of one, or "not found". What
    is cheap to replace is gone if one listing lacks it. What is `dear` is gone only if two listings
    with time between lack it, the site denies the file itself each time, and the workspace is the
    place: it shows the place's identity, or is empty and can be written to after a purge.

    Args:
        site: a site that sees the place.
        retry: repeats requests there.
        place: the identity of the place.
        directory: the directory, in the workspace.
        paths: the paths of the files, all in this directory.
        dear: whether making one of the files again may cost much.

    Raises:
        SiteError: the directory cannot be listed.
    """
    paths = list(paths)
    suspects = frozenset(paths)
    for number in range(_LOOKS):
        entries = await retry.listed(lambda: list_targets(site, directory, paths))
        missing = [path for path in paths if posixpath.basename(path) not in entries]
        if not dear or not missing:
            return Sight(entries, frozenset(missing))
        if not await _is_there(site, retry, place):
            return Sight(entries)
        denied, found = await _ask(site, retry, missing)
        entries |= {posixpath.basename(path): entry for path, entry in found.items()}
        suspects &= denied if found else {*missing}
        if not suspects or (number and not found):
            break
        await asyncio.sleep(_AGAIN_S)
    return Sight(entries, suspects)


async def find_empty(site: Site, directories: Iterable[str]) -> list[str]:
    """Return those directories that hold nothing, or only each other, the deepest first.

    Two listings with time between have to say so: a removal takes what is in a directory with it.

    Raises:
        SiteError: one cannot be listed.
    """
    empty = set(directories)
    for number in range(2):
        if number and empty:
            await asyncio.sleep(_AGAIN_S)
        for directory in sorted(empty, key=_deepest):
            try:
                names = await site.list(directory)
            except SiteNotFound:
                empty.discard(directory)
                continue
            if any(posixpath.join(directory, name) not in empty for name in names):
                empty.discard(directory)
    return sorted(empty, key=_deepest)


def _deepest(path: str) -> tuple[int, str]:
    return -path.count("/"), path


async def _is_there(site: Site, retry: SiteRetry, place: str) -> bool:
    """Return whether a workspace is the place, and not what shows in place of its file system."""
    try:
        names = await retry.listed(lambda: site.list(PLACE))
    except SiteRejected:
        return False
    places = {lease.place for name in names if (lease := Lease.of(name)) is not None}
    if places:
        return place in places
    try:
        await retry(lambda: site.make_directory(PLACE))
    except SiteRejected:
        return False
    return True


async def _ask(
    site: Site, retry: SiteRetry, paths: Sequence[str]
) -> tuple[set[str], dict[str, Entry]]:
    """Ask for files directly: return the paths of those that are denied, and those found.

    Raises:
        SiteRejected: the site does not say whether a file exists.
    """
    safe = [path for path in paths if is_rest_safe(path)]
    asked = safe[:: -(-len(safe) // _ASKED)] if safe else []
    answers = await asyncio.gather(*(retry(lambda p=p: site.stat(p)) for p in asked))  # type: ignore[misc]
    found = {path: entry for path, entry in zip(asked, answers, strict=True) if entry is not None}
    return {*asked} - found.keys(), found


class Looks:
    """Looks at the directories of one place: what one has shown serves all who ask.

    Belongs to the event loop's thread.

    Attributes:
        site: a site that sees the place.
        retry: repeats requests there.
    """

    def __init__(self, site: Site, place: str, retry: SiteRetry, most: float = math.inf) -> None:
        """Make it; `most` directories are looked at."""
        self.site = site
        self.retry = retry
        self._place = place
        self._most = most
        self._seen: dict[str, Sight] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def at(self, directory: str, files: Sequence[FileRecord]) -> Sight | None:
        """Look at files in a directory, unless a look has shown all of them as they were recorded.

        Return None if the directory is not looked at: there are too many, or the site's file API
        cannot carry its name. To upload a file again costs little; to make one again may cost much.

        Raises:
            SiteError: it cannot be listed.
        """
        many = directory not in self._turns and len(self._turns) >= self._most
        if many or not is_rest_safe(directory):
            return None
        async with self._turns[directory]:
            known = self._seen.get(directory)
            if known is not None and all(is_listed(file, known.entries) for file in files):
                return known
            dear = any(file.stored for file in files)
            paths = [file.path for file in files]
            self._seen[directory] = sight = await look(
                self.site, self.retry, self._place, directory, paths, dear=dear
            )
            return sight

    async def late_losses(self, files: Sequence[FileRecord], ended: float | None) -> list[str]:
        """Return the paths of a job's outputs that are gone, or are not as the job left them.

        Only those are looked at whose job ended long before its end was noticed, at `ended` by its
        node's clock, or at a time that is unknown. What cannot be listed counts as being there: the
        job that reads it compares it.
        """
        now = self.site.clock
        if now is not None and ended is not None and now - ended < _FRESH_S:
            return []
        lost = []
        for directory, here in by_directory(files).items():
            with suppress(SiteError):
                if (sight := await self.at(directory, here)) is not None:
                    lost += [file.path for file in here if sight.lacks(file)]
        return lost


def by_directory(files: Iterable[FileRecord]) -> dict[str, list[FileRecord]]:
    """Return files by the directories that they lie in."""
    found = defaultdict[str, list[FileRecord]](list)
    for file in files:
        found[posixpath.dirname(file.path)].append(file)
    return dict(found)


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


def is_same_file(path: Path, size: int, modified: float) -> bool:
    """Return whether a file on this machine has the size and the time of one at a site."""
    try:
        status = path.stat()
    except OSError:
        return False
    alike = stat.S_ISREG(status.st_mode) and status.st_size == size
    return alike and same_time(status.st_mtime, modified)


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
