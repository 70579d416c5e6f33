"""Server processes that a test may stop, kill with -9 and start again.

None outlives the process that started it, however that ends.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STOP_S = 60.0
"""How long a server may take to end before it is killed, seconds."""

_GUARD = ("sh", "-c", 'cat; kill -9 "-$0"')
"""Kills the process group of its argument when its stdin ends: when nobody can write there."""


def ending_with_us(command: Sequence[str | Path]) -> Sequence[str | Path]:
    """What runs `command` until this process ends, but not what that has forked."""
    return ("setpriv", "--pdeathsig", "KILL", *command)


@dataclass
class Daemon:
    """A server of this process, in a process group of its own.

    Attributes:
        command: the program and its arguments.
        directory: its working directory.
        console: the file that gets what it prints.
        environment: its variables; None: those of this process.
        forks: whether what it has forked ends with it.
    """

    command: Sequence[str | Path]
    directory: Path
    console: Path
    environment: Mapping[str, str] | None = None
    forks: bool = False
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    _guard: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                ending_with_us(self.command), cwd=self.directory, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        if self.forks:
            self._guard = subprocess.Popen(
                [*_GUARD, str(self._process.pid)], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End it, in an orderly way if it can."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        if self._process is None:
            return
        if self.forks:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        self._process.wait()
        self._process = None
