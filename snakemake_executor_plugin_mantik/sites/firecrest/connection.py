"""The connection to a firecREST server, its error texts, and what is known of an open site.

firecREST runs commands over ssh and answers with their output, mostly as 500, so some texts have to
be recognised: they are in one table, and a test checks it against answers of a real server.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from ...common.errors import SiteUnauthorized
from ..http import OF_FILES, Meaning, Pattern, body_of, is_from_gateway
from ..rest import Connection, Opened
from ..slurm import TOO_MANY_JOBS
from .script import SchedulerName

_STORE: Final = "the site's object store"
_ZONE_STEP_S: Final = 900
_SETTLE_S: Final = 0.5
"""Pause before the next request after an answer with which the server drops the connection."""
MAX_OPS_BYTES: Final = 5 << 20
"""Largest file that is transferred directly if a server reports no limit (its own default)."""
_ERROR_TEXTS: Final = (
    # A command with input (submission, upload) took longer than 5 s: it may go on.
    Pattern(r"Channel not open for sending", Meaning.UNKNOWN),
    # MaxSessions of the login node's sshd: the user's other clients count as well.
    Pattern(r"Unable to open a new SSH channel", Meaning.RETRY),
    Pattern(r"is unhealthy", Meaning.RETRY),
    Pattern(
        r"No SSH credentials found",
        Meaning.CREDENTIALS,
        "Ask the site to enable firecREST for your account",
    ),
    # scancel and qdel of jobs that are over.
    Pattern(
        r"already completing or completed|Invalid job id specified|Unknown Job.?Id|"
        r"Job has finished",
        Meaning.NOT_FOUND,
    ),
    Pattern(TOO_MANY_JOBS.pattern, Meaning.RETRY),
    Pattern(
        r"accounting/QOS policy limit exceeded|\b(QOS|Assoc)(Max|Min|Grp)\w*Limit",
        Meaning.REJECTED,
        "Request less, or use another account, queue or QoS",
    ),
    # The scheduler does not answer: a submission may have reached it.
    Pattern(
        r"Socket timed out|Unable to contact slurm controller|temporarily unable to accept|"
        r"Resource temporarily unavailable|Communication failure|cannot connect to server",
        Meaning.UNKNOWN,
    ),
    Pattern(r"sbatch: (error|fatal)|\bqsub: ", Meaning.REJECTED, "Check the job's resources"),
    *OF_FILES,
    Pattern(r"No such file or directory|Job not found", Meaning.NOT_FOUND),
    Pattern(r"System not found", Meaning.REJECTED, "Check Machine in the backend config"),
    Pattern(
        r"Account parameter is required",
        Meaning.REJECTED,
        "Set MANTIK_COMPUTE_BUDGET_ACCOUNT: large files go through jobs at this site",
    ),
)
"""Texts of `message` and `causedBy`; the first match counts."""


class FirecrestConnection(Connection):
    """Requests to one firecREST server, as one user."""

    product = "firecREST v2"
    url_key = "Firecrest.ApiUrl"
    nonsense_advice = "Check Firecrest.ApiUrl and the network (proxy, VPN, a login page)"
    patterns = _ERROR_TEXTS
    # One that the other side has closed meanwhile is noticed before it is used again.
    idle_s = 60.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._channels = _Channels(self.max_concurrency)
        self._stores = asyncio.Semaphore(self.max_concurrency)
        self._quiet_until = 0.0

    def _slot(self, size: int | None, channels: int) -> AbstractAsyncContextManager[None]:  # noqa: ARG002
        return self._channels.take(channels)

    @asynccontextmanager
    async def download(
        self, url: str, offset: int
    ) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        """Open a download of an object in the site's store, from `offset` on, for the context."""
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"

        async def begin() -> httpx.Response:
            with self._errors(_STORE):
                async with asyncio.timeout(self._timeout_s):
                    return await super(FirecrestConnection, self)._exchange(
                        "GET", url, headers, stream=True, extensions={"kind": "download", _STORE: 1}
                    )

        async with self._stores, self.read(_STORE, begin) as opened:
            yield opened

    async def _exchange(
        self, method: str, url: str, headers: dict[str, str], *, stream: bool, **arguments: Any
    ) -> httpx.Response:
        while (wait := self._quiet_until - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        return await super()._exchange(method, url, headers, stream=stream, **arguments)

    def _renewable(self, error: SiteUnauthorized) -> bool:
        # 403 means that the user may not use the site: no other token changes that.
        return error.status == httpx.codes.UNAUTHORIZED

    def _look(self, response: httpx.Response) -> None:
        if _STORE in response.request.extensions:
            return
        if closes_connection(response):
            self._quiet_until = time.monotonic() + _SETTLE_S
        super()._look(response)

    def _is_foreign(self, response: httpx.Response) -> bool:
        missing = response.status_code == httpx.codes.NOT_FOUND
        return is_from_gateway(response) or (missing and "errorType" not in _body(response))

    def text_of(self, response: httpx.Response) -> str:
        body = _body(response)
        caused = body.get("causedBy")
        parts = [body.get("message"), *(caused if isinstance(caused, list) else [])]
        text = " ".join(str(part) for part in parts if part) if body else response.text
        return " ".join(text.split())


def _body(response: httpx.Response) -> dict[str, Any]:
    return body_of(response) or {}


def closes_connection(response: httpx.Response) -> bool:
    """Check whether the server closes the connection after this answer (measured).

    After an error that it did not handle itself (its own 500 names no user), uvicorn drops the
    connection a little later: the next request on it is reset.
    """
    return (
        response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
        and _body(response).get("user") is None
    )


def zone_offset(told: str, modified: int) -> float:
    """Return the seconds that the site's local time is ahead of UTC.

    firecREST lists times in local time without a zone; `told` and `modified` are the times of the
    same file, local and since the epoch.
    """
    difference = local_time(told) - modified
    return float(round(difference / _ZONE_STEP_S) * _ZONE_STEP_S)


def local_time(told: str) -> float:
    """Return the seconds since the epoch of a listing's time as if it were UTC."""
    return datetime.fromisoformat(told).replace(tzinfo=UTC).timestamp()


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
        async with AsyncExitStack() as taken:
            # One at a time: otherwise two tasks may each hold a channel that the other waits for.
            async with self._turn:
                for _ in range(min(number, self._count)):
                    await taken.enter_async_context(self._free)
            yield


@dataclass(frozen=True)
class FileSystem:
    """A file system of a system; users have directories with their names below `path`.

    `kind` is `scratch`, `users`, `project`, `store`, ... The server puts its own files in the
    default.
    """

    path: str
    kind: str
    default: bool


@dataclass(frozen=True)
class FirecrestSystem:
    """One system, as the server describes it.

    Attributes:
        server: product and version.
        direct_bytes: largest file that is uploaded directly.
        transfer: method for larger ones (`s3`, `streamer`, `wormhole`), empty if there is none.
        directives: first lines of its transfer jobs; may hold `{account}`.
        unhealthy: the services that the server reports as unhealthy, a line each.
    """

    name: str
    scheduler: SchedulerName
    server: str
    file_systems: tuple[FileSystem, ...]
    direct_bytes: int = MAX_OPS_BYTES
    transfer: str = ""
    directives: tuple[str, ...] = ()
    unhealthy: tuple[str, ...] = ()

    def is_since(self, first: tuple[int, int]) -> bool:
        """Check the server's version; an unknown one counts as new."""
        version = re.search(r"(\d{1,4})\.(\d{1,4})\.\d", self.server)
        return version is None or tuple(map(int, version.groups())) >= first

    @property
    def lists_by_time(self) -> bool:
        """Whether lists of jobs can be limited to a span of time, since 2.6 (its CHANGELOG)."""
        return self.is_since((2, 6))


@dataclass(frozen=True)
class FirecrestUser:
    """The user's login name and accounts at the site, as far as the server reports them.

    `account` is the scheduler's default account.
    """

    name: str
    account: str = ""
    accounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirecrestOpened(Opened):
    """What is known of an open site."""

    system: FirecrestSystem
    user: FirecrestUser
