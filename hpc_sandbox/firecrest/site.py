"""A firecREST site with its API, its token endpoint and its object store below `/SITE`."""

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ..batch import BatchJob
from ..faults import Action, Fault
from ..record import RequestRecord
from ..sbatch import SlurmVariant
from ..schedulers import scheduler_of
from ..settings import SandboxSettings
from . import status
from .answers import Failure, failed, flag
from .compute import Compute, no_answer
from .operations import Operations
from .shell import (
    Shell,
    channel_closed,
    too_slow,
)
from .slurm import accounting_of
from .store import ObjectStore
from .tokens import Tokens
from .transfers import TransferService

_VERSION = "2.x.x"
"""The version that the site reports, as the server does that it was compared with."""

_API = "/firecrest/v2"
_TOKEN = "/auth/realms/sandbox/protocol/openid-connect/token"  # noqa: S105
_STORE = "/store"
_USER = "mantik"


class FirecrestServer:
    """A site: file systems, a scheduler, and firecREST in front of them.

    Attributes:
        machine: the name of the site's single system.
        directory: contains `home`, `scratch`, `spool`, `store`.
        home: the user's home directory, where transfer jobs run and write their logs.
        tokens: the identity provider.
    """

    def __init__(self, name: str, directory: Path, settings: SandboxSettings, base: str) -> None:
        """Create the site's directories; `base` is the server's URL."""
        self.name = name
        self.machine = name.lower()
        self.directory = directory.resolve()
        self.settings = settings
        self.url = f"{base}/{name}{_API}"
        self.token_url = f"{base}/{name}{_TOKEN}"
        self.record = RequestRecord()
        own = settings.firecrest
        roots = [self.directory / "home", self.directory / "scratch"]
        self.home = roots[0] / _USER
        for root in roots:
            (root / _USER).mkdir(parents=True, exist_ok=True)
        self.tokens = Tokens(_USER, own)
        rules = SlurmVariant(
            part_limits=False, accounts=settings.accounts, records_refused=True,
            job_memory=own.job_memory,
        )  # fmt: skip
        self.scheduler = scheduler_of(
            settings, self.directory / "spool", home=self.home, user=_USER, rules=rules
        )
        self.accounting = accounting_of(self.scheduler, own, _USER, settings.accounts[0])
        self._own = own
        self._roots = roots
        self._since = time.time()
        self._later: set[asyncio.Task[Response]] = set()
        self._shell = Shell(own)
        self._store = ObjectStore(self.directory / "store")
        self._store.url = f"{base}/{name}{_STORE}"
        self._compute = Compute(self.scheduler, self.accounting, self._shell, own, self.home)
        self._operations = Operations(self._shell, own, roots, self.machine)
        self._transfers = TransferService(
            self._compute, self._shell, self._store, own,
            roots=roots, system=self.machine, home=self.home,
        )  # fmt: skip

    # --- for the sandbox -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the scheduler; the server queries it for requests only."""
        self.scheduler.start()

    async def stop(self) -> None:
        """End all jobs and remove the object store; the file systems' files stay."""
        for task in self._later:
            task.cancel()
        await self.scheduler.stop()
        await asyncio.to_thread(self._store.remove)

    def credentials(self) -> tuple[str, str]:
        """Return client id and secret."""
        return self.tokens.client_id, self.tokens.client_secret

    def recorded(self) -> dict[str, Any]:
        jobs = [_recorded(job) for job in self.scheduler.jobs.values()]
        return self.record.as_json(jobs, self.scheduler)

    def refusal(self, fault: Fault) -> dict[str, Any]:
        return {
            "errorType": "error", "message": fault.message, "causedBy": None, "data": None,
            "user": None if fault.status == 500 else _USER,
        }  # fmt: skip

    def act(self, action: Action, scope: Scope) -> None:
        match action:
            case "expire_sessions":
                self.tokens.change_key()
            case "forget_job":
                scope["sandbox.forget"] = True
            case "repeat_job":
                scope["sandbox.repeat"] = True

    # --- requests ------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Response:
        path = request.url.path.removeprefix(f"/{self.name}")
        self.record.note(request.method, f"/{self.name}{path}")
        if path == _TOKEN:
            return await self.tokens.endpoint(request)
        if path.startswith(f"{_STORE}/"):
            raw = request.scope["raw_path"].decode("ascii").partition("?")[0]
            return await self._store.handle(request, unquote(raw.partition(f"{_STORE}/")[2]))
        user = None
        try:
            if not path.startswith(f"{_API}/"):
                raise Failure(404, "Not Found")
            # The real server lowers the whole path, so the case of system names is ignored.
            parts = path.removeprefix(f"{_API}/").lower().split("/")
            if parts[:2] == ["status", "liveness"]:
                return _with_headers(request, self._liveness(parts[2:]), None)
            self.tokens.check(request.headers)
            user = _USER
            response = await self._in_time(request, parts)
        except Failure as failure:
            response = failed(failure, user)
            if failure.unhandled:
                request.scope["sandbox.reset"] = True
        return _with_headers(request, response, user)

    async def _in_time(self, request: Request, parts: list[str]) -> Response:
        """Answer a request, or fail with a timeout if a fault requires it."""
        fault: Fault | None = request.scope.get("sandbox.timeout")
        if fault is None:
            return await self._answer(request, parts)
        await request.body()
        if fault.action == "timeout_after" and not fault.seconds:
            await self._answer(request, parts)
        await asyncio.sleep(self._own.command_timeout)
        if fault.action == "timeout_after" and fault.seconds:
            task = asyncio.create_task(self._answer_later(request, parts, fault.seconds))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
        raise _timeout_failure(request.method, parts)

    async def _answer_later(self, request: Request, parts: list[str], seconds: float) -> Response:
        await asyncio.sleep(seconds)
        return await self._answer(request, parts)

    async def _answer(self, request: Request, parts: list[str]) -> Response:
        if parts == ["status", "systems"] and request.method == "GET":
            return JSONResponse({"systems": [self._system()]})
        if len(parts) >= 3 and parts[0] in ("status", "compute", "filesystem"):
            area, system = parts[:2]
            if system != self.machine:
                raise Failure(404, "System not found")
            match area, parts[2:]:
                case "status", [kind] if request.method == "GET":
                    return await self._status(kind, hidden=flag(request, "show_hidden"))
                case "compute", ["jobs", *rest]:
                    return await self._compute.handle(request, rest)
                case "filesystem", ["ops", name]:
                    return await self._operations.handle(request, name)
                case "filesystem", ["transfer", name]:
                    return await self._transfers.handle(request, name)
        raise Failure(404, "Not Found")

    def _liveness(self, rest: list[str]) -> Response:
        if not rest:
            return Response(status_code=307, headers={"Location": f"{self.url}/status/liveness/"})
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._since))
        age = int(time.time() - self._since)
        return JSONResponse({"healthcheckRuns": {self.machine: moment}, "lastUpdate": age})

    def _system(self) -> dict[str, Any]:
        return status.system(self.machine, self._roots, self._own, self._store.url, self._since)

    async def _status(self, kind: str, *, hidden: bool) -> Response:
        partitions = self.scheduler.partitions
        found: Any
        match kind:
            case "nodes":
                found = {"nodes": status.nodes(partitions)}
            case "partitions":
                found = {"partitions": status.partitions_shown(partitions, hidden=hidden)}
            case "reservations":
                found = {"reservations": []}
            case "userinfo":
                found = status.user_info(_USER, self.settings.accounts)
            case _:
                raise Failure(404, "Not Found")
        await self._shell.occupy()
        return JSONResponse(found)


def _timeout_failure(method: str, parts: list[str]) -> Failure:
    """Return firecREST's response to a request whose command takes too long."""
    if (method, parts[0]) == ("POST", "compute") or parts[-2:] == ["ops", "upload"]:
        return channel_closed()
    if (method, parts[0]) == ("GET", "compute"):
        return Failure(500, "()") if parts[-1] == "metadata" else no_answer(too_slow().message)
    return too_slow()


def _with_headers(request: Request, response: Response, user: str | None) -> Response:
    response.headers["f7t-timestamp"] = str(time.time())
    response.headers["f7t-appversion"] = _VERSION
    if user is not None:
        response.headers["f7t-authusername"] = user
    for name in ("x-request-id", "x-correlation-id"):
        if name in request.headers:
            response.headers[name] = request.headers[name]
    return response


def _recorded(job: BatchJob) -> dict[str, Any]:
    return {
        "id": str(job.id),
        "tags": [],
        "name": job.name,
        "status": job.state.value,
        "exit_code": job.exit_code,
        "scheduler_ids": [job.id],
        "submitted": job.submitted,
        "ended": job.ended,
    }
