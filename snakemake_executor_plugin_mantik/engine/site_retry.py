"""Waiting for a site that does not answer: nothing fails, the log says so once in a while."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from snakemake_executor_plugin_mantik.common.errors import (
    OutputsLost,
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
    TransferError,
)

_T = TypeVar("_T")

TRANSIENT = (SiteUnreachable, SiteBusy, SiteUnauthorized)
"""Errors of a site that pass, or that the user can mend while the run waits."""

FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
LONGEST_BUSY_S = 900.0
"""Seconds to stay away at most when a site asks for it (Retry-After)."""
LONGEST_MISSING_WAIT_S = 16.0
"""What is not found is asked for again after 1, 2, 4, 8 and 16 seconds, and so on."""
_MISSING_S = 31.0
"""Seconds for which it is, at least."""
INSIST_S = 300.0
"""Seconds for which what a job made is asked for though the site refuses it."""
_FIRST_TOLD_S = 5.0
"""Seconds of silence before the log mentions it; told again each time that has doubled."""
_REFUSED_TOLD_S = 60.0
"""Seconds that one request has to fail, while the site answers others, before the log says so."""


async def _no_proof() -> None:
    """Believe what is said."""


class SiteRetry:
    """Repeats what a site did not answer, as long as it takes; one for all work at a site."""

    def __init__(
        self,
        site: str,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        missing_s: float = _MISSING_S,
        insist_s: float = INSIST_S,
        proof: Callable[[], Awaitable[object]] = _no_proof,
    ) -> None:
        """Make it.

        Args:
            site: the site's name.
            notify: writes a line to the user's log.
            clock: seconds that only grow.
            missing_s: how long the site's file system may take to show what is new.
            insist_s: how long outputs of a job that succeeded are asked for though refused.
            proof: asks the site for what it cannot deny unless it denies everything.
        """
        self._site = site
        self.missing_s = max(missing_s, _MISSING_S)
        self.insist_s = insist_s
        self._proof = proof
        self._notify = notify
        self._clock = clock
        self._since: float | None = None
        self._next_told = _FIRST_TOLD_S
        self._refused_told = _REFUSED_TOLD_S
        self._refused_at: float | None = None
        self._noted: set[str] = set()

    async def __call__(
        self,
        act: Callable[[], Awaitable[_T]],
        repeat: tuple[type[SiteError], ...] = TRANSIENT,
    ) -> _T:
        """The result of `act`, which must be harmless when repeated after the errors `repeat`."""
        wait = FIRST_WAIT_S
        started = self._clock()
        while True:
            try:
                result = await act()
            except repeat as error:
                self.failed(error)
                self._refused(error, self._clock() - started)
                asked = getattr(error, "retry_after", None)
                pause = min(asked, LONGEST_BUSY_S) if asked else wait
                await asyncio.sleep(pause * random.uniform(1.0, 1.25))  # noqa: S311
                wait = min(wait * 2, _LONGEST_WAIT_S)
            else:
                self.answered()
                return result

    async def found(self, act: Callable[[], Awaitable[_T]], *, at_once: bool = False) -> _T:
        """Like a call, but that there is no such thing is believed only after half a minute.

        Slow file systems say so of what is new, and servers of everything while they start: those
        are waited for as long as it takes. With `at_once` only the latter are.

        Raises:
            SiteNotFound: the site has said so several times, and does not deny everything.
        """
        wait, waited = FIRST_WAIT_S, 0.0
        proven = False
        while True:
            try:
                return await self(act)
            except SiteNotFound as error:
                if proven:
                    raise
                if at_once or waited >= self.missing_s:
                    # It may have come to itself in between: it is asked once more.
                    proven = await self.believed(error)
            if not proven:
                await asyncio.sleep(wait)
                waited, wait = waited + wait, min(2 * wait, LONGEST_MISSING_WAIT_S)

    async def insist(self, act: Callable[[], Awaitable[_T]]) -> _T:
        """Like `found`, but a refusal is believed only after `insist_s`.

        For what a job made that has succeeded. A file system that is mounted anew denies permission
        for a moment, a gateway answers with a page of its own, and what came may be damaged.

        Raises:
            SiteNotFound: as of `found`.
            SiteRejected, TransferError: the site has refused all the time, or given something else.
            OutputsLost: at once, since no answer can mend that.
        """
        wait, waited = FIRST_WAIT_S, 0.0
        while True:
            try:
                return await self.found(act)
            except OutputsLost:
                raise
            except (SiteRejected, TransferError) as error:
                if waited >= self.insist_s:
                    raise
                self._refused(error, waited)
            await asyncio.sleep(wait)
            waited, wait = waited + wait, min(2 * wait, _LONGEST_WAIT_S)

    async def believed(self, error: SiteNotFound) -> bool:
        """Whether a site that denies something does not just deny everything."""
        try:
            await self._proof()
        except SiteRejected:
            pass  # it is in its right mind
        except SiteError:
            self.failed(error)
            return False
        self.answered()
        return True

    def failed(self, error: Exception) -> None:
        """Note that the site did not answer, and say so when it is time to."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        silent = now - self._since
        if silent >= self._next_told:
            self._next_told = silent * 2
            if isinstance(error, SiteUnauthorized):
                self._notify(
                    f"Site {self._site} has not accepted the credentials for {silent:.0f} s; jobs"
                    f" there go on, and so does this run when it does. {error} New ones are taken"
                    f" from the keyring (keyring set mantik:{self._site} NAME) and from files (NAME"
                    "_FILE). Or end this run (SIGTERM; Ctrl-C and d), set them and start again."
                )
                return
            self._notify(
                f"Site {self._site} has not answered for {silent:.0f} s; jobs there go on, and so"
                f" does this run when it does. {error}"
            )

    def _refused(self, error: Exception, silent: float) -> None:
        """One request fails again and again while the site answers others: say so as well."""
        now = self._clock()
        if self._refused_at is not None and now - self._refused_at > 4 * self._refused_told:
            self._refused_told = _REFUSED_TOLD_S
        if silent < self._refused_told or self._next_told > _FIRST_TOLD_S:
            return
        self._refused_told, self._refused_at = silent * 2, now
        self._notify(
            f"Site {self._site} has not done what it was asked for {silent:.0f} s; it is asked"
            f" again until it does. {error}"
        )

    def answered(self) -> None:
        """Note that the site answers, and say so if its silence was told."""
        if self._since is not None and self._next_told > _FIRST_TOLD_S:
            silent = self._clock() - self._since
            self._notify(f"Site {self._site} answers again after {silent:.0f} s.")
        self._since = None
        self._next_told = _FIRST_TOLD_S

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self._noted:
            self._noted.add(text)
            self._notify(f"Site {self._site}: {text}")
