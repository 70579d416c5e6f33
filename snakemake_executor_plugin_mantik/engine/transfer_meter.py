"""Measure the transfers that are under way, for people who watch a run."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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
    moved: int
    rate: float | None


class Transfer:
    """A transfer that is under way. Belongs to one thread."""

    def __init__(
        self,
        direction: Direction,
        site: str,
        what: str,
        size: int,
        clock: Callable[[], float],
    ) -> None:
        self._direction, self._site, self._what, self._size = direction, site, what, size
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
        return TransferView(
            self._direction, self._site, self._what, self._size, min(moved, self._size), rate
        )


class TransferMeter:
    """The transfers of a run that are under way. Any thread may call its methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active: dict[int, Transfer] = {}

    @contextmanager
    def measure(
        self, direction: Direction, site: str, what: str, size: int, moved: int = 0
    ) -> Iterator[Transfer]:
        """Measure a transfer of `size` bytes, `moved` of which have arrived already."""
        transfer = Transfer(direction, site, what, size, self._clock)
        transfer.arrived(moved)
        with self._lock:
            self._active[id(transfer)] = transfer
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
