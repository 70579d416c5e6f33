"""An event loop whose time passes as soon as nothing is left to do: a day takes milliseconds.

Threads are run in place, so that everything happens in one order, the same each time.
"""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. Waits for no file and no socket, so that a step costs as little as it can.

    Attributes:
        around: called before and after what would run in a thread, with what that is: a test may
            stop the world there, or raise what the work could.
    """

    def __init__(self, now: float = 0.0) -> None:
        super().__init__()
        self._now = now
        self.around: Callable[[object], None] = lambda work: None

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """Run what is due; where nothing is, let time pass until something is.

        The names are those of asyncio's own loop (3.11 to 3.13), whose other methods stay.
        """
        ready, later = self._ready, self._scheduled  # type: ignore[attr-defined]
        while later and later[0]._cancelled:
            heapq.heappop(later)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not later:
                raise RuntimeError("everything waits for something that never comes")
            self._now = max(self._now, later[0]._when)
        while later and later[0]._when <= self._now:
            timer = heapq.heappop(later)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is skipped when its time comes."""

    def _write_to_self(self) -> None:
        """Nobody waits."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Run `func` at once."""
        # `asyncio.to_thread` wraps it, to run it in a context.
        work = func.args[0] if isinstance(func, partial) and func.args else func
        future: asyncio.Future[T] = self.create_future()
        try:
            self.around(work)
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits it
            future.set_exception(error)
        else:
            self.around(None)
        return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
