"""How sites are asked: again where that may help, not too often, not in vain for each job."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import stamina

from snakemake_executor_plugin_mantik.common.errors import SiteBusy, SiteError, SiteUnreachable

REPEAT_ATTEMPTS: Final = 4
"""How often an idempotent request is made at most before its error is told."""
_REPEAT_S: Final = 30.0
"""How long the attempts of an idempotent request may take together, seconds."""
REPEAT_FIRST_S: Final = 0.2
"""Wait before the first repetition, seconds; doubled for each further one."""
REPEAT_LONGEST_S: Final = 5.0
"""Longest wait between two attempts, seconds."""
_SLOW_BYTES: Final = 1 << 20
"""Bytes of a file for which a request may take as long again as one without a file. What comes more
slowly is broken off, or an answer that drips for ever would hold up all that waits for it."""

# stamina warns of each repetition; an error that stays is told by whoever asked.
logging.getLogger("stamina").addHandler(logging.NullHandler())

_T = TypeVar("_T")


async def repeat_request(act: Callable[[], Awaitable[_T]], *, answered: bool = True) -> _T:
    """Do `act`, and again a few times if the site is busy or cannot be reached.

    With `answered` also after an answer that leaves it unknown whether it happened.
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
    """Seconds that a request may take in all that carries `size` bytes of a file."""
    return timeout_s * (1 + size / _SLOW_BYTES)


async def read_steadily(chunks: AsyncIterator[bytes], timeout_s: float) -> AsyncIterator[bytes]:
    """The chunks of a download, as long as they come fast enough.

    Raises:
        TimeoutError: they have all but stopped.
    """
    clock = asyncio.get_running_loop().time
    came, waited = 0, 0.0
    while True:
        asked = clock()
        async with asyncio.timeout(longest_request_s(timeout_s, came) - waited):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        # How long the reader takes for what it got is its own affair.
        came, waited = came + len(chunk), waited + clock() - asked
        yield chunk


async def ask_all(
    ids: Sequence[str],
    act: Callable[[str], Awaitable[_T]],
    max_concurrency: int,
    give_up: tuple[type[SiteError], ...] = (),
) -> dict[str, _T | SiteError]:
    """What `act` gives for each job, or its error; `max_concurrency` of them at the same time.

    Once the site gives no answer at all, in spite of repetitions, or one of the errors `give_up`,
    the other jobs are not asked for: each of them would wait as long.
    """
    left = iter(dict.fromkeys(ids))
    answers: dict[str, _T | SiteError] = {}
    silent: SiteError | None = None

    async def ask() -> None:
        nonlocal silent
        for job_id in left:
            try:
                answers[job_id] = silent or await act(job_id)
            except SiteError as error:
                answers[job_id] = error
                unanswered = isinstance(error, SiteUnreachable) and error.status is None
                if unanswered or isinstance(error, give_up):
                    silent = error

    await asyncio.gather(*(ask() for _ in range(min(len(ids), max_concurrency))))
    return {job_id: answers[job_id] for job_id in dict.fromkeys(ids)}


class RateLimiter:
    """Lets submissions out one by one, and always leaves room for other requests.

    However many wait for their turn, there is a place for those who watch, fetch and cancel.
    """

    def __init__(self, interval: float, max_concurrency: int) -> None:
        """Let one out every `interval` seconds, with at most `max_concurrency` requests at once."""
        self._pace = _RateLimit(interval)
        self._free = asyncio.Semaphore(max(1, max_concurrency - 1))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The context of one submission, once it is its turn."""
        async with self._free:
            await self._pace.wait()
            yield


class _RateLimit:
    """Lets one pass every `interval` seconds."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = 0.0

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._interval
        if turn > now:
            await asyncio.sleep(turn - now)
