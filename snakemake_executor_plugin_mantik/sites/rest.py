"""What sites behind REST APIs share: requests, their repetition and their pace.

One HTTP client per server serves all requests of a user: pooled, verified, counted, with typed
errors, new tokens in place of old ones, and limits on concurrent requests.
"""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import httpx
import stamina

from ..common.errors import (
    PACKAGE,
    CredentialError,
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from ..config.settings import SiteSettings
from ..config.values import is_loopback
from ..jobs.paths import path_at_site
from ..jobs.pools import Allocation
from .authentication import Credential
from .base import Entry, JobState, Phase
from .http import (
    MALFORMED,
    Meaning,
    Pattern,
    body_of,
    explain_tls_error,
    is_from_gateway,
    judge,
    read_answer,
    retry_after,
    server_time,
    shorten,
    tls_context,
)

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
_CONNECT_S: Final = 30.0

# stamina warns of each repetition; the caller reports an error that stays.
logging.getLogger("stamina").addHandler(logging.NullHandler())

_T = TypeVar("_T")
C = TypeVar("C", bound="Connection")
O = TypeVar("O", bound="Opened")  # noqa: E741


async def repeat_request(act: Callable[[], Awaitable[_T]], *, answered: bool = True) -> _T:
    """Call `act`, and repeat it a few times if the site is busy or cannot be reached.

    With `answered`, also repeat it after an answer that leaves the outcome unknown.
    """

    def worth(error: Exception) -> bool | float:
        if isinstance(error, SiteBusy) and error.retry_after is not None:
            return error.retry_after if error.retry_after < _REPEAT_S else False
        if isinstance(error, SiteUnreachable):
            return answered or error.status is None
        return isinstance(error, SiteBusy)

    repeat = stamina.AsyncRetryingCaller(
        attempts=REPEAT_ATTEMPTS,
        timeout=_REPEAT_S,
        wait_initial=REPEAT_FIRST_S,
        wait_max=REPEAT_LONGEST_S,
        wait_jitter=REPEAT_FIRST_S,
    )
    return await repeat(worth, act)


class Connection(ABC):
    """Requests to one server, as one user.

    Attributes:
        requests: number of requests so far, by kind, repetitions included.
        clock: the server's clock in its last answer; None if it was not reported.
    """

    product: ClassVar[str]
    """Name of the server's software, for errors."""
    url_key: ClassVar[str]
    """Key of the backend config that holds the URL."""
    nonsense_advice: ClassVar[str]
    """What to do about an answer that is not the server's."""
    patterns: ClassVar[tuple[Pattern, ...]]
    """Texts of error answers; the first match counts."""
    idle_s: ClassVar[float]
    """How long an idle connection is kept, seconds."""

    def __init__(
        self, site: str, url: str, credential: Credential, settings: SiteSettings, base: Path
    ) -> None:
        """Prepare; a relative CA file is relative to `base`. See `RestSite`."""
        self.where = f"site {site}"
        self.base = url.rstrip("/")
        self.requests: Counter[str] = Counter()
        self.clock: float | None = None
        timing = settings.timing
        self.max_concurrency = timing.concurrent_requests
        self._timeout_s = timing.timeout_s
        self._credential = credential
        self._client = httpx.AsyncClient(
            headers={"User-Agent": f"{PACKAGE}/{metadata.version(PACKAGE)}"},
            verify=tls_context(base / settings.ca_file if settings.ca_file else None, site),
            proxy=settings.proxy,
            trust_env=not is_loopback(self.base),
            follow_redirects=False,
            timeout=httpx.Timeout(self._timeout_s, connect=min(_CONNECT_S, self._timeout_s)),
            limits=httpx.Limits(
                max_connections=3 * self.max_concurrency,
                max_keepalive_connections=self.max_concurrency,
                keepalive_expiry=self.idle_s,
            ),
        )

    @abstractmethod
    def text_of(self, response: httpx.Response) -> str:
        """Return the server's own words in an error answer, on one line."""

    def _is_foreign(self, response: httpx.Response) -> bool:
        """Check whether an error answer is that of a gateway before the server."""
        return is_from_gateway(response)

    def error_of(self, response: httpx.Response) -> SiteError | None:
        """Return the error in a `response`, fully read unless it is a success; None for none.

        An answer that is not the server's own (a web page of a proxy or a login portal) proves
        nothing, whatever its status.
        """
        meaning, do = Meaning.UNKNOWN, f"Check {self.url_key}"
        # Downloads always have another content type.
        if response.headers.get("Content-Type", "").startswith("text/html"):
            text = f"a web page instead of an answer from {self.product}"
            do += " and the network (proxy, VPN, a login page)"
        elif response.is_success:
            return None
        elif response.status_code < 400:
            # The query may hold a secret of a login.
            target = response.headers.get("Location", "elsewhere").partition("?")[0]
            text = f"a redirect to {target}"
        else:
            text = self.text_of(response)
            meaning, do = judge(response, text, self.patterns, foreign=self._is_foreign(response))
        # Shortened only now, so that all of it was classified.
        request, text = response.request, shorten(text)
        what = f"{request.method} {request.url.path} was answered with {response.status_code}"
        wait = None
        if meaning is Meaning.RETRY:
            wait = retry_after(response.headers.get("Retry-After"), server_time(response))
        kind: type[SiteError] = meaning.value
        return kind(
            f"{what}: {text}" if text else what,
            where=self.where, do=do, status=response.status_code, retry_after=wait,
        )  # fmt: skip

    @abstractmethod
    def _slot(self, size: int | None, channels: int) -> AbstractAsyncContextManager[None]:
        """Wait for the right to make a request, and hold it for the context."""

    async def close(self) -> None:
        await self._client.aclose()

    async def get(
        self,
        kind: str,
        path: str,
        params: Mapping[str, str | int] | None = None,
        *,
        channels: int = 1,
        answered: bool = True,
    ) -> dict[str, Any]:
        """Return the JSON object at `path`; repeat the request where that may help.

        With `answered`, also repeat it after an answer that leaves the outcome unknown.
        """

        async def act() -> dict[str, Any]:
            response = await self.once(
                kind, "GET", path, channels=channels, params=dict(params or {})
            )
            return self.json_of(response)

        return await repeat_request(act, answered=answered)

    async def ask(self, kind: str, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Make an idempotent request; repeat it where that may help."""
        return await repeat_request(lambda: self.once(kind, method, path, **arguments))

    async def once(
        self,
        kind: str,
        method: str,
        path: str,
        *,
        size: int | None = None,
        channels: int = 1,
        **arguments: Any,
    ) -> httpx.Response:
        """Make a request and return its successful answer; repeat it only with a new token.

        `kind` is its key in `requests`. `path` is below the base URL, percent-encoded. `size` is
        that of the file that it carries, if any. It takes `channels` ssh channels at the site,
        where these are scarce. `arguments` are httpx's (json, content, params, headers).
        """
        async with self._slot(size, channels):
            return await self._send(kind, method, path, size=size or 0, **arguments)

    async def _send(
        self,
        kind: str,
        method: str,
        path: str,
        *,
        size: int = 0,
        stream: bool = False,
        headers: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> httpx.Response:
        """Make a request; repeat it once if its token was refused and there is another one."""
        again = False
        while True:
            with self._errors(f"{self.base}{path}"):
                await self._credential.renew()
                sent = self._credential.headers()
                try:
                    async with asyncio.timeout(_longest_request_s(self._timeout_s, size)):
                        response = await self._exchange(
                            method,
                            f"{self.base}{path}",
                            {"Accept": "application/json", **sent, **(headers or {})},
                            stream=stream,
                            extensions={"kind": kind},
                            **arguments,
                        )
                except SiteUnauthorized as error:
                    if again or not self._renewable(error) or not self.another_token(sent):
                        raise
                    again = True
                else:
                    self._credential.accepted()
                    return response

    async def _exchange(
        self, method: str, url: str, headers: dict[str, str], *, stream: bool, **arguments: Any
    ) -> httpx.Response:
        """Make one request; a streamed answer has no body yet if it is a success."""
        request = self._client.build_request(method, url, headers=headers, **arguments)
        self.requests[request.extensions["kind"]] += 1
        response = await self._client.send(request, stream=True)
        try:
            if not stream or not response.is_success:
                response = await read_answer(response)
            self._look(response)
        except BaseException:
            await response.aclose()
            raise
        return response

    def _renewable(self, error: SiteUnauthorized) -> bool:  # noqa: ARG002 - a hook
        """Check whether a new token may be accepted after this refusal."""
        return True

    def another_token(self, refused: Mapping[str, str] | None = None) -> bool:
        """Check whether another token can be had than the refused one, by default the newest."""
        refused = self._credential.headers() if refused is None else refused
        by_clock = self.clock is not None and self._credential.set_clock(self.clock)
        return self._credential.refused(refused) or by_clock

    @asynccontextmanager
    async def read(
        self, name: str, begin: Callable[[], Awaitable[httpx.Response]]
    ) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        """Open a download for the context: a streamed answer, and its bytes as they come.

        `name` stands for its address in errors. Chunks have no fixed size: a broken connection
        would lose the bytes of an incomplete one.
        """
        response = await begin()
        try:
            with self._errors(name):
                yield response, _read_steadily(response.aiter_raw(), self._timeout_s)
        finally:
            await response.aclose()

    def check_range(self, response: httpx.Response, path: str, offset: int) -> None:
        """Raise `SiteUnreachable` unless a download begins at `offset`."""
        if response.status_code != (206 if offset else 200):
            raise SiteUnreachable(
                f"{path}: status {response.status_code} instead of its bytes from {offset} on",
                where=self.where,
                status=response.status_code,
            )

    def json_of(self, response: httpx.Response) -> dict[str, Any]:
        """Return the JSON object in `response`; without one it is no answer of the server's."""
        if (answer := body_of(response)) is None:
            raise self.nonsense(response.request.url.path)
        return answer

    def refusal(self, what: str, do: str = "") -> SiteRejected:
        return SiteRejected(what, where=self.where, do=do)

    def nonsense(self, path: str) -> SiteUnreachable:
        return SiteUnreachable(
            f"the answer to {path} is not a valid answer from {self.product}",
            where=self.where,
            do=self.nonsense_advice,
        )

    @contextmanager
    def parsing(self, path: str) -> Iterator[None]:
        """Turn errors of parsing the answer to a request of `path` into a site error."""
        try:
            yield
        except (*MALFORMED, AttributeError) as error:
            raise self.nonsense(path) from error

    def _look(self, response: httpx.Response) -> None:
        self.clock = server_time(response)
        if error := self.error_of(response):
            raise error

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn errors of the HTTP client into site errors; `name` is the address in them."""
        try:
            yield
        except SiteUnauthorized as error:
            self._credential.advise(error)
            raise
        except CredentialError as error:
            # It ends a run at its start, but not running jobs: the run waits until the issuer
            # accepts the credentials, or the user replaces them.
            raise SiteUnauthorized(error.what, where=error.where, do=error.do) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            do = explain_tls_error(error)[1] or f"Check {self.url_key} and the network"
            what = f"no answer from {name}: {reason}"
            raise SiteUnreachable(what, where=self.where, do=do) from error
        except TimeoutError as error:
            what = f"no answer from {name} in time"
            raise SiteUnreachable(what, where=self.where, do="Check the network") from error


def _longest_request_s(timeout_s: float, size: int = 0) -> float:
    """Return the maximum seconds of a request that carries `size` bytes of a file."""
    return timeout_s * (1 + size / _SLOW_BYTES)


async def _read_steadily(chunks: AsyncIterator[bytes], timeout_s: float) -> AsyncIterator[bytes]:
    """Yield the chunks of a download; raise `TimeoutError` if they come too slowly, or stop."""
    clock = asyncio.get_running_loop().time
    came, waited = 0, 0.0
    while True:
        started = clock()
        async with asyncio.timeout(_longest_request_s(timeout_s, came) - waited):
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


@dataclass(frozen=True)
class Opened:
    """What is known of an open site; `root` is the workspace's path as the API takes it."""

    root: str


class RestSite(Generic[C, O]):
    """A site with its connection; `_open` has what is known of it once it was opened."""

    connection: ClassVar[type[Connection]]
    refused: ClassVar[re.Pattern[str]]
    """Characters that the API cannot carry in paths."""
    plain: ClassVar[str]
    """The others, as advice."""
    notify: Callable[[str], None] | None = None
    record: Callable[[Allocation], None] | None = None

    def __init__(
        self,
        name: str,
        url: str,
        credential: Credential,
        workspace_name: str,
        settings: SiteSettings,
        *,
        base: Path | None = None,
    ) -> None:
        """Prepare a site; `open` makes the first request.

        `url` is the base of the REST API. `workspace_name` is used if the workspace's path is not
        configured. `base` is the directory of a relative CA file, by default the current one.

        Raises:
            UserError: the CA file cannot be used.
            SiteRejected: `workspace_name` is not valid.
        """
        if "/" in workspace_name or not self.can_carry(workspace_name):
            raise SiteRejected(f"{workspace_name!r} is not a valid workspace name", where=name)
        self.name = name
        self._workspace_name = workspace_name
        self._settings = settings
        connection = self.connection(name, url, credential, settings, base or Path())
        self._connection: C = connection  # type: ignore[assignment] # the subclass names it
        self._where = connection.where
        self._opened: O | None = None
        # However many submissions wait, one request slot of at least two stays free for watching,
        # fetching and cancelling.
        self._submitting = asyncio.Semaphore(max(1, connection.max_concurrency - 1))
        self._next_submission = 0.0

    @property
    def requests(self) -> Counter[str]:
        """Number of HTTP requests so far, by kind."""
        return self._connection.requests

    @property
    def clock(self) -> float | None:
        return self._connection.clock

    @property
    def _open(self) -> O:
        if self._opened is None:
            raise RuntimeError(f"site {self.name} was not opened")
        return self._opened

    async def close(self) -> None:
        await self._connection.close()

    @classmethod
    def can_carry(cls, path: str) -> bool:
        """Check whether the API can carry `path`, which is relative to the workspace."""
        return not ({"", ".", ".."} & set(path.split("/")) or cls.refused.search(path))

    def _checked(self, path: str) -> str:
        """Return the path; raise `SiteRejected` if the API cannot carry it."""
        if not self.can_carry(path):
            what = f"{self._connection.product} cannot carry the path {path!r}"
            raise self._connection.refusal(what, self.plain)
        return path

    def _at(self, path: str) -> str:
        """Return a path that the API can carry as it takes it; `.` is the workspace itself."""
        root = self._open.root
        return root if path in (".", "") else path_at_site(root, self._checked(path))

    async def stat(self, path: str) -> Entry | None:
        raise NotImplementedError

    async def _reachable(self, path: str, offset: int) -> Entry:
        """Return the entry of a file that has `offset` bytes at least.

        Raises:
            SiteNotFound: there is no such file.
            SiteRejected: it is a directory, or shorter.
        """
        entry = await self.stat(path)
        if entry is None:
            raise SiteNotFound(f"there is no file {path}", where=self._where)
        if entry.directory:
            raise self._connection.refusal(f"{path} is a directory")
        if offset > entry.size:
            raise self._connection.refusal(f"{path} has {entry.size} bytes, less than {offset}")
        return entry

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for a submission's turn, and hold its slot for the context."""
        async with self._submitting:
            now = time.monotonic()
            turn = max(now, self._next_submission)
            self._next_submission = turn + 1 / self._settings.timing.submissions_per_second
            if turn > now:
                await asyncio.sleep(turn - now)
            yield

    async def _all(
        self, ids: Sequence[str], act: Callable[[str], Awaitable[_T]]
    ) -> dict[str, _T | SiteError]:
        return await ask_all(ids, act, self._connection.max_concurrency)

    async def _each(self, ids: Sequence[str], act: Callable[[str], Awaitable[object]]) -> None:
        """Call `act` for all jobs concurrently; ignore missing jobs, raise the first error."""
        for answer in (await self._all(ids, act)).values():
            if isinstance(answer, SiteError) and not isinstance(answer, SiteNotFound):
                raise answer


def states_of(
    answers: Mapping[str, JobState | SiteError], asked: int | None = None
) -> dict[str, JobState]:
    """Return the states in answers about jobs, of `asked` that were asked about, by default all.

    Raises:
        SiteError: all answers are errors, or one refuses the credentials.
    """
    errors = [answer for answer in answers.values() if isinstance(answer, SiteError)]
    for error in errors:
        if isinstance(error, SiteUnauthorized):
            raise error
    if errors and len(errors) == (len(answers) if asked is None else asked):
        raise errors[0]
    return {
        job_id: JobState(Phase.UNKNOWN, detail=answer.what)
        if isinstance(answer, SiteError)
        else answer
        for job_id, answer in answers.items()
    }
