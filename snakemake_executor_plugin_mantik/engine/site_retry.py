"""Wait for a site that does not answer, without failing; report its silence now and then."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from ..common.errors import (
    OutputsLost,
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
    TransferError,
)
from ..config.settings import Timing
from ..sites.base import Entry

_T = TypeVar("_T")

TRANSIENT = (SiteUnreachable, SiteBusy, SiteUnauthorized)
"""Errors of a site that pass, or that the user can correct while the run waits."""

FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
LONGEST_BUSY_S = 900.0
"""Longest wait that a site may request (Retry-After), in seconds."""
LONGEST_MISSING_WAIT_S = 16.0
"""Requests for files that are not found are repeated after 1, 2, 4, 8, 16, 16, ... seconds."""
_MISSING_S = 31.0
"""Least seconds for which these are repeated."""
_FIRST_REPORT_S = 5.0
"""Seconds of silence before the first log line; another follows each time this has doubled."""
_FIRST_REFUSAL_S = 60.0
"""Seconds that a request must fail, while the site answers others, before the first log line."""


async def _no_proof() -> None:
    pass


class SiteRetry:
    """Repeat requests until a site answers, as long as it takes; one object per site."""

    def __init__(
        self,
        site: str,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        missing_s: float = _MISSING_S,
        insist_s: float = Timing.fetch_wait_s,
        proof: Callable[[], Awaitable[object]] = _no_proof,
    ) -> None:
        """Make a retry.

        Args:
            site: the site's name.
            notify: writes a line to the user's log.
            clock: seconds, monotonic.
            missing_s: how long the site's file system may take to show new files.
            insist_s: how long to repeat refused requests for the outputs of a succeeded job.
            proof: makes a request that a site answers with "not found" only if it gives that
                answer to all requests.
        """
        self._site = site
        self.missing_s = max(missing_s, _MISSING_S)
        self.insist_s = insist_s
        self._proof = proof
        self._notify = notify
        self._clock = clock
        self._since: float | None = None
        self._next_report_s = _FIRST_REPORT_S
        self._next_refusal_s = _FIRST_REFUSAL_S
        self._refused_at: float | None = None
        self._noted: set[str] = set()

    async def __call__(
        self,
        act: Callable[[], Awaitable[_T]],
        repeat: tuple[type[SiteError], ...] = TRANSIENT,
    ) -> _T:
        """Return the result of `act`, which must be safe to repeat after the errors `repeat`."""
        wait = FIRST_WAIT_S
        started = self._clock()
        while True:
            try:
                result = await act()
            except repeat as error:
                self.failed(error)
                self._refused(error, self._clock() - started)
                retry_after = getattr(error, "retry_after", None)
                pause = min(retry_after, LONGEST_BUSY_S) if retry_after else wait
                await asyncio.sleep(pause * random.uniform(1.0, 1.25))  # noqa: S311
                wait = min(wait * 2, _LONGEST_WAIT_S)
            else:
                self.answered()
                return result

    async def found(self, act: Callable[[], Awaitable[_T]], *, at_once: bool = False) -> _T:
        """Call `act`, and believe "not found" only after `missing_s`, at least half a minute.

        Slow file systems give that answer for new files, and servers for everything while they
        start; wait for such a server as long as it takes. With `at_once`, wait only for that.

        Raises:
            SiteNotFound: the site has repeated the answer, and does not give it to all requests.
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
                    # The server may have finished starting only now: repeat the request once more.
                    proven = await self.believed(error)
            if not proven:
                await asyncio.sleep(wait)
                waited, wait = waited + wait, min(2 * wait, LONGEST_MISSING_WAIT_S)

    async def listed(self, act: Callable[[], Awaitable[Mapping[str, Entry]]]) -> dict[str, Entry]:
        """Return the entries that `act` lists; none if there is no such directory."""
        try:
            return dict(await self.found(act, at_once=True))
        except SiteNotFound:
            return {}

    async def insist(self, act: Callable[[], Awaitable[_T]]) -> _T:
        """Call `found`, but believe a refusal or a damaged download only after `insist_s`.

        Use it for the outputs of a succeeded job. A newly mounted file system denies permission for
        a moment, a gateway answers with a page of its own, and a download may be damaged.

        Raises:
            SiteNotFound: as `found` does.
            SiteRejected, TransferError: the site has refused, or returned other content, all along.
            OutputsLost: at once, since no other answer would help.
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
        """Check that a site that answers "not found" does not give that answer to all requests."""
        try:
            await self._proof()
        except SiteRejected:
            pass  # a refusal shows that the server is up
        except SiteError:
            self.failed(error)
            return False
        self.answered()
        return True

    def failed(self, error: Exception) -> None:
        """Record that the site did not answer, and report it when it is time to."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        silent = now - self._since
        if silent >= self._next_report_s:
            self._next_report_s = silent * 2
            if isinstance(error, SiteUnauthorized):
                self._notify(
                    f"Site {self._site} has not accepted the credentials for {silent:.0f} s; jobs"
                    f" there go on, and this run continues when it does. {error} Set new ones in"
                    f" the keyring (keyring set mantik:{self._site} NAME) or in files (NAME_FILE)."
                    " Or end this run (SIGTERM; Ctrl-C and d), set them and start again."
                )
                return
            self._notify(
                f"Site {self._site} has not answered for {silent:.0f} s; jobs there go on, and this"
                f" run continues when it does. {error}"
            )

    def _refused(self, error: Exception, silent: float) -> None:
        """Report a request that keeps failing while the site answers others."""
        now = self._clock()
        if self._refused_at is not None and now - self._refused_at > 4 * self._next_refusal_s:
            self._next_refusal_s = _FIRST_REFUSAL_S
        if silent < self._next_refusal_s or self._next_report_s > _FIRST_REPORT_S:
            return
        self._next_refusal_s, self._refused_at = silent * 2, now
        self._notify(
            f"Site {self._site} has failed a request for {silent:.0f} s; the request is repeated"
            f" until it succeeds. {error}"
        )

    def answered(self) -> None:
        """Record that the site answers, and report it if its silence was reported."""
        if self._since is not None and self._next_report_s > _FIRST_REPORT_S:
            silent = self._clock() - self._since
            self._notify(f"Site {self._site} answers again after {silent:.0f} s.")
        self._since = None
        self._next_report_s = _FIRST_REPORT_S

    def note(self, text: str) -> None:
        """Write a line to the user's log, once for each text."""
        if text not in self._noted:
            self._noted.add(text)
            self._notify(f"Site {self._site}: {text}")
