"""The worker process as the tracker sees it: started, woken, heard, and waited for, within limits.

Nothing here raises for what the worker or MLflow does: jobs go on, and it is told later.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.tracking.controller.messenger import Messenger

MADE_WAIT_S = 15.0
"""Seconds that a job waits, at most, for MLflow to make its run, unless the user has chosen others.

To import MLflow takes two to six, to make a database in a new SQLite file two more.
"""
WORKERS = 3
"""Workers that are started in the place of one that died, the first one included."""


class Courier:
    """Has a worker tell MLflow what the outbox holds."""

    def __init__(
        self,
        workdir: Path,
        log: Path,
        notify: Callable[[str], None],
        tracked: Collection[str],
        wait_s: float = MADE_WAIT_S,
    ) -> None:
        """Prepare; nothing is started before `wake`.

        Args:
            workdir: the workflow's directory.
            log: where what MLflow itself says goes to.
            notify: writes a line to the user's log.
            tracked: the keys in the outbox that this process has to do with; grows.
            wait_s: seconds that a job waits for its run, at most; the worker's start included.
        """
        self._workdir = workdir
        self._log = log
        self._notify = notify
        self._tracked = tracked
        self._wait_s = wait_s
        self._messenger: Messenger | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._made = 0
        self._workers = 0
        self._silent = False
        self._earlier_told = False

    def wake(self) -> None:
        """There is something to be told.

        Raises:
            OSError: the worker cannot be started.
        """
        if self._messenger is None or (not self._messenger.alive and self._workers < WORKERS):
            if self._messenger is not None:
                self._messenger.close(0)
            self._workers += 1
            self._messenger = Messenger(self._workdir, self._log, self._hear)
        self._messenger.wake()

    async def made(self, try_id: str, turn_s: float = 0.0) -> None:
        """Wait until the run of a try is made, within the limit.

        If MLflow makes none at all in that time the next ones do not wait, until it does again.

        Args:
            try_id: the try.
            turn_s: seconds after which it can be submitted at all: those do not count.
        """
        self._loop = asyncio.get_running_loop()
        future = self._waiting[try_id] = self._loop.create_future()
        before = self._made
        try:
            self.wake()
            if self._silent or self._wait_s <= 0:
                return
            async with asyncio.timeout(self._wait_s + turn_s):
                await future
        except TimeoutError:
            if self._made == before:
                self._away(f"It has made no run for {self._wait_s + turn_s:g} s.")
        finally:
            self._waiting.pop(try_id, None)

    def release(self) -> None:
        """Nobody waits any more, until MLflow answers again."""
        self._silent = True
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def close(self, wait_s: float) -> bool:
        """Nothing new will come: wait for the worker's end; whether it came in time."""
        return self._messenger is None or self._messenger.close(wait_s)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        """In the messenger's thread."""
        if "tell" in answer:
            self._notify(str(answer["tell"]))
        if self._loop is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._heard, answer)

    def _heard(self, answer: Mapping[str, Any]) -> None:
        """In the engine's thread."""
        if "try" in answer:
            self._silent = False
            self._made += 1
            future = self._waiting.pop(answer["try"], None)
            if future is not None and not future.done():
                future.set_result(None)
        elif "down" in answer:
            self._down(answer["down"], answer["tries"])
        elif "gone" in answer:
            self.release()

    def _down(self, why: str, tries: Collection[str]) -> None:
        if set(self._tracked).isdisjoint(tries):
            # Earlier runs went somewhere else: no job of this one has to do with that.
            if not self._earlier_told:
                self._earlier_told = True
                self._notify(f"MLflow cannot be told of {len(tries)} earlier runs. {why}")
            return
        self._away(why)

    def _away(self, why: str) -> None:
        if not self._silent:
            self._notify(f"MLflow cannot be told now; jobs go on, and it is told later. {why}")
        self.release()
