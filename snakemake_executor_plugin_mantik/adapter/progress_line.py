"""Show how far a run is, in one line below Snakemake's log on a terminal."""

import atexit
import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from snakemake.settings.enums import Quietness

from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..engine.transfer_meter import TransferMeter, TransferView

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
        with suppress(OSError, ValueError):
            return os.tcgetpgrp(self._terminal.fileno()) == os.getpgrp()
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
    with suppress(AttributeError, ValueError):
        return bool(stream.isatty())
    return False


_VERBS: Final = {
    "upload": "uploading", "download": "downloading", "move": "moving", "import": "importing",
}  # fmt: skip
"""For each direction of a transfer (`engine.transfer_meter.Direction`)."""


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    Attributes:
        done, total, failed: numbers of jobs, local ones among them.
        states: numbers of jobs by what they do: running, queued, staging.
        transfers: what is under way.
    """

    done: int
    total: int
    failed: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    transfers: Sequence[TransferView] = ()


def describe_progress(progress: RunProgress, width: int) -> str:
    """Return one line of at most `width` characters; what matters least is left out first."""
    jobs = [f"{progress.done} of {humanize_count(progress.total, 'job')} done"]
    if progress.failed:
        jobs.append(f"{progress.failed} failed")
    jobs += [f"{number} {state}" for state, number in progress.states.items() if number]
    short = [f"{progress.done}/{progress.total} done", *jobs[1:]]
    forms = [(jobs, 3), (jobs, 2), (short, 2), (short, 1)]
    forms += [(short[:number], 0) for number in range(len(short), 0, -1)]
    lines = [
        " | ".join(filter(None, [", ".join(words), _transfers(progress.transfers, detail)]))
        for words, detail in forms
    ]
    return next((line for line in lines if len(line) <= width), lines[-1][:width])


def _transfers(transfers: Iterable[TransferView], detail: int) -> str:
    """Return the sums of transfers in each direction.

    `detail` is 1 for the share that has come, 2 for size and rate, too, 3 for the time left; with 0
    return ''.
    """
    found: defaultdict[str, list[TransferView]] = defaultdict(list)
    for transfer in transfers:
        found[_VERBS[transfer.direction]].append(transfer)
    words = []
    for verb, views in found.items() if detail else ():
        size, moved = sum(view.size for view in views), sum(view.moved for view in views)
        rate = sum(view.rate or 0.0 for view in views)
        share = humanize_size(moved) if detail == 3 else f"{moved / size:.0%}"
        text = f"{verb} {share}" if detail == 1 else f"{verb} {share} of {humanize_size(size)}"
        if rate and detail > 1:
            text += f", {humanize_size(rate)}/s"
        if rate and detail == 3:
            text += f", {humanize_duration((size - moved) / rate)} left"
        words.append(text)
    return "; ".join(words)


def open_progress_line(
    workflow: Any,
    logger: logging.Logger,
    count: Callable[[], Mapping[str, int]],
    meter: TransferMeter,
) -> BottomLine | None:
    """Show a run's progress, where Snakemake logs to a terminal; return None where it does not.

    Also return None with `--quiet`, and for terminals that cannot erase. `count` returns
    `RunProgress.states`.
    """
    quiet = {*(workflow.output_settings.quiet or ())} & {Quietness.PROGRESS, Quietness.ALL}
    # A logger plugin that writes to the terminal may have a progress bar of its own.
    handlers = [each for each in logger.handlers if each.name == "DefaultStreamHandler"]
    terminal: TextIO | None = getattr(handlers[0], "stream", None) if handlers else None
    dumb = os.environ.get("TERM", "dumb") == "dumb"
    if quiet or dumb or terminal is None or not terminal.isatty():
        return None

    def look() -> RunProgress:
        scheduler = workflow.scheduler
        return RunProgress(
            done=scheduler.finished_jobs if scheduler is not None else 0,
            total=len(workflow.dag),
            failed=len(scheduler.failed) if scheduler is not None else 0,
            states=count(),
            transfers=meter.views(),
        )

    seen = look()

    def refresh() -> None:
        nonlocal seen
        seen = look()

    def text(width: int) -> str:
        scheduler = workflow.scheduler
        # Children of local jobs write to the terminal themselves.
        if scheduler is not None and any(job.is_local for job in tuple(scheduler.running)):
            return ""
        return describe_progress(seen, width)

    line = BottomLine(terminal, text, refresh)
    line.open(handlers)
    return line
