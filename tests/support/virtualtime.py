"""An event loop whose time passes as soon as nothing is left to do: a day takes milliseconds.

Threads are run in place, so that everything happens in one order, the same each time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Does not wait for time to pass but lets it pass."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise RuntimeError("everything waits for something that never comes")
            self.now += max(timeout, 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self, now: float = 0.0) -> None:
        """Make a loop whose clock shows `now`."""
        self._virtual = _Selector()
        self._virtual.now = now
        super().__init__(self._virtual)

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._virtual.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Run `func` at once."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits it
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
