"""Measure the transfers that are under way, report them, and publish them for smk-mantik watch."""

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..common.state_directory import open_private
from ..jobs.paths import display_path
from ..staging.local import LocalFile

_WINDOW_S: Final = 7.5
"""Least seconds that a rate is the mean of; mostly twice as many at most."""
_REPORTED_BYTES: Final = 64 << 20
"""Size from which an upload from this machine is reported; files of other places always are."""
_REPORT_S: Final = 30.0
"""Time between two lines about one transfer."""


class Direction(StrEnum):
    """Where the bytes of a transfer go.

    UPLOAD: from this machine to a site. DOWNLOAD: from a site to this machine. MOVE: from one site
    to another through this machine. IMPORT: from one site's server to another's.
    """

    UPLOAD = "upload"
    DOWNLOAD = "download"
    MOVE = "move"
    IMPORT = "import"


WAYS: Final = {
    Direction.MOVE: "through this machine",
    Direction.IMPORT: "from server to server",
}
"""How files of another place come to a site, for messages."""


@dataclass(frozen=True)
class TransferView:
    """A transfer as it is now.

    Attributes:
        site: the site that the bytes go to; for a download, the one that they come from.
        what: the file, and how many others, for people.
        size, moved: bytes in all, and those that have arrived.
        rate: bytes per second of late; None if nothing has arrived yet.
    """

    direction: Direction
    site: str
    what: str
    size: int
    moved: int = 0
    rate: float | None = None


class Transfer:
    """A transfer that is under way. Belongs to one thread."""

    def __init__(self, begun: TransferView, clock: Callable[[], float]) -> None:
        self._begun = begun
        self._clock = clock
        self._moved = begun.moved
        # When the mean begins, and the next one; with each, what had arrived.
        self._marks = [(clock(), begun.moved)] * 2

    def arrived(self, moved: int) -> None:
        """Note how many bytes have arrived in all; the first time, before it begins."""
        now = self._clock()
        self._moved = moved
        if now - self._marks[1][0] >= _WINDOW_S:
            self._marks = [self._marks[1], (now, moved)]

    def view(self) -> TransferView:
        """Return what it is now. Any thread may call this method."""
        moved, (since, before) = self._moved, self._marks[0]
        rate = (moved - before) / max(self._clock() - since, 1e-3) if moved > before else None
        return replace(self._begun, moved=min(moved, self._begun.size), rate=rate)


class TransferMeter:
    """The transfers of a run that are under way. Any thread may call its methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active: dict[int, Transfer] = {}
        self._on_begin: Callable[[], object] = lambda: None

    def on_begin(self, act: Callable[[], object]) -> None:
        """Register `act` to be called when a transfer begins, in its thread."""
        self._on_begin = act

    @contextmanager
    def measure(
        self, direction: Direction, site: str, what: str, size: int, moved: int = 0
    ) -> Iterator[Transfer]:
        """Measure a transfer of `size` bytes, `moved` of which have arrived already."""
        transfer = Transfer(TransferView(direction, site, what, size, moved), self._clock)
        with self._lock:
            self._active[id(transfer)] = transfer
        self._on_begin()
        try:
            yield transfer
        finally:
            with self._lock:
                del self._active[id(transfer)]

    @contextmanager
    def report(
        self,
        files: Sequence[LocalFile],
        site: str,
        way: Direction,
        notify: Callable[[str], None],
        share: float = 0.0,
    ) -> Iterator[Callable[[float], None]]:
        """Measure and report the transfer of files, all of this machine or all of one other place.

        `way` is that of files of another place, `share` what an earlier attempt has moved, from 0
        to 1. The context takes what has been moved, now and then, and ends with the transfer.
        """
        size = sum(file.size for file in files)
        more = f" and {humanize_count(len(files) - 1, 'more file')}" if len(files) > 1 else ""
        largest = display_path(max(files, key=lambda file: file.size).path) if files else ""
        moved = any(file.stored for file in files)
        what = f"{'Moving' if moved else 'Sending'} {largest}{more}"
        clock = asyncio.get_running_loop().time
        due = clock() + _REPORT_S if moved or size >= _REPORTED_BYTES else math.inf
        if due < math.inf:
            by = f", {WAYS[way]}" if moved else ""
            there = f"; {share:.0%} of it is there already" if share else ""
            notify(f"{what} ({humanize_size(size)}) to site {site}{by}{there}.")

        def arrived(share: float) -> None:
            nonlocal due
            transfer.arrived(round(share * size))
            rate = transfer.view().rate if clock() >= due else None
            if rate is not None:
                due = clock() + _REPORT_S
                left = humanize_duration((1 - share) * size / rate)
                notify(
                    f"{what} to site {site}: {share:.0%} of {humanize_size(size)},"
                    f" {humanize_size(rate)}/s, about {left} left."
                )

        direction = way if moved else Direction.UPLOAD
        begun = round(share * size)
        with self.measure(direction, site, f"{largest}{more}", size, begun) as transfer:
            yield arrived

    def views(self) -> list[TransferView]:
        """Return the transfers that are under way, the oldest first."""
        with self._lock:
            found = [transfer.view() for transfer in self._active.values()]
        return [view for view in found if view.size]


_NAME: Final = "transfers.json"
_WRITE_S: Final = 2.0
"""Seconds between two versions of the file; it exists only while something is under way."""
_STALE_S: Final = 10.0
"""Age from which the file was left by a controller that was killed, or that hangs."""


async def publish_transfers(meter: TransferMeter, state: Path) -> None:
    """Keep the file up to date until cancelled; `state` is the state directory."""
    path, loop, to_show = state / _NAME, asyncio.get_running_loop(), asyncio.Event()
    to_show.set()  # one may have begun
    meter.on_begin(lambda: loop.call_soon_threadsafe(to_show.set))
    try:
        while True:
            await to_show.wait()
            await asyncio.sleep(_WRITE_S)
            to_show.clear()
            if views := meter.views():
                to_show.set()
                await asyncio.to_thread(_write, path, views)
            else:
                path.unlink(missing_ok=True)
    finally:
        meter.on_begin(lambda: None)
        path.unlink(missing_ok=True)


def _write(path: Path, views: list[TransferView]) -> None:
    """Replace the file. A full disk is reported by the journal."""
    text = json.dumps({"at": time.time(), "transfers": [asdict(view) for view in views]})
    draft = path.with_suffix(".new")
    with suppress(OSError):
        with open_private(draft, "wb") as file:
            file.write(text.encode())
        os.replace(draft, path)


def read_transfers(state: Path) -> list[TransferView]:
    """Return the transfers of the controller that runs; none without one."""
    try:
        found: Any = json.loads((state / _NAME).read_bytes())
        if abs(time.time() - found["at"]) > _STALE_S:
            return []
        return [
            TransferView(**{**each, "direction": Direction(each["direction"])})
            for each in found["transfers"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # there is none, or another version wrote it
