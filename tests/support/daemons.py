"""Server processes that a test may stop, kill with -9 and start again."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STOP_S = 10.0
"""How long a server may take to end before it is killed, seconds."""


@dataclass
class Daemon:
    """A server of this process, in a process group of its own.

    Attributes:
        command: the program and its arguments.
        directory: its working directory.
        console: the file that gets what it prints.
        environment: its variables; None: those of this process.
        forks: whether what it has forked ends with it when it is killed.
    """

    command: Sequence[str]
    directory: Path
    console: Path
    environment: Mapping[str, str] | None = None
    forks: bool = False
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Start it. It ends with this process, even if that is killed."""
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command], cwd=self.directory,
                env=self.environment, stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                start_new_session=True,
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
        """Kill it with -9."""
        if self._process is None:
            return
        if self.forks:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._process = None
