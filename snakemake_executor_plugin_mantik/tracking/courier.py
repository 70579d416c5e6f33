"""The worker process as the tracker sees it: started, woken, heard, and waited for, within limits.

Nothing here raises for what the worker or MLflow does: jobs go on, and it is told later.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.tracking.messenger import Messenger

START_WAIT_S = 30.0
"""Seconds that jobs wait, at most, until the worker is there: to import MLflow takes six."""
CREATE_WAIT_S = 10.0
"""Seconds that a job then waits, at most, for MLflow to make its run."""
WORKERS = 3
"""Workers that are started in the place of one that died, the first one included."""


class Courier:
    """Has a worker tell MLflow what the outbox holds."""

    def __init__(
        self, workdir: Path, log: Path, tell: Callable[[str], None], tracked: Collection[str]
    ) -> None:
        """Prepare; nothing is started before `wake`.

        Args:
            workdir: the workflow's directory.
            log: where what MLflow itself says goes to.
            tell: writes a line to the user's log.
            tracked: the keys in the outbox that this process has to do with; grows.
        """
        self._workdir = workdir
        self._log = log
        self._tell = tell
        self._tracked = tracked
        self._messenger: Messenger | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._up = asyncio.Event()
        self._workers = 0
        self._silent = False
        self._earlier_told = False
        self._ready = False

    def wake(self) -> None:
        """There is something to be told.

        Raises:
            OSError: the worker cannot be started.
        """
        if self._messenger is None or (not self._messenger.alive and self._workers < WORKERS):
            self._ready = False
            self._workers += 1
            self._messenger = Messenger(self._workdir, self._log, self._hear)
        self._messenger.wake()

    async def made(self, try_id: str) -> None:
        """Wait until the run of a try is made, within the limits."""
        self._loop = asyncio.get_running_loop()
        future = self._waiting[try_id] = self._loop.create_future()
        try:
            self.wake()
            if self._silent:
                return
            async with asyncio.timeout(START_WAIT_S):
                if self._ready:
                    self._up.set()
                await self._up.wait()
            async with asyncio.timeout(CREATE_WAIT_S):
                await future
        except TimeoutError:
            self.release()
        finally:
            self._waiting.pop(try_id, None)

    def release(self) -> None:
        """Nobody waits any more, until MLflow answers again."""
        self._silent = True
        self._up.set()
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
            self._tell(str(answer["tell"]))
        elif "ready" in answer:
            self._ready = True
        if self._loop is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._heard, answer)

    def _heard(self, answer: Mapping[str, Any]) -> None:
        """In the engine's thread."""
        if "try" in answer:
            self._silent = False
            future = self._waiting.pop(answer["try"], None)
            if future is not None and not future.done():
                future.set_result(None)
        elif "down" in answer:
            self._down(answer["down"], answer["tries"])
        elif "gone" in answer:
            self.release()
        elif "ready" in answer:
            self._up.set()

    def _down(self, why: str, tries: Collection[str]) -> None:
        if set(self._tracked).isdisjoint(tries):
            # Earlier runs went somewhere else: no job of this one has to do with that.
            if not self._earlier_told:
                self._earlier_told = True
                self._tell(f"MLflow cannot be told of {len(tries)} earlier runs. {why}")
            return
        if not self._silent:
            self._tell(f"MLflow cannot be told now; jobs go on, and it is told later. {why}")
        self.release()
