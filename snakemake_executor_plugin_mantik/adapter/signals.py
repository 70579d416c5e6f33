"""Handle Ctrl-C, a shutdown and a lost connection while jobs are submitted or running.

Snakemake itself would cancel all jobs after Ctrl-C, wait for the running ones after SIGTERM, and
not handle SIGHUP. A job that waited a day in a queue is worth a question, so Ctrl-C at a terminal
asks the user. A lost connection or a shutdown (SIGHUP, SIGTERM) leaves the jobs running, and the
next run takes them up.
"""

import asyncio
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import Any

from ..common.errors import JournalError

CHOICES = ("ask", "cancel", "detach")

DETACHED = "Detached: the jobs go on at their sites; start again to reattach them."

NO_SPACE = (
    "Nothing can be written on this machine any more (is the disk full?). The jobs go on at their"
    " sites. Free space and start again to reattach them."
)

FAILED_HERE = (
    "Snakemake ends because of an error on this machine, which it reports below. The jobs at the"
    " sites go on. Correct the error and start again to reattach them; or type smk-mantik cancel to"
    " end them."
)

_QUESTION = (
    "\nInterrupted. What should happen to the jobs at the sites?\n"
    "  c  cancel them and end (Ctrl-C again: end at once, without waiting for confirmation)\n"
    "  d  leave them running and end (detach); the next run reattaches them\n"
    "  g  go on with this run\n"
    "Your choice [c/d/g]: "
)
_GOING_ON = "Going on.\n"
_LONGEST_ANSWER = 100
_RECORDS = "_finish_jobs"
"""The method in which Snakemake's scheduler records the outputs of jobs that have succeeded."""
_LOOK_S = 0.02
"""Seconds between two looks whether it still does."""


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error or its cause means that nothing can be written on this machine."""
    while error is not None:
        if isinstance(error, JournalError):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _end_silently() -> None:
    """Keep asyncio from printing a traceback for a task of Snakemake's that our exit ends."""
    with suppress(RuntimeError):  # no event loop runs in this thread just now
        asyncio.get_running_loop().set_exception_handler(_without_exits)


def _without_exits(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), SystemExit | KeyboardInterrupt):
        loop.default_exception_handler(context)


def _open_terminal() -> int:
    return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)


def _write_to_terminal(text: str) -> None:
    with suppress(OSError):  # there is no terminal any more
        terminal = _open_terminal()
        try:
            os.write(terminal, text.encode())
        finally:
            os.close(terminal)


def _is_recording(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _RECORDS:
            return True
        frame = frame.f_back
    return False


_PROGRAM = ("<module>", "_run_module_as_main")
"""Names of the outermost function of a program: of a script, or of `python -m`."""


def _end(number: int, frame: FrameType | None) -> None:
    """End the process after the run: while the interpreter shuts down, it would show an error."""
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is None or frame.f_code.co_name not in _PROGRAM:  # none of its code runs any more
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(128 + number)
    raise SystemExit(128 + number)


def _send_later(number: int) -> None:
    """Send the main thread a signal once Snakemake has recorded what has succeeded."""
    main = threading.main_thread().ident or 0

    def send() -> None:
        while _is_recording(sys._current_frames().get(main)):
            time.sleep(_LOOK_S)
        signal.pthread_kill(main, number)

    threading.Thread(target=send, daemon=True).start()


class Interruption:
    """Handles the signals that end a run. Belongs to the main thread.

    A signal waits while Snakemake records outputs. Ended there, it would have recorded some members
    of a group, and the next run would ask for the others, which would run again.

    Its handlers do not log: they may interrupt the main thread in the middle of writing to the log,
    and Python refuses a second write to the same stream there.

    Attributes:
        detached: whether to leave the jobs running.
        at_once: whether to end without waiting for the confirmation of cancelled jobs.
        undisturbed: returns a context in which nothing else is drawn on the terminal.
    """

    def __init__(self, choice: str) -> None:
        """Set what Ctrl-C does: one of `CHOICES`. Without a terminal, `ask` means `cancel`."""
        self._choice = choice
        self._cancelling = False
        self.detached = False
        self.at_once = False
        self.undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext

    def handle(self) -> None:
        """Install the signal handlers. In another thread than the main one, do nothing.

        Snakemake sets its own handler for SIGTERM after it has created the executor. That handler
        would wait for all running jobs. So the executor calls this method for each job.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._detach)
        # A caller that ignores SIGINT (nohup, a background job of a script) does so on purpose.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)

    def over(self) -> None:
        """End the process quietly at a signal from now on: no job is left to ask about.

        In another thread than the main one, do nothing.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if signal.getsignal(number) in (self._detach, self._interrupt):
                    signal.signal(number, _end)

    def _detach(self, number: int, frame: FrameType | None) -> None:
        if _is_recording(frame):
            _send_later(number)
            return
        self.detached = True
        _end_silently()
        raise SystemExit(128 + number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if _is_recording(frame):
            _send_later(number)
            return
        if self._cancelling:
            self.at_once = True
            _end_silently()
            raise KeyboardInterrupt
        self._cancelling = True  # for a second Ctrl-C while the question is open
        with self.undisturbed():
            answer = self._ask() if self._choice == "ask" else self._choice[0]
            if answer == "g":
                self._cancelling = False
                _write_to_terminal(_GOING_ON)
                return
        if answer == "d":
            self._detach(number, frame)
        _end_silently()
        raise KeyboardInterrupt

    @staticmethod
    def _ask() -> str:
        """Ask the user. Return `c`, `d` or `g`.

        Without an interactive terminal, return `c`; if the terminal fails, `d`; at the end of its
        input, `g`.
        """
        if not os.isatty(0):
            return "c"
        try:
            terminal = _open_terminal()
        except OSError:
            return "c"
        try:
            if os.tcgetpgrp(terminal) != os.getpgrp():
                return "c"  # a background process does not own the terminal
            while True:
                os.write(terminal, _QUESTION.encode())
                answer = os.read(terminal, _LONGEST_ANSWER)
                if not answer:
                    return "g"
                if (word := answer.decode(errors="replace").strip().lower()[:1]) in set("cdg"):
                    return word
        except OSError:
            return "d"  # the terminal is gone: a lost connection must not cancel jobs
        finally:
            with suppress(OSError):
                os.close(terminal)
