"""A firecREST site with its API, its token endpoint and its object store below `/SITE`."""

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ..faults import Action, Fault, spoil
from ..sbatch import SlurmVariant
from ..settings import SandboxSettings
from ..site import Site
from .accounting import USER_ID, accounting_of
from .answers import Failure, flag
from .compute import Compute, no_answer
from .files import Files, directives
from .shell import LoginNode, channel_closed, too_slow
from .store import STORE_LIFETIME, ObjectStore
from .tokens import Tokens

_VERSION = "2.x.x"
"""The version that the site reports, as the server does that it was compared with."""

_API = "/firecrest/v2"
_TOKEN = "/auth/realms/sandbox/protocol/openid-connect/token"  # noqa: S105
_STORE = "/store"
_USER = "mantik"

_SLURM_VERSION = "22.05.8"
_PROBE_INTERVAL = 120
_HIDDEN = "**********"


class FirecrestServer(Site):
    """A site: file systems, a scheduler, and firecREST in front of them.

    Attributes:
        machine: the name of the site's single system.
    """

    def __init__(self, name: str, directory: Path, settings: SandboxSettings, base: str) -> None:
        """Create the site's directories; `base` is the server's URL."""
        super().__init__(name, directory, settings, f"{base}/{name}{_API}", _USER)
        own = settings.firecrest
        self.token_url = f"{base}/{name}{_TOKEN}"
        self.machine = name.lower()
        self._node = LoginNode(self.machine, self.directory, _USER, own)
        self.home = self._node.home
        self.tokens = Tokens(_USER, own)
        rules = SlurmVariant(
            part_limits=False, accounts=settings.accounts, records_refused=True,
            job_memory=own.job_memory,
        )  # fmt: skip
        self.scheduler = self._scheduler(self.home, rules)
        accounting = accounting_of(self.scheduler, own, _USER, settings.accounts[0])
        self._later: set[asyncio.Task[Response]] = set()
        self._store = ObjectStore(self.directory / "store", f"{base}/{name}{_STORE}")
        self._compute = Compute(self._node, self.scheduler, accounting)
        self._files = Files(self._node, self._compute, self._store)

    # --- for the sandbox -----------------------------------------------------------------------

    async def stop(self) -> None:
        for task in self._later:
            task.cancel()
        await self.scheduler.stop()
        await asyncio.to_thread(self._store.remove)

    def credentials(self) -> tuple[str, str]:
        return self.tokens.client_id, self.tokens.client_secret

    def _recorded_jobs(self) -> Iterable[dict[str, Any]]:
        return (
            {
                "id": str(job.id), "tags": [], "name": job.name, "status": job.state.value,
                "exit_code": job.exit_code, "scheduler_ids": [job.id],
                "submitted": job.submitted, "ended": job.ended,
            }
            for job in self.scheduler.jobs.values()
        )  # fmt: skip

    def refusal(self, fault: Fault) -> dict[str, Any]:
        return Failure(fault.status, fault.message, unhandled=fault.status == 500).body(_USER)

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
        self._note(request.method, f"/{self.name}{path}")
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
            response = JSONResponse(failure.body(user), failure.status, failure.headers)
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
        await asyncio.sleep(self.settings.firecrest.command_timeout)
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
                case "filesystem", ["ops" | "transfer" as kind, name]:
                    return await self._files.handle(request, kind, name)
        raise Failure(404, "Not Found")

    def _liveness(self, rest: list[str]) -> Response:
        if not rest:
            return Response(status_code=307, headers={"Location": f"{self.url}/status/liveness/"})
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._since))
        age = int(time.time() - self._since)
        return JSONResponse({"healthcheckRuns": {self.machine: moment}, "lastUpdate": age})

    async def _status(self, kind: str, *, hidden: bool) -> Response:
        partitions, node = self.scheduler.partitions, os.uname().nodename
        own, found = {"id": str(USER_ID), "name": _USER}, dict[str, Any]()
        match kind:
            case "nodes":  # this machine alone, in all partitions, with the largest one's size
                most = max(partitions, key=lambda partition: partition.cpus)
                free = self.scheduler.has_room
                found["nodes"] = [
                    {
                        "sockets": 2, "cores": 2, "threads": 2, "cpus": most.cpus,
                        "cpuLoad": 0.0, "freeMemory": most.memory_mib, "features": "(null)",
                        "name": node, "address": node, "hostname": node,
                        "state": ["IDLE" if free else "ALLOCATED"],
                        "partitions": [partition.name for partition in partitions],
                        "weight": 1, "allocMemory": most.memory_mib,
                        "allocCpus": 0 if free else most.cpus,
                        "idleCpus": most.cpus if free else 0,
                    }
                ]  # fmt: skip
            case "partitions":  # the key `partition` holds the state
                found["partitions"] = [
                    {
                        "name": partition.name,
                        "cpus": partition.cpus * partition.nodes,
                        "totalNodes": partition.nodes,
                        "partition": "UP" if partition.up else "DOWN",
                    }
                    for partition in partitions
                    if hidden or not partition.hidden
                ]
            case "reservations":
                found["reservations"] = []
            case "userinfo":
                try:
                    spoil()
                    default = self.settings.accounts[:1]
                except OSError:  # the command for it failed; the real server hides that
                    default = ()
                accounts = [
                    {"name": name, "default": name in default} for name in self.settings.accounts
                ]
                found = {"user": own, "group": own, "groups": [own], "accounts": accounts}
            case _:
                raise Failure(404, "Not Found")
        await self._node.occupy()
        return JSONResponse(found)

    def _system(self) -> dict[str, Any]:
        """Return the system of `/status/systems`, whose keys are in two styles (seen)."""
        settings, roots = self.settings.firecrest, self._node.roots
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._since)) + "Z"
        healthy = {"lastChecked": moment, "latency": 0.01, "healthy": True, "message": None}
        services: list[dict[str, Any]] = [
            {"serviceType": "scheduler", **healthy},
            {"serviceType": "ssh", **healthy},
            *({"serviceType": "filesystem", **healthy, "path": str(root)} for root in roots),
        ]
        transfer = None
        if settings.transfer_method == "s3":
            services.append({"serviceType": "s3", **healthy})
            transfer = {
                "serviceType": "s3", "name": "sandbox-store", "privateUrl": _HIDDEN,
                "publicUrl": self._store.url, "accessKeyId": _HIDDEN,
                "secretAccessKey": _HIDDEN, "region": "sandbox", "ttl": STORE_LIFETIME,
                "tenant": None,
                "multipart": {
                    "use_split": False, "max_part_size": settings.max_part_size,
                    "parallel_runs": 3, "tmp_folder": "tmp",
                },
                "bucketLifecycleConfiguration": {"days": 10},
            }  # fmt: skip
        return {
            "name": self.machine,
            "ssh": {
                "host": "localhost", "port": 22, "proxyHost": None, "proxyPort": None,
                "maxClients": 100,
                "timeout": {
                    "connection": 5, "login": 5, "commandExecution": settings.command_timeout,
                    "idleTimeout": 60, "keepAlive": 5,
                },
            },
            "scheduler": {
                "type": "slurm", "connectionMode": "ssh", "version": _SLURM_VERSION,
                "apiUrl": None, "apiVersion": None, "timeout": 10,
            },
            "servicesHealth": services,
            "probing": {"services": None, "intervalCheck": _PROBE_INTERVAL},
            "fileSystems": [
                {"path": str(root), "dataType": kind, "defaultWorkDir": not index}
                for index, (root, kind) in enumerate(zip(roots, ("users", "scratch"), strict=True))
            ],
            "dataOperation": {
                "datatransfer_jobs_directives": directives(settings),
                "max_ops_file_size": settings.max_file_size,
                "data_transfer": transfer,
            },
        }  # fmt: skip


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
