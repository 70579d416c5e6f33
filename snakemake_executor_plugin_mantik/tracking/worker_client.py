"""Start, wake and await the worker process for the tracker, within time limits.

Failures of the worker or of MLflow raise nothing here: jobs continue, and later attempts publish
their events.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..common.humanize import humanize_count
from .store import DIRECTORY

MADE_WAIT_S = 15.0
"""The most seconds that a job waits for MLflow to create its run.

Importing MLflow takes two to six seconds, creating a database in a new SQLite file two more.
"""
# -P: modules of the user's project must not shadow others.
PYTHON: Sequence[str] = (sys.executable, "-P", "-m")
WORKER = "snakemake_executor_plugin_mantik.tracking.process"
_LOG_BYTES = 1 << 20
"""The size of the worker's log above which it is truncated, in bytes."""
WORKERS = 3
"""The most workers to start, the first one included, when workers die."""


class WorkerClient:
    """Has a worker publish the log to MLflow.

    Attributes:
        why: why MLflow could not be updated the last time that it could not; may be empty.
    """

    def __init__(
        self, workdir: Path, notify: Callable[[str], None], tracked: Collection[str] = ()
    ) -> None:
        """Prepare; the worker starts at the first `wake`.

        `notify` writes a line to the user's log; `tracked` are this process's jobs and workflow.
        """
        self.why = ""
        self._workdir = workdir
        self._notify = notify
        self._tracked = tracked
        self._wait_s = MADE_WAIT_S
        self._process: subprocess.Popen[bytes] | None = None
        self._ears: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._made = 0
        self._workers = 0
        self._silent = False
        self._earlier_told = False

    def wake(self) -> None:
        """Have new events published; start a worker if none is alive, at most `WORKERS` in all.

        Never blocks.

        Raises:
            OSError: the worker cannot be started.
        """
        process = self._process
        if process is None or (process.poll() is not None and self._workers < WORKERS):
            self.close(0)
            process = self._start()
        assert process.stdin is not None
        # Full: earlier bytes will still wake it. Broken: it is dead, and the next worker continues.
        # Closed, a ValueError: it was told that nothing new comes, and has not ended yet.
        with suppress(BlockingIOError, BrokenPipeError, ValueError):
            os.write(process.stdin.fileno(), b"\n")

    def _start(self) -> "subprocess.Popen[bytes]":
        log = self._workdir / DIRECTORY / "worker.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        small = log.exists() and log.stat().st_size < _LOG_BYTES
        with log.open("a" if small else "w") as errors:
            # In a session of its own: Ctrl-C must reach only the controller, which ends the worker.
            process = self._process = subprocess.Popen(
                [*PYTHON, WORKER],
                cwd=self._workdir, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        self._workers += 1
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._ears = threading.Thread(
            target=self._listen, args=(process,), name="mantik-tracking", daemon=True
        )
        self._ears.start()
        return process

    def close(self, wait_s: float) -> bool:
        """Announce that nothing new will come; return whether the worker ended within `wait_s`."""
        if self._process is None or self._ears is None:
            return True
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        self._ears.join(1.0)
        return True

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        """Handle a worker's answers, in a thread of their own."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # other output of the process
                    self._hear(json.loads(line))
        process.wait()
        self._hear({"gone": True})

    def _hear(self, answer: Mapping[str, Any]) -> None:
        self.why = str(answer.get("down", self.why))
        if "tell" in answer:
            self._notify(str(answer["tell"]))
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._heard, answer)

    async def made(self, attempt_id: str, turn_s: float = 0.0) -> None:
        """Wait until MLflow has created the run of an attempt, within the limit.

        If MLflow creates no run at all in that time, later jobs do not wait until it does again.
        The limit is extended by `turn_s`, the seconds until the attempt could be submitted anyway.

        Raises:
            OSError: the worker cannot be started.
        """
        self._loop = asyncio.get_running_loop()
        future = self._waiting[attempt_id] = self._loop.create_future()
        before = self._made
        try:
            self.wake()
            if self._silent:
                return
            async with asyncio.timeout(self._wait_s + turn_s):
                await future
        except TimeoutError:
            if self._made == before:
                self._away(f"It has created no run for {self._wait_s + turn_s:g} s.")
        finally:
            self._waiting.pop(attempt_id, None)

    def release(self) -> None:
        """End all waits, and let no job wait until MLflow answers again."""
        self._silent = True
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _heard(self, answer: Mapping[str, Any]) -> None:
        """Handle an answer, in the engine's thread."""
        if "attempt" in answer:
            self._silent = False
            self._made += 1
            future = self._waiting.pop(answer["attempt"], None)
            if future is not None and not future.done():
                future.set_result(None)
        elif "down" in answer:
            self._down(answer["down"], answer["attempts"])
        elif "gone" in answer:
            self.release()

    def _down(self, why: str, attempts: Collection[str]) -> None:
        if set(self._tracked).isdisjoint(attempts):
            # Only runs of earlier workflows fail, at another destination: no job here is affected.
            if not self._earlier_told:
                self._earlier_told = True
                runs = humanize_count(len(attempts), "earlier run")
                self._notify(f"MLflow cannot be updated for {runs}. {why}")
            return
        self._away(why)

    def _away(self, why: str) -> None:
        if not self._silent:
            self._notify(
                f"MLflow cannot be updated now; jobs continue, and updates follow later. {why}"
            )
        self.release()


def start_worker(workdir: Path) -> None:
    """Have what is left published, and do not wait for it; see `WorkerClient.wake`."""
    worker = WorkerClient(workdir, lambda _: None)
    worker.wake()
    worker.close(0)
