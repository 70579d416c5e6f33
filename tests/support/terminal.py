"""A process that somebody sits before, at a terminal."""

import fcntl
import os
import pty
import subprocess
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyte

from tests.support.workflows import WAIT_S


class Terminal:
    """A process that somebody sits before."""

    def __init__(self, command: Sequence[str], *, columns: int = 0, **places: Any) -> None:
        self._size = columns or 80, 24
        self._ours, theirs = pty.openpty()
        if columns:
            termios.tcsetwinsize(theirs, (24, columns))
        self.process = subprocess.Popen(
            command,
            **places,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(theirs)
        self._seen = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # that is how a terminal ends
            while part := os.read(self._ours, 4096):
                self._seen += part

    @property
    def output(self) -> str:
        return self._seen.decode(errors="replace")

    @property
    def screen(self) -> list[str]:
        """The lines that a person can see, and can scroll back to."""
        columns, rows = self._size
        screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=1)
        pyte.Stream(screen).feed(self.output)
        past = ["".join(line[i].data for i in range(columns)) for line in screen.history.top]
        return [line.rstrip() for line in [*past, *screen.display]]

    @property
    def modes(self) -> list[object]:
        """Whether it echoes, waits for whole lines, and so on."""
        return termios.tcgetattr(self._ours)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert "Traceback" not in self.output, self.output
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        os.close(self._ours)
