"""Report files on their way to a site: lines in the user's log, and the meter of transfers."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)
from snakemake_executor_plugin_mantik.engine.transfer_meter import (
    Direction,
    Transfer,
    TransferMeter,
)
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.staging.local import LocalFile

_REPORTED_BYTES: Final = 64 << 20
"""Size from which an upload from this machine is reported; files of other places always are."""
_REPORT_S: Final = 30.0
"""Time between two lines about one transfer."""


class Way(StrEnum):
    """How files of another place come to a site."""

    STREAM = "through this machine"
    IMPORT = "from server to server"


_DIRECTIONS: Final = {Way.STREAM: Direction.MOVE, Way.IMPORT: Direction.IMPORT}


class TransferProgress:
    """Reports a transfer of files, all of this machine or all of one other place.

    Use it as a context, which is as long as the transfer.
    """

    def __init__(
        self,
        files: Sequence[LocalFile],
        site: str,
        notify: Callable[[str], None],
        meter: TransferMeter,
        way: Way,
    ) -> None:
        """Make it; `way` is that of files of another place."""
        self._size = sum(file.size for file in files)
        more = f" and {humanize_count(len(files) - 1, 'more file')}" if len(files) > 1 else ""
        largest = display_path(max(files, key=lambda file: file.size).path) if files else ""
        moved = any(file.stored for file in files)
        self._name = f"{largest}{more}"
        self._what = f"{'Moving' if moved else 'Sending'} {self._name}"
        self._site = site
        self._to = f"to site {site}"
        self._way = f", {way}" if moved else ""
        self._direction = _DIRECTIONS[way] if moved else Direction.UPLOAD
        self._meter = meter
        self._stack = ExitStack()
        self._transfer: Transfer | None = None
        reported = moved or self._size >= _REPORTED_BYTES
        self._notify = notify if reported else lambda _: None
        self._clock = asyncio.get_running_loop().time
        self._began = self._next = 0.0
        self._from = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def begin(self, share: float = 0.0) -> None:
        """Report the beginning; `share` is what an earlier attempt has moved, from 0 to 1."""
        moved = round(share * self._size)
        measured = self._meter.measure(self._direction, self._site, self._name, self._size, moved)
        self._transfer = self._stack.enter_context(measured)
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
