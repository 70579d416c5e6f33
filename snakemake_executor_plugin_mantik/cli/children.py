"""Run a command for a command of ours, which ends when that one does."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

_STDERR: Final = 2


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    to_stderr: bool = False,
) -> int:
    """Run a command and pass on signals; return its exit code, 128 + n if signal n ended it.

    With `to_stderr` its standard output is joined to this process's standard error.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and _from_terminal():
            return  # the terminal sends it to the command, too
        if child is None:
            early.append(number)
            return
        with suppress(ProcessLookupError):
            child.send_signal(number)

    passed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in passed}
    try:
        child = subprocess.Popen(command, env=environment, stdout=_STDERR if to_stderr else None)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _from_terminal() -> bool:
    """Return whether this process is in a terminal's foreground group, which receives Ctrl-C."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
