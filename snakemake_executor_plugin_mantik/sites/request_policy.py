"""Limits for requests to sites: repetition, rate, and giving up on a site that is away."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import stamina

from snakemake_executor_plugin_mantik.common.errors import SiteBusy, SiteError, SiteUnreachable

REPEAT_ATTEMPTS: Final = 4
"""Maximum number of attempts of an idempotent request before its error is raised."""
_REPEAT_S: Final = 30.0
"""An idempotent request is not repeated any more this long after its first attempt began.

In seconds. An attempt that is running then is not aborted."""
REPEAT_FIRST_S: Final = 0.2
"""Wait before the first repetition, seconds; doubled for each further one, unless the site names a
wait."""
REPEAT_LONGEST_S: Final = 5.0
"""Longest wait between two attempts, seconds."""
_SLOW_BYTES: Final = 1 << 20
"""A request may take one more time-out per this many bytes of a file. A slower transfer is aborted:
an endless trickle would block everything that waits for it."""

# stamina warns of each repetition; the caller reports an error that stays.
logging.getLogger("stamina").addHandler(logging.NullHandler())

_T = TypeVar("_T")


async def repeat_request(act: Callable[[], Awaitable[_T]], *, answered: bool = True) -> _T:
    """Call `act`, and repeat it a few times if the site is busy or cannot be reached.

    With `answered`, also repeat it after an answer that leaves the outcome unknown.
    """

    def worth(error: Exception) -> bool | float:
        if isinstance(error, SiteUnreachable) and error.status is not None:
            return answered
        return _worth_repeating(error)

    async for attempt in stamina.retry_context(
        on=worth,
        attempts=REPEAT_ATTEMPTS,
        timeout=_REPEAT_S,
        wait_initial=REPEAT_FIRST_S,
        wait_max=REPEAT_LONGEST_S,
        wait_jitter=REPEAT_FIRST_S,
    ):
        with attempt:
            return await act()
    raise AssertionError("stamina makes one attempt at least")


def _worth_repeating(error: Exception) -> bool | float:
    if isinstance(error, SiteBusy):
        if error.retry_after is None:
            return True
        return error.retry_after if error.retry_after < _REPEAT_S else False
    return isinstance(error, SiteUnreachable)


def longest_request_s(timeout_s: float, size: int = 0) -> float:
    """Return the maximum seconds of a request that carries `size` bytes of a file."""
    return timeout_s * (1 + size / _SLOW_BYTES)


async def read_steadily(chunks: AsyncIterator[bytes], timeout_s: float) -> AsyncIterator[bytes]:
    """Yield the chunks of a download as long as they arrive fast enough.

    Raises:
        TimeoutError: the chunks arrive too slowly, or stop.
    """
    clock = asyncio.get_running_loop().time
    came, waited = 0, 0.0
    while True:
        started = clock()
        async with asyncio.timeout(longest_request_s(timeout_s, came) - waited):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        # The time that the reader takes for a chunk does not count.
        came, waited = came + len(chunk), waited + clock() - started
        yield chunk


async def ask_all(
    ids: Sequence[str],
    act: Callable[[str], Awaitable[_T]],
    max_concurrency: int,
    give_up: tuple[type[SiteError], ...] = (),
) -> dict[str, _T | SiteError]:
    """Return the result or error of `act` for each id, up to `max_concurrency` at a time.

    If the site does not answer at all in spite of repetitions, or raises one of `give_up`, all
    remaining ids get that error: each request would only wait as long again.
    """
    left = iter(dict.fromkeys(ids))
    answers: dict[str, _T | SiteError] = {}
    giving_up: SiteError | None = None

    async def ask() -> None:
        nonlocal giving_up
        for job_id in left:
            try:
                answers[job_id] = giving_up or await act(job_id)
            except SiteError as error:
                answers[job_id] = error
                unanswered = isinstance(error, SiteUnreachable) and error.status is None
                if unanswered or isinstance(error, give_up):
                    giving_up = error

    await asyncio.gather(*(ask() for _ in range(min(len(ids), max_concurrency))))
    return {job_id: answers[job_id] for job_id in dict.fromkeys(ids)}


class RateLimiter:
    """Spaces out submissions and reserves capacity for other requests.

    However many submissions wait, one request slot of at least two stays free for watching,
    fetching and cancelling.
    """

    def __init__(self, interval: float, max_concurrency: int) -> None:
        """Allow a submission each `interval` seconds, one less than `max_concurrency` at once."""
        self._pace = _RateLimit(interval)
        self._free = asyncio.Semaphore(max(1, max_concurrency - 1))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a submission's turn, and hold its slot for the context."""
        async with self._free:
            await self._pace.wait()
            yield


class _RateLimit:
    """Lets one caller pass every `interval` seconds."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = 0.0

    async def wait(self) -> None:
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._interval
        if turn > now:
            await asyncio.sleep(turn - now)
