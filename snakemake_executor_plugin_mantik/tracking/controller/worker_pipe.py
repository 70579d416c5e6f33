"""Start and wake the worker process from the controller, and receive its answers."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = "snakemake_executor_plugin_mantik.tracking.worker.process"
_LOG_BYTES = 1 << 20
"""The size of the worker's log above which it is truncated, in bytes."""


class WorkerPipe:
    """A worker process and the pipes to it."""

    def __init__(self, workdir: Path, log: Path, hear: Callable[[Mapping[str, Any]], None]) -> None:
        """Start the worker.

        Args:
            workdir: the workflow's directory.
            log: the file for the worker's own output.
            hear: called with each answer, in a thread of its own.

        Raises:
            OSError: the process cannot be started.
        """
        small = log.exists() and log.stat().st_size < _LOG_BYTES
        with log.open("a" if small else "w") as errors:
            # In a session of its own: Ctrl-C must reach only the controller, which ends the worker.
            self._process = subprocess.Popen(
                # -P: modules of the user's project must not shadow others.
                [sys.executable, "-P", "-m", WORKER],
                cwd=workdir, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        self._input = self._process.stdin.fileno()
        flags = fcntl.fcntl(self._input, fcntl.F_GETFL)
        fcntl.fcntl(self._input, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        self._hear = hear
        self._ears = threading.Thread(target=self._listen, name="mantik-tracking", daemon=True)
        self._ears.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # other output of the process
                    self._hear(json.loads(line))
        self._hear({"gone": True})

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wake(self) -> None:
        """Announce new events in the outbox. Never blocks."""
        # Full: earlier bytes will still wake it. Broken: it is dead, and the next worker continues.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._input, b"\n")

    def close(self, wait_s: float) -> bool:
        """Announce that nothing new will come; return whether the worker ended within `wait_s`."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        self._ears.join(1.0)
        return True
