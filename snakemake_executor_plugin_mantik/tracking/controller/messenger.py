"""The controller's end of the worker process: starts it, wakes it, hears its answers."""

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
"""Size of the worker's own log above which it is begun anew."""


class Messenger:
    """A worker process."""

    def __init__(self, workdir: Path, log: Path, hear: Callable[[Mapping[str, Any]], None]) -> None:
        """Start the worker.

        Args:
            workdir: the workflow's directory.
            log: where what MLflow itself says goes to.
            hear: called with each answer, in a thread of its own.

        Raises:
            OSError: it cannot be started.
        """
        small = log.exists() and log.stat().st_size < _LOG_BYTES
        with log.open("a" if small else "w") as errors:
            # In a session of its own: Ctrl-C is for the controller, which then ends it in order.
            self._process = subprocess.Popen(
                # -P: modules of the user's project do not stand in for others.
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
                with suppress(ValueError):  # something else wrote to its output
                    self._hear(json.loads(line))
        self._hear({"gone": True})

    @property
    def alive(self) -> bool:
        """Whether the worker is there."""
        return self._process.poll() is None

    def wake(self) -> None:
        """There is something new in the outbox. Never waits."""
        # Full: it has not yet read what will wake it. Broken: it is gone, the next one goes on.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._input, b"\n")

    def close(self, wait_s: float) -> bool:
        """Nothing new will come: wait for the worker's end; whether it came in time."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        self._ears.join(1.0)
        return True
