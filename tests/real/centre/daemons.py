"""Servers of the centre as child processes that end with the process that started them."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

START_S = 180.0
"""How long a server may take until it answers, seconds."""
STOP_S = 10.0
"""How long a server may take to end before it is killed, seconds."""


@dataclass
class Daemon:
    """A server that a test may kill and start again; as a context manager it runs in its block.

    Attributes:
        command: starts the server, which stays in the foreground.
        log: the file that its output goes to.
        answers: whether it serves its clients.
        directory: its working directory.
        environment: variables that it is given beside our own.
    """

    command: Sequence[str | Path]
    log: Path
    answers: Callable[[], bool]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: "subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, again or for the first time, and wait until it answers.

        Raises:
            RuntimeError: it ended, or did not answer within `START_S`.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                # With this process it ends, even if it is killed.
                ["setpriv", "--pdeathsig", "KILL", *self.command],
                cwd=self.directory, env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text(errors="replace")[-4000:]
                self.stop()
                raise RuntimeError(f"{self.command[0]} does not answer; it said:\n{said}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Let the server end by itself, or kill it after `STOP_S`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the server with -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
