"""What Ctrl-C, a shutdown and a lost connection mean for jobs that are under way.

Snakemake's own answer to all of them is to cancel. A job that waited a day in a queue is worth a
question: Ctrl-C at a terminal asks; a lost connection or a shutdown (SIGHUP, SIGTERM) leaves the
jobs running, and the next run takes them up.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from snakemake_executor_plugin_mantik.common.errors import JournalError

CHOICES = ("ask", "cancel", "detach")

_DETACHED = "Detached: the jobs go on at their sites; start again to take them up."

NO_SPACE = (
    "Nothing can be written here any more (is the disk full?); the jobs go on at their sites. Free"
    " space and start again to take them up."
)

_QUESTION = (
    "\nInterrupted. The jobs that are under way at the sites:\n"
    "  c  cancel them and end (Ctrl-C again: at once, without waiting for their confirmation)\n"
    "  d  leave them running and end (detach); the next run takes them up\n"
    "  g  go on as if nothing had happened\n"
    "Your choice [c/d/g]: "
)
_LONGEST_ANSWER = 100


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is that nothing can be written here any more."""
    while error is not None:
        if isinstance(error, JournalError):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


class Interruption:
    """Handles the signals that end a run. Belongs to the main thread.

    Attributes:
        detached: whether the jobs are to be left running.
        at_once: whether the user does not want to wait for jobs that are cancelled.
    """

    def __init__(self, choice: str, notify: Callable[[str], None]) -> None:
        """Decide what Ctrl-C does.

        Args:
            choice: one of `CHOICES`; without a terminal, `ask` means `cancel`.
            notify: writes a line to the user's log.
        """
        self._choice = choice
        self._notify = notify
        self._cancelling = False
        self.detached = False
        self.at_once = False

    def handle(self) -> None:
        """Handle the signals from now on.

        Snakemake sets its own handler for SIGTERM after the executor was made; it would wait for
        all jobs. So this is called when the first job is handed over, and again for each.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._detach)
        # Somebody who started us with SIGINT ignored (nohup, a script's background) meant it.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)

    def _detach(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.detached = True
        self._notify(_DETACHED)
        raise SystemExit(128 + number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._cancelling:
            self.at_once = True
            raise KeyboardInterrupt
        self._cancelling = True  # for a second Ctrl-C, while the question stands
        answer = self._ask() if self._choice == "ask" else self._choice[0]
        if answer == "d":
            self._detach(number, frame)
        if answer == "g":
            self._cancelling = False
            self._notify("Going on.")
            return
        raise KeyboardInterrupt

    @staticmethod
    def _ask() -> str:
        """`c`, `d` or `g`; without a terminal that somebody types at, `c`.

        It reads and writes the terminal's descriptor: this is called between any two instructions,
        also in the middle of a write to the log.
        """
        if not os.isatty(0):
            return "c"
        try:
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        except OSError:
            return "c"
        try:
            if os.tcgetpgrp(terminal) != os.getpgrp():
                return "c"  # in the background: the terminal is somebody else's
            while True:
                os.write(terminal, _QUESTION.encode())
                answer = os.read(terminal, _LONGEST_ANSWER)
                if not answer:
                    return "g"
                if (word := answer.decode(errors="replace").strip().lower()[:1]) in set("cdg"):
                    return word
        except OSError:
            return "d"  # the terminal has gone, and a lost connection costs no job
        finally:
            with suppress(OSError):
                os.close(terminal)
