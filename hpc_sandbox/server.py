"""A running sandbox: sites behind one HTTP server."""

import asyncio
import fcntl
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .answers import empty, no_service
from .faults import Fault, FaultMiddleware, Faults, Protocol, doom_connection, reset_if_doomed
from .firecrest.site import FirecrestServer
from .scheduler import LocalScheduler
from .settings import SandboxError, SandboxSettings, SiteOption
from .site import Site
from .tsi import Tsi
from .unicore import UnicoreServer

_START_TIMEOUT = 30.0
"""Seconds to wait for the start of the server's thread, or for a call in it."""

_GOODBYE = 1
"""Seconds that open requests have to finish when the sandbox stops."""

_T = TypeVar("_T")


class Sandbox:
    """Sites on this machine behind one HTTP server on loopback, as a context manager.

    The server runs in its own thread. On exit no process of any job is left, unless a real Slurm
    fails to end it in time.

    Attributes:
        directory: contains a directory per site.
        token: bearer token of the control endpoints below `/sandbox/`.
    """

    def __init__(
        self,
        directory: Path,
        sites: Sequence[SiteOption] = (SiteOption("hpc1"),),
        settings: SandboxSettings | None = None,
    ) -> None:
        """Prepare a sandbox in `directory`, which `with` creates if it does not exist."""
        self.directory = directory
        self.options = tuple(sites)
        self.settings = settings or SandboxSettings()
        self.faults = Faults()
        self.token = secrets.token_urlsafe(24)
        self._sites: dict[str, Site] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    # --- for users -----------------------------------------------------------------------------

    def site(self, name: str) -> Site:
        """Return a site; use it only inside the loop, through `call`."""
        return self._sites[name]

    def url(self, name: str) -> str:
        return self._sites[name].url

    def credentials(self, name: str) -> tuple[str, str]:
        """Return user name and password of a site, or client id and secret for firecREST."""
        return self._sites[name].credentials()

    def record(self, name: str) -> dict[str, Any]:
        """Return a site's record: `requests`, `jobs`, `runs`."""
        return self.call(self._sites[name].recorded)

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function in the sandbox's loop from another thread, and return its result."""

        async def run() -> _T:
            return function()

        return self._wait(run())

    def cancel_job(self, name: str, scheduler_id: int) -> None:
        """Cancel a job without the API, as scancel does."""
        self._wait(self.site(name).scheduler.cancel(scheduler_id))

    def fail_node(self, name: str, scheduler_id: int) -> None:
        self._wait(self.site(name).scheduler.fail_node(scheduler_id))

    def expire_job(self, name: str, scheduler_id: int) -> None:
        """Let a job's walltime be over now."""
        self._wait(self.local_scheduler(name).expire(scheduler_id))

    def limit_jobs(self, name: str, most: int | None) -> None:
        """Make a site's local scheduler refuse more waiting and running jobs than `most`."""
        self.local_scheduler(name).max_submit_jobs = most

    def local_scheduler(self, name: str) -> LocalScheduler:
        scheduler = self.site(name).scheduler
        assert isinstance(scheduler, LocalScheduler)
        return scheduler

    def tsi(self, name: str) -> Tsi:
        site = self.site(name)
        assert isinstance(site, UnicoreServer)
        return site.tsi

    @contextmanager
    def tsi_down(self, name: str) -> Iterator[None]:
        """Make the TSI of a UNICORE site unavailable inside `with`."""
        tsi = self.tsi(name)
        tsi.up = False
        try:
            yield
        finally:
            tsi.up = True

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_TIMEOUT)

    # --- running -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        listener = self._listen()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, ready)), name="sandbox", daemon=True
        )
        self._thread.start()
        if not ready.wait(_START_TIMEOUT):
            raise TimeoutError("the sandbox did not start")
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
            self._lock.close()

    def _listen(self) -> socket.socket:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory = self.directory.resolve()
        self._lock = (self.directory / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise SandboxError(
                "another sandbox runs in this directory",
                where=str(self.directory),
                do="Stop it, or use another directory",
            ) from error
        # asyncio disables Nagle's algorithm only if the protocol is given; else 40 ms per answer.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            for option in self.options:
                kind = FirecrestServer if option.api == "firecrest" else UnicoreServer
                place = self.directory / option.name
                self._sites[option.name] = kind(option.name, place, self.settings, base)
        except BaseException:
            listener.close()
            self._lock.close()
            raise
        return listener

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            FaultMiddleware(self._application, self.faults, self._site_of), http=Protocol,
            ws="none", lifespan="off", log_level="warning", access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=60,
            timeout_graceful_shutdown=_GOODBYE,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        try:
            for site in self._sites.values():
                site.start()
            ready.set()
            await self._server.serve(sockets=[listener])
        finally:
            await asyncio.gather(*(site.stop() for site in self._sites.values()))
            listener.close()

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await reset_if_doomed(scope):
            return
        with suppress(ClientDisconnect):
            response = await self._site_request(Request(scope, receive))
            await response(scope, receive, send)
            if scope.get("sandbox.reset"):
                doom_connection(scope)

    def _site_of(self, path: str) -> Site | None:
        return self._sites.get(path.lstrip("/").partition("/")[0])

    async def _site_request(self, request: Request) -> Response:
        if request.url.path.startswith("/sandbox/"):
            return await self._control(request)
        site = self._site_of(request.url.path)
        return await site.handle(request) if site else no_service()

    async def _control(self, request: Request) -> Response:
        """Answer a request of the control API.

        For `faults`: POST adds one (JSON of `Fault`'s attributes), GET lists them, DELETE clears
        them. GET `record` returns each site's record.
        """
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return empty(403)
        match request.method, request.url.path.removeprefix("/sandbox/"):
            case "GET", "record":
                return JSONResponse({name: site.recorded() for name, site in self._sites.items()})
            case "GET", "faults":
                pass
            case "DELETE", "faults":
                self.faults.clear()
            case "POST", "faults":
                body = await request.json()
                known = {attribute.name for attribute in fields(Fault)}
                if not isinstance(body, dict) or "action" not in body or body.keys() - known:
                    return JSONResponse({"allowed": sorted(known)}, status_code=400)
                self.faults.add(Fault(**body))
            case _:
                return empty(404)
        return JSONResponse([asdict(fault) for fault in self.faults.faults])
