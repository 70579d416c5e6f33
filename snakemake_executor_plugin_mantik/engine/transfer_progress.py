"""Lines in the user's log about files on their way to a site."""

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

from snakemake_executor_plugin_mantik.common.humanize import humanize_duration, humanize_size
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


class TransferProgress:
    """Reports a transfer of files, all of this machine or all of one other place."""

    def __init__(
        self, files: Sequence[LocalFile], site: str, notify: Callable[[str], None], way: Way
    ) -> None:
        """Make it; `way` is that of files of another place."""
        self._size = sum(file.size for file in files)
        more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        what = display_path(max(files, key=lambda file: file.size).path) if files else ""
        moved = any(file.stored for file in files)
        self._what = f"{'Moving' if moved else 'Sending'} {what}{more}"
        self._to = f"to site {site}"
        self._way = f", {way}" if moved else ""
        reported = moved or self._size >= _REPORTED_BYTES
        self._notify = notify if reported else lambda _: None
        self._clock = asyncio.get_running_loop().time
        self._began = self._next = 0.0
        self._from = 0.0

    def begin(self, share: float = 0.0) -> None:
        """Report the beginning; `share` is what an earlier attempt has moved, from 0 to 1."""
        self._began, self._from = self._clock(), share
        self._next = self._began + _REPORT_S
        there = f"; {share:.0%} of it is there already" if share else ""
        self._notify(f"{self._what} ({humanize_size(self._size)}) {self._to}{self._way}{there}.")

    def report(self, share: float) -> None:
        """Report how much has been moved, from 0 to 1, if it is time to."""
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
