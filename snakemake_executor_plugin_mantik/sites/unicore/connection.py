"""The connection to a UNICORE server: pooled, verified, counted, with typed errors.

pyunicore's `Transport` makes the requests (credentials, security sessions). This module gives it
one HTTP client for all of them and adds what it lacks: typed errors, checked downloads that keep
the session, a limit on concurrent requests, and repetition of idempotent requests.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from pyunicore.aio.client import Transport

from snakemake_executor_plugin_mantik.common.errors import (
    CredentialError,
    SiteError,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.config.values import is_loopback

from ..addresses import check_url, explain_tls_error, tls_context
from ..answers import MALFORMED, server_time
from ..credentials import Credential
from ..http import HttpClient
from ..issuers import issuer_error
from ..request_policy import longest_request_s, read_steadily, repeat_request
from .answers import SESSION_EXPIRED, unicore_error

_CONNECT_S: Final = 30.0
_IDLE_S: Final = 20.0
"""How long an idle connection is kept, seconds; shorter than servers' own limit, so that none is
reused just as the server closes it."""

_T = TypeVar("_T")
_JSON: Final = {"Accept": "application/json"}
_BYTES: Final = {"Accept": "application/octet-stream", "Accept-Encoding": "identity"}


class UnicoreConnection:
    """Requests to one UNICORE server, as one user.

    `requests` counts them by kind, repetitions included.
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
        self.base = check_url(url, site, "UnicoreApiUrl")
        self.requests: Counter[str] = Counter()
        self.max_concurrency = concurrent_requests
        self._site = site
        self._timeout_s = timeout_s
        self._credential = credential
        self.clock: float | None = None
        # Uploads and downloads have limits of their own: they must not block small requests.
        self._places = {
            "small": asyncio.Semaphore(concurrent_requests),
            "bulk": asyncio.Semaphore(concurrent_requests),
        }
        # Nor must uploads block downloads, without which no job ends.
        self._uploads = asyncio.Semaphore(max(1, concurrent_requests - 1))
        self._client = HttpClient(
            look=self._check,
            verify=tls_context(ca_file, site),
            proxy=proxy,
            trust_env=not is_loopback(self.base),
            follow_redirects=False,
            limits=httpx.Limits(
                max_connections=2 * concurrent_requests,
                max_keepalive_connections=concurrent_requests,
                keepalive_expiry=_IDLE_S,
            ),
            event_hooks={"request": [self._count]},
        )
        self._transport = Transport(
            credential,
            verify=True,
            timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s)),
            client=self._client,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(
        self, kind: str, path: str, params: Mapping[str, str | int] | None = None
    ) -> dict[str, Any]:
        """Return a resource's properties; repeat the request where that may help."""
        return await self.repeat(lambda: self._get_once(kind, path, params))

    async def _get_once(
        self, kind: str, path: str, params: Mapping[str, str | int] | None
    ) -> dict[str, Any]:
        response = await self.once(kind, "GET", path, headers=_JSON, params=dict(params or {}))
        return self.json_of(response)

    async def ask(self, kind: str, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Make an idempotent request; repeat it where that may help."""
        return await self.repeat(lambda: self.once(kind, method, path, **arguments))

    async def once(
        self, kind: str, method: str, path: str, *, size: int | None = None, **arguments: Any
    ) -> httpx.Response:
        """Make a request and return its successful answer; repeat it only with a new token.

        `kind` is its key in `requests`. `path` is below the base URL, percent-encoded. `size` is
        that of the file that it carries, if any. `arguments` are httpx's (json, content, params,
        headers).
        """
        send = getattr(self._client, method.lower())
        if size is None:
            async with self._places["small"]:
                return await self._run(send, kind, path, **arguments)
        async with self._uploads, self._places["bulk"]:
            return await self._run(send, kind, path, size=size, **arguments)

    @asynccontextmanager
    async def download(
        self, path: str, offset: int
    ) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        """Open a download of a file's bytes from `offset` on, for the context.

        The request is repeated where that may help; reading the answer is not.
        """
        headers = {**_BYTES, "Range": f"bytes={offset}-"} if offset else _BYTES
        async with self._places["bulk"]:
            response = await self.repeat(
                lambda: self._run(self._send_streaming, "download", path, headers=dict(headers))
            )
            try:
                with self._site_errors(path):
                    # As they come: with chunks of a fixed size, a broken connection would lose the
                    # bytes of an incomplete chunk.
                    yield response, read_steadily(response.aiter_raw(), self._timeout_s)
            finally:
                await response.aclose()

    async def repeat(self, act: Callable[[], Awaitable[_T]]) -> _T:
        return await repeat_request(act)

    def json_of(self, response: httpx.Response) -> dict[str, Any]:
        """Return the JSON object in `response`.

        Raises:
            SiteUnreachable: there is none: the answer is incomplete or not from UNICORE.
        """
        try:
            answer = response.json()
        except MALFORMED:
            answer = None
        if not isinstance(answer, dict):
            raise self.nonsense(response.request.url.path)
        return answer

    def nonsense(self, path: str) -> SiteUnreachable:
        return SiteUnreachable(
            f"the answer to {path} is not a valid answer from UNICORE",
            where=f"site {self._site}",
            do="Check UnicoreApiUrl: it ends with /rest/core",
        )

    async def _run(
        self,
        send: Callable[..., Awaitable[httpx.Response]],
        kind: str,
        path: str,
        *,
        size: int = 0,
        **arguments: Any,
    ) -> httpx.Response:
        """Make a request; repeat it once if its token was refused and there is another one."""
        again = False
        while True:
            with self._site_errors(path):
                await self._credential.renew()
                sent = self._credential.headers()
                try:
                    async with asyncio.timeout(longest_request_s(self._timeout_s, size)):
                        response: httpx.Response = await self._transport.run_method(
                            send, url=f"{self.base}{path}", extensions={"kind": kind}, **arguments
                        )
                except SiteUnauthorized:
                    if again or not self.another_token(sent):
                        raise
                    again = True
                else:
                    self._credential.accepted()
                    return response

    def another_token(self, refused: Mapping[str, str] | None = None) -> bool:
        """Check whether another token can be had than the refused one, by default the newest.

        UNICORE answers 403 if a token has expired by its own clock, or if it does not know the
        user.
        """
        refused = self._credential.headers() if refused is None else refused
        by_clock = self.clock is not None and self._credential.set_clock(self.clock)
        return self._credential.refused(refused) or by_clock

    async def _send_streaming(
        self, *, url: str, headers: dict[str, str], **arguments: Any
    ) -> httpx.Response:
        """Like `AsyncClient.get`, but leave the body to the caller."""
        request = self._client.build_request("GET", url, headers=headers, **arguments)
        response = await self._client.send(request, stream=True)
        if response.status_code == SESSION_EXPIRED:
            await response.aclose()  # pyunicore repeats the request and drops this answer
        return response

    async def _count(self, request: httpx.Request) -> None:
        self.requests[request.extensions.get("kind", "other")] += 1

    def _check(self, response: httpx.Response) -> None:
        self.clock = server_time(response)
        if error := unicore_error(response, self._site):
            raise error

    @contextmanager
    def _site_errors(self, path: str) -> Iterator[None]:
        """Turn errors of the HTTP client into site errors."""
        where = f"site {self._site}"
        try:
            yield
        except SiteUnauthorized as error:
            self._credential.advise(error)
            raise
        except CredentialError as error:
            raise issuer_error(error) from error
        except httpx.HTTPError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            do = explain_tls_error(error)[1] or "Check UnicoreApiUrl and the network"
            what = f"no answer from {self.base}{path}: {reason}"
            raise SiteUnreachable(what, where=where, do=do) from error
        except TimeoutError as error:
            what = f"no answer from {self.base}{path} in time"
            raise SiteUnreachable(what, where=where, do="Check the network") from error
        except httpx.InvalidURL as error:
            raise SiteUnreachable(f"{error}", where=where, do="Check UnicoreApiUrl") from error


def not_authorized(site: str, what: str) -> SiteError:
    """Make the error for credentials that UNICORE accepts without granting access."""
    return SiteUnauthorized(
        what,
        where=f"site {site}",
        do="Check the credentials, and whether this account may use the site",
    )
