"""What jobs write to an observer's directories comes here while they run (`jobs/live.sh.j2`).

The watcher's listing tells how much there is; only what is new is asked for. A copy of each
directory grows here, and the observer hears of it. Nothing depends on that: it all comes back when
the job is over, and whatever goes wrong here is left to the end.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from snakemake_executor_plugin_mantik.common.errors import SiteError
from snakemake_executor_plugin_mantik.engine.observer import JobExtras, Observer
from snakemake_executor_plugin_mantik.jobs.live import (
    LONGEST_PACK,
    PIECE_BYTES,
    Pack,
    PackDamaged,
    Packed,
    read_packs,
)
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site

REQUESTS = 2
"""Requests at the same time, at most: the others are for jobs that begin and end."""
MAX_LIVE_BYTES = 4 << 30
"""Bytes that a copy may take here; a job that wrote more is not told of before its end."""

LIVE_TREE, LIVE_LATER, POSITION = "tree", "later", "position"
"""Names in a copy's directory: what the job's directory holds; which paths of it are missing here,
or are not as they are there, separated by NUL; and how far the job's packs are in it."""


@dataclass
class _Copy:
    """The copy of one try's directory.

    Attributes:
        place: where it is here.
        extras: what the job started with.
        read: how many bytes of the packs are in it.
        piece: where the piece begins that the next bytes are in.
        looked: how much there was when nothing whole could be read.
        written: bytes that were written to it.
        over: whether nothing more is read.
    """

    place: Path
    extras: JobExtras
    read: int = 0
    piece: int = 0
    looked: int = 0
    written: int = 0
    over: bool = False
    task: "asyncio.Task[None] | None" = None


class LiveCopies:
    """The copies of one site's tries. All methods belong to the event loop's thread."""

    def __init__(
        self, site: Site, observer: Observer, workdir: Path, notify: Callable[[str], None]
    ) -> None:
        """Make it.

        Args:
            site: where the jobs are.
            observer: hears when a copy has grown.
            workdir: the workflow's directory.
            notify: writes a line to the user's log.
        """
        self._site = site
        self._observer = observer
        self._workdir = workdir
        self._notify = notify
        self._copies: dict[str, _Copy] = {}
        self._turn = asyncio.Semaphore(REQUESTS)

    def follow(self, record: TryRecord, extras: JobExtras | None) -> None:
        """A try is about to be watched: go on with its copy, if an observer wants one."""
        if extras is None or extras.live is None:
            return
        copy = _Copy(self._workdir / extras.live.copy, extras)
        with suppress(OSError, ValueError):
            read, piece = (copy.place / POSITION).read_text().split()
            copy.read, copy.piece = int(read), int(piece)
        self._copies[record.id] = copy

    def grown(self, record: TryRecord, size: int) -> None:
        """The site shows that there are `size` bytes of packs of a try."""
        copy = self._copies.get(record.id)
        if copy is None or copy.over or size <= max(copy.read, copy.looked):
            return
        if copy.task is None or copy.task.done():
            copy.task = asyncio.create_task(self._read(record, copy, size))

    async def stop(self, record: TryRecord) -> None:
        """A try is not watched any more: nothing is written to its copy when this returns."""
        copy = self._copies.pop(record.id, None)
        if copy is not None and copy.task is not None:
            copy.over = True
            copy.task.cancel()
            await asyncio.gather(copy.task, return_exceptions=True)

    async def _read(self, record: TryRecord, copy: _Copy, size: int) -> None:
        try:
            async with self._turn:
                while copy.read < size and not copy.over:
                    if copy.read - copy.piece >= PIECE_BYTES:
                        copy.piece = copy.read
                    path = record.paths.piece(copy.piece)
                    content = await self._piece(path, size - copy.piece)
                    before = copy.read
                    await _to_its_end(partial(_take, copy, content))
                    if copy.read == before:
                        copy.looked = size
                        return
                    self._observer.logged(record)
        except SiteError:
            pass  # the next look tries again
        except (PackDamaged, OSError) as error:
            copy.over = True
            self._notify(
                f"{record.name}: what it logs comes when it is over, since it cannot be taken over"
                f" while it runs ({error})."
            )

    async def _piece(self, path: str, most: int) -> bytes:
        """The first bytes of a piece; `most` of them are told to be whole."""
        content = bytearray()
        # Both sites' are generators: one that is not read to its end has to be closed.
        chunks = cast(AsyncGenerator[bytes, None], self._site.get(path, size=most))
        async with aclosing(chunks):
            async for chunk in chunks:
                content += chunk
                if len(content) >= min(most, PIECE_BYTES + LONGEST_PACK):
                    break
        return bytes(content[:most])


async def _to_its_end(act: Callable[[], None]) -> None:
    """Do something in a thread; who waits for it is cancelled after it, not in the middle."""
    task = asyncio.create_task(asyncio.to_thread(act))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _take(copy: _Copy, content: bytes) -> None:
    """Put the packs that a copy does not have yet into it.

    Raises:
        PackDamaged: something is no pack, or does not fit what came before.
        OSError: it cannot be written here.
    """
    tree = copy.place / LIVE_TREE
    if not tree.exists():
        _begin(copy)
    for pack in read_packs(content[copy.read - copy.piece :]):
        copy.written += sum(len(file.content) for file in pack.files)
        if copy.written > MAX_LIVE_BYTES:
            raise PackDamaged(f"it is more than {MAX_LIVE_BYTES >> 30} GiB")
        _unpack(copy.place, pack)
        copy.read += pack.size
        new = copy.place / f".{POSITION}"
        new.write_text(f"{copy.read} {copy.piece}\n")
        new.rename(copy.place / POSITION)


def _begin(copy: _Copy) -> None:
    """What the job started with is part of the copy, and nothing else."""
    if copy.read:
        raise PackDamaged("the copy here is gone")
    shutil.rmtree(copy.place, ignore_errors=True)
    copy.place.mkdir(parents=True)
    new = copy.place / f".{LIVE_TREE}"
    copy.extras.lay_out(new)
    new.rename(copy.place / LIVE_TREE)


def _unpack(place: Path, pack: Pack) -> None:
    later = _later(place)
    for file in pack.files:
        _write(place, file)
    known = later | {path.as_posix() for path in pack.later}
    known -= {file.path.as_posix() for file in pack.files}
    if known != later:
        new = place / f".{LIVE_LATER}"
        new.write_text("\0".join(sorted(known)), encoding="utf-8", errors="surrogateescape")
        new.rename(place / LIVE_LATER)


def _later(place: Path) -> set[str]:
    """The paths below a copy's tree that are not here in whole, or not as they are now."""
    try:
        text = (place / LIVE_LATER).read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return set()
    return set(text.split("\0")) - {""}


def _write(place: Path, file: Packed) -> None:
    path = place / LIVE_TREE / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.start is None:
        new = place / ".part"
        new.write_bytes(file.content)
        # Another process may be reading the old one.
        new.rename(path)
        return
    with path.open("r+b" if path.exists() else "xb") as grown:
        if grown.seek(0, os.SEEK_END) < file.start:
            raise PackDamaged(f"something of {file.path} did not come")
        grown.seek(file.start)
        grown.write(file.content)
        grown.truncate()  # the job has begun it anew
