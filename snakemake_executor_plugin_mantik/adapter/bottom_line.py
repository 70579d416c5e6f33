"""Keep one line at the bottom of a terminal, below all that this process writes there.

The line is erased before each write of Python's to the terminal and drawn again after it. The
cursor stays at its end, visible, and no mode of the terminal changes: whatever kills this process
leaves the terminal usable. Output of child processes goes to the terminal directly, so the caller
hides the line while such children run.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TextIO

_ERASE: Final = "\r\x1b[2K"
"""Moves the cursor to the first column and erases its line."""
_DRAW_S: Final = 1.0
"""Seconds between two drawings."""
_TURN_S: Final = 0.5
"""Most seconds that a signal handler waits for another thread that draws the line."""


class BottomLine:
    """One line at the bottom of a terminal."""

    def __init__(
        self, terminal: TextIO, text: Callable[[int], str], refresh: Callable[[], None]
    ) -> None:
        """Prepare.

        Args:
            terminal: a stream to it.
            text: returns at once the line for a width in columns, or '' to hide it.
            refresh: called every second, in a thread of its own, before the line is drawn anew.
        """
        self._terminal = terminal
        self._text = text
        self._refresh = refresh
        self._lock = threading.RLock()
        self._shown = False
        self._fresh = True  # whether the cursor is where a line begins
        self._paused = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw_often, name="mantik-line", daemon=True)
        self._replaced: list[tuple[Any, str, TextIO]] = []

    def open(self, handlers: Iterable[logging.Handler]) -> None:
        """Show the line from now on; take over standard output and error and handlers' streams."""
        places = [(sys, "stdout"), (sys, "stderr"), *((handler, "stream") for handler in handlers)]
        wrapped: dict[int, _Wrapped] = {}
        for owner, name in places:
            stream = getattr(owner, name, None)
            if stream is not None and _is_terminal(stream):
                self._replaced.append((owner, name, stream))
                setattr(owner, name, wrapped.setdefault(id(stream), _Wrapped(stream, self)))
        atexit.register(self.close)  # no thread may write while the interpreter ends
        self._thread.start()

    def close(self) -> None:
        """Remove the line for good, and give the streams back."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        with self._lock:
            self._erase()
        for owner, name, stream in self._replaced:
            if isinstance(getattr(owner, name, None), _Wrapped):
                setattr(owner, name, stream)
        atexit.unregister(self.close)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the line. For signal handlers, which may interrupt a write to the terminal."""
        before, self._paused = self._paused, True
        # This thread may hold a lock of the stream that the drawing thread waits for.
        taken = self._lock.acquire(timeout=_TURN_S)
        try:
            if self._shown:
                self._shown = False
                with suppress(OSError, ValueError):  # there is no terminal any more
                    os.write(self._terminal.fileno(), _ERASE.encode())
        finally:
            if taken:
                self._lock.release()
        try:
            yield
        finally:
            self._paused = before

    def write(self, stream: TextIO, text: str) -> int:
        """Write to a stream that leads to the terminal, above the line."""
        with self._lock:
            self._erase()
            if text:
                self._fresh = text.endswith("\n")
            return stream.write(text)

    def flush(self, stream: TextIO) -> None:
        """Flush a stream that leads to the terminal, and draw the line again."""
        with self._lock:
            stream.flush()
            self._draw()

    def _erase(self) -> None:
        if self._shown:
            self._shown = False
            self._put(_ERASE)

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):  # there is no terminal any more
            self._terminal.write(text)
            self._terminal.flush()

    def _draw(self) -> None:
        if self._paused or not self._fresh or self._over.is_set() or not self._is_ours():
            return
        try:
            width = os.get_terminal_size(self._terminal.fileno()).columns
        except (OSError, ValueError):
            return
        # In the last column, some terminals begin another line.
        text = self._text(width - 1) if width > 1 else ""
        if text or self._shown:
            self._put(_ERASE + text)
            self._shown = bool(text)

    def _draw_often(self) -> None:
        while not self._over.wait(_DRAW_S):
            self._refresh()
            with self._lock:
                self._draw()

    def _is_ours(self) -> bool:
        """Return whether this process is in the foreground, so that nobody else writes there."""
        try:
            return os.tcgetpgrp(self._terminal.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return False


class _Wrapped:
    """A stream to the terminal that writes above the line."""

    def __init__(self, stream: TextIO, line: BottomLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        return self._line.write(self._stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._line.flush(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
