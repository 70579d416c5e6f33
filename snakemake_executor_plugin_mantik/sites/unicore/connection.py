"""The connection to a UNICORE server, its error texts, and the paths of its storages.

UNICORE answers nearly every failure with 500 and a text (RESTRendererBase.handleError), so some
texts have to be recognised: they are in one table, and a test checks it against answers of a real
server.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

import httpx

from ...common.errors import SiteError
from ..http import OF_FILES, Meaning, Pattern, body_of
from ..rest import Connection, Opened, repeat_request

SESSION_EXPIRED: Final = 432
_SESSION: Final = "X-UNICORE-SecuritySession"
_BYTES: Final = {"Accept": "application/octet-stream", "Accept-Encoding": "identity"}

_ERROR_TEXTS = (
    # The TSI (UNICORE's daemon on the login node) is away: it may be back soon.
    Pattern(r"TSIUnavailableException|TSI (is )?(currently )?unavailable", Meaning.UNKNOWN),
    # A restarted server answers so to submissions, some of which it has carried out.
    Pattern(r"ResourceUnknownException", Meaning.UNKNOWN),
    # With 401, and without a text about credentials. For some seconds after its start a server
    # knows no system to run jobs on; for users who may not use any, this never ends.
    Pattern(
        r"no accessible targetsystem factories",
        Meaning.RETRY,
        "A server that has just started reports this for a while; if it goes on, ask the site "
        "whether your account may submit jobs",
    ),
    # container.services.maxInstancesPerUser: no instance was made.
    Pattern(r"Limit of <?\d+>? instances", Meaning.RETRY),
    Pattern(r"submission is (currently )?disabled|submission disabled", Meaning.RETRY),
    # Schedulers forget a job some minutes after its end.
    Pattern(r"Invalid job id specified|Unknown Job Id", Meaning.NOT_FOUND),
    *OF_FILES,
    Pattern(r"JSONException", Meaning.REJECTED),
    Pattern(r"Illegal permissions string|URISyntaxException", Meaning.REJECTED),
)
"""Texts of `errorMessage`; the first match counts."""

_ECHO: Final = re.compile(r"Command '.*' failed with code (?P<code>\d+): ", re.DOTALL)
"""A TSI's prefix of the output of a failed command: the whole script, with colons for newlines."""
_REPORTED: Final = re.compile(r"[:\s]*\(Command execution on TSI reported an error\)\s*$")


def root_cause(text: str) -> str:
    """Return a server's text on one line, without the script that a TSI repeats in it.

    The script may be as long as a job's; the cause comes after it.
    """
    text = _ECHO.sub(r"command failed with code \g<code>: ", text)
    return " ".join(_REPORTED.sub("", text).split())


class UnicoreConnection(Connection):
    """Requests to one UNICORE server, in one security session, as one user."""

    product = "UNICORE"
    url_key = "UnicoreApiUrl"
    nonsense_advice = "Check UnicoreApiUrl: it ends with /rest/core"
    patterns = _ERROR_TEXTS
    # Shorter than servers' own limit, so that none is reused just as the server closes it.
    idle_s = 20.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        number = self.max_concurrency
        self._session = ""
        # Uploads and downloads have limits of their own: they must not block small requests.
        self._small, self._bulk = asyncio.Semaphore(number), asyncio.Semaphore(number)
        # Nor must uploads block downloads, without which no job ends.
        self._uploads = asyncio.Semaphore(max(1, number - 1))

    @asynccontextmanager
    async def _slot(self, size: int | None, channels: int) -> AsyncIterator[None]:  # noqa: ARG002
        if size is None:
            async with self._small:
                yield
        else:
            async with self._uploads, self._bulk:
                yield

    @asynccontextmanager
    async def download(
        self, path: str, offset: int
    ) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        """Open a download of a file's bytes from `offset` on, for the context.

        The request is repeated where that may help; reading the answer is not.
        """
        headers = {**_BYTES, "Range": f"bytes={offset}-"} if offset else _BYTES

        async def begin() -> httpx.Response:
            return await repeat_request(
                lambda: self._send("download", "GET", path, headers=headers, stream=True)
            )

        async with self._bulk, self.read(f"{self.base}{path}", begin) as opened:
            yield opened

    async def _exchange(
        self, method: str, url: str, headers: dict[str, str], *, stream: bool, **arguments: Any
    ) -> httpx.Response:
        if self._session:
            headers = {**headers, _SESSION: self._session}
        response = await super()._exchange(method, url, headers, stream=stream, **arguments)
        if response.status_code == SESSION_EXPIRED:
            del headers[_SESSION]
            response = await super()._exchange(method, url, headers, stream=stream, **arguments)
        self._session = response.headers.get(_SESSION, "")
        return response

    def error_of(self, response: httpx.Response) -> SiteError | None:
        if response.status_code == SESSION_EXPIRED and _SESSION in response.request.headers:
            return None
        return super().error_of(response)

    def text_of(self, response: httpx.Response) -> str:
        return root_cause(str((body_of(response) or {}).get("errorMessage", response.text)))


def urls_in(answer: Mapping[str, Any], key: str) -> list[str]:
    """Return the URLs that an answer lists under `key`."""
    urls = answer.get(key)
    return [str(url) for url in urls] if isinstance(urls, list) else []


def last_part(url: object) -> str:
    """Return the id at the end of a URL. The rest is not used: it may have another host name."""
    return str(url).rstrip("/").rpartition("/")[2]


def parse_server_time(text: str) -> float:
    """Return the seconds since the epoch of a UNICORE date (`2026-11-24T09:05:54+0000`)."""
    return datetime.fromisoformat(text).timestamp()


def files_url(storage: str, path: str) -> str:
    """Return the URL path of a file in a storage; `path` is relative to its mount point."""
    return f"/storages/{quote(storage, safe='')}/files/{quote(path)}"


@dataclass(frozen=True)
class UnicoreOpened(Opened):
    """What is known of an open site; its workspace is relative to the storage's mount point.

    Attributes:
        storage: name of the storage that holds the workspace.
        server: product and version.
        known: names of the resources that each queue supports.
    """

    storage: str
    server: str
    known: Mapping[str, frozenset[str]]
