"""Server processes that a test may stop, kill with -9 and start again."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

START_S = 180.0
"""How long a server may take until it answers, seconds."""
STOP_S = 10.0
"""How long a server may take to end before it is killed, seconds."""


@dataclass
class Daemon:
    """A server of this process, in a process group of its own; as a context it runs in its block.

    Attributes:
        command: starts the server, which stays in the foreground.
        directory: its working directory.
        console: the file that gets what it prints.
        environment: its variables; None: those of this process.
        answers: whether it serves its clients.
        forks: whether what it has forked ends with it when it is killed.
    """

    command: Sequence[str | Path]
    directory: Path
    console: Path
    environment: Mapping[str, str] | None = None
    answers: Callable[[], bool] = lambda: True
    forks: bool = False
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers. It ends with this process in any case.

        Raises:
            RuntimeError: it ended, or did not answer within `START_S`.
        """
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command], cwd=self.directory,
                env=self.environment, stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self.answers():
            if not self.runs or time.monotonic() > deadline:
                said = self.console.read_text(errors="replace")[-4000:]
                self.kill()
                raise RuntimeError(f"{self.command[0]} does not answer; it said:\n{said}")
            time.sleep(0.1)

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
