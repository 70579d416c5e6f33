"""Waiting for a site that does not answer: nothing fails, the log says so once in a while."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from snakemake_executor_plugin_mantik.errors import SiteBusy, SiteUnauthorized, SiteUnreachable

T = TypeVar("T")

TRANSIENT = (SiteUnreachable, SiteBusy, SiteUnauthorized)
"""Errors of a site that pass, or that the user can mend while the run waits."""

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
FIRST_TOLD_S = 5.0
"""Seconds of silence before the log mentions it; told again each time that has doubled."""


class Patience:
    """Repeats what a site did not answer, as long as it takes; one for all work at a site."""

    def __init__(self, site: str, tell: Callable[[str], None]) -> None:
        self._site = site
        self._tell = tell
        self._since: float | None = None
        self._next_told = FIRST_TOLD_S

    async def __call__(self, act: Callable[[], Awaitable[T]]) -> T:
        """The result of `act`, which must be harmless when repeated."""
        wait = FIRST_WAIT_S
        while True:
            try:
                result = await act()
            except TRANSIENT as error:
                self.failed(error)
                pause = getattr(error, "retry_after", None) or wait * random.uniform(0.75, 1.25)  # noqa: S311
                await asyncio.sleep(min(pause, LONGEST_WAIT_S))
                wait = min(wait * 2, LONGEST_WAIT_S)
            else:
                self.answered()
                return result

    def failed(self, error: Exception) -> None:
        """Note that the site did not answer, and say so when it is time to."""
        now = time.monotonic()
        self._since = self._since or now
        silent = now - self._since
        if silent >= self._next_told:
            self._next_told = silent * 2
            self._tell(
                f"Site {self._site} has not answered for {silent:.0f} s; jobs there go on, and so"
                f" does this run when it does. {error}"
            )

    def answered(self) -> None:
        """Note that the site answers, and say so if its silence was told."""
        if self._since is not None and self._next_told > FIRST_TOLD_S:
            silent = time.monotonic() - self._since
            self._tell(f"Site {self._site} answers again after {silent:.0f} s.")
        self._since = None
        self._next_told = FIRST_TOLD_S
