"""Download what jobs write to an observer's directories while they run (`jobs/bash/live.sh`).

The watcher's listing shows how much there is; only new bytes are requested. A local copy of each
directory grows, and the observer is notified. Nothing depends on the copy: all of the directory is
downloaded when the job is over, and an error here stops only the copy.
"""

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..common.errors import SiteError
from ..jobs.packs import LONGEST_PACK, PIECE_BYTES, Pack, Packed, TarDamaged, read_packs
from ..journal import AttemptRecord
from ..sites.base import Site
from ..staging.transfers import read_file
from .observer import JobExtras, Observer

REQUESTS = 2
"""Most simultaneous requests: the others are for jobs that begin and end."""
MAX_LIVE_BYTES = 4 << 30
"""Most bytes that are written to a copy; beyond that, it stops growing until the job's end."""

LIVE_TREE, LIVE_LATER, POSITION = "tree", "later", "position"
"""Names in a copy's directory: the files of the job's directory; the paths, separated by NUL, that
are missing or outdated in the copy; and how much of the job's packs the copy contains."""


@dataclass
class _Copy:
    """The copy of one attempt's directory.

    Attributes:
        place: its local path.
        extras: the directory's content at the job's start.
        read: bytes of the packs that it contains.
        piece: offset of the piece that contains the next bytes.
        looked: size of the packs when no whole one could be read.
        written: bytes that were written to it.
        over: whether reading has stopped.
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
    """The copies of one site's attempts. Call all methods from the event loop's thread."""

    def __init__(
        self, site: Site, observer: Observer, workdir: Path, notify: Callable[[str], None]
    ) -> None:
        self._site = site
        self._observer = observer
        self._workdir = workdir
        self._notify = notify
        self._copies: dict[str, _Copy] = {}
        self._turn = asyncio.Semaphore(REQUESTS)

    def follow(self, record: AttemptRecord, extras: JobExtras | None) -> None:
        """Continue or begin the copy of an attempt that is about to be watched, if requested."""
        if extras is None or extras.live is None:
            return
        copy = _Copy(self._workdir / extras.live.copy, extras)
        with suppress(OSError, ValueError):
            read, piece = (copy.place / POSITION).read_text().split()
            copy.read, copy.piece = int(read), int(piece)
        self._copies[record.id] = copy

    def grown(self, record: AttemptRecord, size: int) -> None:
        """Read new packs of an attempt, of which the site shows `size` bytes."""
        copy = self._copies.get(record.id)
        if copy is None or copy.over or size <= max(copy.read, copy.looked):
            return
        if copy.task is None or copy.task.done():
            copy.task = asyncio.create_task(self._read(record, copy, size))

    async def stop(self, record: AttemptRecord) -> None:
        """Stop the copy of an attempt; nothing is written to it after this returns."""
        copy = self._copies.pop(record.id, None)
        if copy is not None and copy.task is not None:
            copy.over = True
            copy.task.cancel()
            await asyncio.gather(copy.task, return_exceptions=True)

    async def _read(self, record: AttemptRecord, copy: _Copy, size: int) -> None:
        try:
            async with self._turn:
                while copy.read < size and not copy.over:
                    if copy.read - copy.piece >= PIECE_BYTES:
                        copy.piece = copy.read
                    path = record.paths.piece(copy.piece)
                    most = size - copy.piece  # which the listing showed
                    content = await read_file(
                        self._site, path, min(most, PIECE_BYTES + LONGEST_PACK), size=most
                    )
                    before = copy.read
                    await _to_its_end(partial(_take, copy, content))
                    if copy.read == before:
                        copy.looked = size
                        return
                    self._observer.logged(record)
        except SiteError:
            pass  # the next listing tries again
        except (TarDamaged, OSError) as error:
            copy.over = True
            self._notify(
                f"{record.name}: its logged files are fetched when it is over, since they cannot be"
                f" fetched while it runs ({error})."
            )


async def _to_its_end(act: Callable[[], None]) -> None:
    """Call `act` in a thread; delay a cancellation until it has returned."""
    task = asyncio.create_task(asyncio.to_thread(act))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _take(copy: _Copy, content: bytes) -> None:
    """Add to a copy those packs in `content` that it lacks.

    Raises:
        TarDamaged: something is no pack, or does not fit the packs before it.
        OSError: the copy cannot be written.
    """
    tree = copy.place / LIVE_TREE
    if not tree.exists():
        _begin(copy)
    for pack in read_packs(content[copy.read - copy.piece :]):
        copy.written += sum(len(file.content) for file in pack.files)
        if copy.written > MAX_LIVE_BYTES:
            raise TarDamaged(f"it is more than {MAX_LIVE_BYTES >> 30} GiB")
        _unpack(copy.place, pack)
        copy.read += pack.size
        new = copy.place / f".{POSITION}"
        new.write_text(f"{copy.read} {copy.piece}\n")
        new.rename(copy.place / POSITION)


def _begin(copy: _Copy) -> None:
    """Make a copy with the files that the job started with.

    Raises:
        TarDamaged: there was a copy, which has been removed here.
    """
    if copy.read:
        raise TarDamaged("the copy here is gone")
    shutil.rmtree(copy.place, ignore_errors=True)
    copy.place.mkdir(parents=True)
    new = copy.place / f".{LIVE_TREE}"
    copy.extras.lay_out(new)
    new.rename(copy.place / LIVE_TREE)


def _unpack(place: Path, pack: Pack) -> None:
    for file in pack.files:
        _write(place, file)
    later = set[str]()
    with suppress(FileNotFoundError):
        text = (place / LIVE_LATER).read_text(encoding="utf-8", errors="surrogateescape")
        later = set(text.split("\0")) - {""}
    known = later | {path.as_posix() for path in pack.later}
    known -= {file.path.as_posix() for file in pack.files}
    if known != later:
        new = place / f".{LIVE_LATER}"
        new.write_text("\0".join(sorted(known)), encoding="utf-8", errors="surrogateescape")
        new.rename(place / LIVE_LATER)


def _write(place: Path, file: Packed) -> None:
    path = place / LIVE_TREE / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.start is None:
        new = place / ".part"
        new.write_bytes(file.content)
        # Another process may be reading the old file.
        new.rename(path)
        return
    with path.open("r+b" if path.exists() else "xb") as grown:
        if grown.seek(0, os.SEEK_END) < file.start:
            raise TarDamaged(f"a part of {file.path} is missing")
        grown.seek(file.start)
        grown.write(file.content)
        grown.truncate()  # the job may have started the file again
