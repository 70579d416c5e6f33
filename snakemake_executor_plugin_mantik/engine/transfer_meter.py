"""Measure the transfers that are under way, report them, and publish them for smk-mantik watch."""

import asyncio
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)
from snakemake_executor_plugin_mantik.common.state_directory import open_private
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.staging.local import LocalFile

_WINDOW_S: Final = 15.0
"""Seconds that a rate is the mean of."""


class Direction(StrEnum):
    """Where the bytes of a transfer go.

    UPLOAD: from this machine to a site. DOWNLOAD: from a site to this machine. MOVE: from one site
    to another through this machine. IMPORT: from one site's server to another's.
    """

    UPLOAD = "upload"
    DOWNLOAD = "download"
    MOVE = "move"
    IMPORT = "import"


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
        self._samples: deque[tuple[float, int]] = deque()

    def arrived(self, moved: int) -> None:
        """Note how many bytes have arrived in all; the first time, before it begins."""
        now = self._clock()
        samples = self._samples
        while len(samples) > 2 and samples[1][0] <= now - _WINDOW_S:
            samples.popleft()
        if len(samples) > 1 and now - samples[-2][0] < _WINDOW_S / 50:
            samples.pop()  # so that fast ones have few
        samples.append((now, moved))

    def view(self) -> TransferView:
        """Return what it is now. Any thread may call this method."""
        samples = tuple(self._samples)
        moved = samples[-1][1] if samples else 0
        rate = None
        if len(samples) > 1 and moved > samples[0][1]:
            rate = (moved - samples[0][1]) / max(self._clock() - samples[0][0], 1e-3)
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
        transfer = Transfer(TransferView(direction, site, what, size), self._clock)
        transfer.arrived(moved)
        with self._lock:
            self._active[id(transfer)] = transfer
        self._on_begin()
        try:
            yield transfer
        finally:
            with self._lock:
                del self._active[id(transfer)]

    def views(self) -> list[TransferView]:
        """Return the transfers that are under way, the oldest first."""
        with self._lock:
            found = [transfer.view() for transfer in self._active.values()]
        return [view for view in found if view.size]


_REPORTED_BYTES: Final = 64 << 20
"""Size from which an upload from this machine is reported; files of other places always are."""
_REPORT_S: Final = 30.0
"""Time between two lines about one transfer."""


WAYS: Final = {
    Direction.MOVE: "through this machine",
    Direction.IMPORT: "from server to server",
}
"""How files of another place come to a site, for messages."""


class TransferProgress(ExitStack):
    """Reports a transfer of files, all of this machine or all of one other place.

    Use it as a context, which is as long as the transfer.
    """

    def __init__(
        self,
        files: Sequence[LocalFile],
        site: str,
        notify: Callable[[str], None],
        meter: TransferMeter,
        way: Direction,
    ) -> None:
        """Make it; `way` is that of files of another place."""
        super().__init__()
        self._size = sum(file.size for file in files)
        more = f" and {humanize_count(len(files) - 1, 'more file')}" if len(files) > 1 else ""
        largest = display_path(max(files, key=lambda file: file.size).path) if files else ""
        moved = any(file.stored for file in files)
        self._name = f"{largest}{more}"
        self._what = f"{'Moving' if moved else 'Sending'} {self._name}"
        self._site = site
        self._to = f"to site {site}"
        self._way = f", {WAYS[way]}" if moved else ""
        self._direction = way if moved else Direction.UPLOAD
        self._meter = meter
        self._transfer: Transfer | None = None
        reported = moved or self._size >= _REPORTED_BYTES
        self._notify = notify if reported else lambda _: None
        self._clock = asyncio.get_running_loop().time
        self._began = self._next = 0.0
        self._from = 0.0

    def begin(self, share: float = 0.0) -> None:
        """Report the beginning; `share` is what an earlier attempt has moved, from 0 to 1."""
        moved = round(share * self._size)
        measured = self._meter.measure(self._direction, self._site, self._name, self._size, moved)
        self._transfer = self.enter_context(measured)
        self._began, self._from = self._clock(), share
        self._next = self._began + _REPORT_S
        there = f"; {share:.0%} of it is there already" if share else ""
        self._notify(f"{self._what} ({humanize_size(self._size)}) {self._to}{self._way}{there}.")

    def report(self, share: float) -> None:
        """Report how much has been moved, from 0 to 1; in the log, if it is time to."""
        if self._transfer is not None:
            self._transfer.arrived(round(share * self._size))
        now = self._clock()
        if now < self._next or share <= self._from:
            return
        self._next = now + _REPORT_S
        rate = (share - self._from) / (now - self._began)
        left = humanize_duration((1 - share) / rate)
        self._notify(
            f"{self._what} {self._to}: {share:.0%} of {humanize_size(self._size)},"
            f" {humanize_size(rate * self._size)}/s, about {left} left."
        )


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
