"""The connection to a firecREST server: pooled, verified, counted, with typed errors.

pyfirecrest makes the requests; this module gives it an HTTP client and adds what it lacks: typed
errors, tokens with enough time left, limits, and repetition of idempotent requests.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, TypeVar

import httpx

from snakemake_executor_plugin_mantik.common.errors import CredentialError, SiteUnauthorized
from snakemake_executor_plugin_mantik.config.values import is_loopback

from ..addresses import check_url, tls_context
from ..answers import server_time
from ..credentials import Credential
from ..issuers import issuer_error
from ..request_policy import longest_request_s, read_steadily, repeat_request
from .answers import closes_connection, firecrest_error
from .client import FirecrestClient, FirecrestSession, kind

_CONNECT_S: Final = 30.0
_IDLE_S: Final = 60.0
"""How long an idle connection is kept, seconds; one that the other side has closed meanwhile is
noticed before it is used again."""
_SETTLE_S: Final = 0.5
"""Pause before the next request after an answer with which the server drops the connection."""
JOB_CHANNELS: Final = 2
"""ssh channels that firecREST opens to query jobs: sacct and squeue run concurrently."""

_T = TypeVar("_T")


class FirecrestConnection:
    """Requests to one firecREST server, as one user.

    Attributes:
        requests: number of requests so far, by kind, repetitions included.
        clock: the server's clock in its last answer; None if it was not reported.
        client: pyfirecrest's client; use it through `ask` and `once`.
    """

    def __init__(
        self,
        site: str,
        url: str,
        credential: Credential,
        *,
        ca_file: Path | None,
        proxy: str | None,
        timeout_s: float,
        concurrent_requests: int,
    ) -> None:
        self.site = site
        self._timeout_s = timeout_s
        self.base = check_url(url, site, "Firecrest.ApiUrl")
        self.requests: Counter[str] = Counter()
        self.max_concurrency = concurrent_requests
        self._credential = credential
        self._sent: dict[str, str] = {}
        self._channels = _Channels(concurrent_requests)
        self._stores = asyncio.Semaphore(concurrent_requests)
        self._quiet_until = 0.0
        self.clock: float | None = None
        context = tls_context(ca_file, site)
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))
        self._session = FirecrestSession(
            look=self._look,
            verify=context,
            proxy=proxy,
            trust_env=not is_loopback(self.base),
            follow_redirects=False,
            timeout=timeout,
            limits=httpx.Limits(
                max_connections=3 * concurrent_requests,
                max_keepalive_connections=concurrent_requests,
                keepalive_expiry=_IDLE_S,
            ),
            event_hooks={"request": [self._count]},
        )
        self.client = FirecrestClient(
            self.base, self, tls=context, timeout=timeout, session=self._session
        )

    async def close(self) -> None:
        await self._session.aclose()

    async def auth_headers(self) -> Mapping[str, str]:
        """Return the authentication headers; pyfirecrest calls this before each request."""
        await self._credential.renew()
        self._sent = self._credential.headers()
        return self._sent

    async def ask(
        self,
        what: str,
        act: Callable[[FirecrestClient], Awaitable[_T]],
        *,
        channels: int = 1,
        size: int = 0,
        answered: bool = True,
    ) -> _T:
        """Make an idempotent request; repeat it where that may help.

        With `answered`, also repeat it after an answer that leaves the outcome unknown. See `once`
        for the other arguments.
        """
        return await repeat_request(
            lambda: self.once(what, act, channels=channels, size=size), answered=answered
        )

    async def once(
        self,
        what: str,
        act: Callable[[FirecrestClient], Awaitable[_T]],
        *,
        channels: int = 1,
        size: int = 0,
    ) -> _T:
        """Make a request; repeat it once, and only if its token was refused and there is another.

        `what` is its key in `requests`; `act` makes it with pyfirecrest's client. It takes
        `channels` ssh channels at the site, and carries a file of at most `size` bytes.
        """
        again = False
        async with self._channels.take(channels):
            while True:
                try:
                    result = await self._act(what, act, size)
                except SiteUnauthorized as error:
                    # 403 means that the user may not use the site: no other token changes that.
                    renewable = not again and error.status == httpx.codes.UNAUTHORIZED
                    if not renewable or not self._credential.refused(self._sent):
                        self._credential.advise(error)
                        raise
                    again = True
                else:
                    self._credential.accepted()
                    return result

    @asynccontextmanager
    async def download(
        self, url: str, offset: int
    ) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        """Open a download of an object in the site's store, from `offset` on, for the context."""
        async with self._stores:
            token = kind.set("download")
            try:
                with self._site_errors():
                    async with AsyncExitStack() as opened:
                        async with asyncio.timeout(self._timeout_s):
                            response = await opened.enter_async_context(
                                self.client.stream(url, offset)
                            )
                        yield response, read_steadily(response.aiter_raw(), self._timeout_s)
            finally:
                kind.reset(token)

    async def _act(
        self, what: str, act: Callable[[FirecrestClient], Awaitable[_T]], size: int
    ) -> _T:
        token = kind.set(what)
        try:
            with self._site_errors():
                while (wait := self._quiet_until - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                async with asyncio.timeout(longest_request_s(self._timeout_s, size)):
                    return await act(self.client)
        finally:
            kind.reset(token)

    async def _count(self, _request: httpx.Request) -> None:
        self.requests[kind.get()] += 1

    def _look(self, response: httpx.Response) -> None:
        if kind.get() != "download":  # its answer may be from the object store
            self.clock = server_time(response)
        if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR and closes_connection(
            response
        ):
            self._quiet_until = time.monotonic() + _SETTLE_S

    @contextmanager
    def _site_errors(self) -> Iterator[None]:
        """Turn errors of pyfirecrest and the HTTP client into site errors."""
        try:
            yield
        except CredentialError as error:
            raise issuer_error(error) from error
        except Exception as error:
            site_error = firecrest_error(error, self.site)
            if site_error is None:
                raise
            raise site_error from error


class _Channels:
    """The ssh channels that we use at the site: firecREST has one ssh connection per user.

    OpenSSH allows ten on one (MaxSessions), shared with the user's other firecREST clients.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = asyncio.Semaphore(count)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def take(self, number: int) -> AsyncIterator[None]:
        taken = 0
        try:
            # One at a time: otherwise two tasks may each hold a channel that the other waits for.
            async with self._turn:
                for _ in range(min(number, self._count)):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()
