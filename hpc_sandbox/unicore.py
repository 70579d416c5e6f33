"""One UNICORE site: the resources below `/SITE/rest/core`."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from .access import SESSION_HEADER, Access, AccessRefused, SecuritySession
from .answers import date, empty, links, no_service, paged, shown
from .description import ranges
from .faults import Action, Fault
from .files import SandboxFiles, decode_path
from .job_resources import JobResources, new_id
from .jobs import UnicoreJob
from .sbatch import SlurmVariant
from .server_transfers import ServerTransfers
from .settings import SandboxSettings
from .site import Site
from .tsi import Tsi

_VERSION = "11.0.0"
"""The server version that the site reports: the version that it was compared with."""

_USER = "mantik"
_FACTORY = "default_target_system_factory"
_KINDS = (
    "factories", "sites", "jobs", "reservations", "storages", "storagefactories", "transfers",
    "client-server-transfers", "tasks",
)  # fmt: skip
_SHARED_STORAGES = ("HOME", "SCRATCH")
_OF_JOBS = (
    "id", "tags", "name", "status", "exit_code", "scheduler_ids", "submitted", "ended",
)  # fmt: skip
_WORKERS = 4
"""Number of jobs that the server stages in, or submits, or runs commands of, at the same time."""


class UnicoreServer(Site):
    """A site: storages, a scheduler, jobs, and the REST API in front of them.

    Attributes:
        workers, submitting: limit how many jobs are processed and submitted at a time, in order.
        tss: the id of the site's target system.
    """

    def __init__(self, name: str, directory: Path, settings: SandboxSettings, base: str) -> None:
        """Create the site's directories; `base` is the server's URL."""
        super().__init__(name, directory, settings, f"{base}/{name}/rest/core", _USER)
        timing = settings.timing
        self.access = Access(_USER, timing.session_lifetime, trusted=settings.trusted)
        self.jobs: dict[str, UnicoreJob] = {}
        for storage in _SHARED_STORAGES:
            (self.directory / storage.lower()).mkdir(parents=True, exist_ok=True)
        home = self.directory / "home"
        self.user_variables = {"HOME": str(home), "USER": _USER, "LOGNAME": _USER}
        self.tsi = Tsi(self.directory / "tsi", self.user_variables, timing.round_trip)
        self.workers = asyncio.Semaphore(_WORKERS)
        self.submitting = asyncio.Lock()
        self.scheduler = self._scheduler(home, SlurmVariant(accounts=settings.accounts))
        self.tss = new_id()
        self._faults: Counter[Action] = Counter()
        self._job_resources = JobResources(self)
        self._transfers = ServerTransfers(self.url, settings.trusted, timing.transfer_time)
        self._updates: asyncio.Task[None] | None = None

    def credentials(self) -> tuple[str, str]:
        return self.access.username, self.access.password

    def _recorded_jobs(self) -> Iterable[dict[str, Any]]:
        return ({name: getattr(job, name) for name in _OF_JOBS} for job in self.jobs.values())

    def refusal(self, fault: Fault) -> dict[str, Any]:
        return {"errorMessage": fault.message, "status": fault.status}

    def act(self, action: Action, scope: Scope) -> None:
        del scope
        if action == "expire_sessions":
            self.access.expire_sessions()
        else:
            self._faults[action] += 1

    def takes_fault(self, action: Action) -> bool:
        """Return whether a fault applies to this submission or abort, for which it was planned."""
        planned = self._faults[action] > 0
        self._faults[action] -= planned
        return planned

    def start(self) -> None:
        super().start()
        self._updates = asyncio.create_task(self._look())

    async def stop(self) -> None:
        if self._updates is not None:
            self._updates.cancel()
        await self._transfers.stop()
        await asyncio.gather(*(job.destroy() for job in self.jobs.values()))
        await self.scheduler.stop()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.settings.timing.status_interval)
            for job in list(self.jobs.values()):
                if self.tsi.up:
                    job.looked.set()
                if job.termination < time.time():
                    await self.destroy(job)

    async def destroy(self, job: UnicoreJob) -> None:
        self.jobs.pop(job.id, None)
        await job.destroy()

    # --- requests ------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Response:
        raw = request.scope["raw_path"].decode("ascii").partition("?")[0]
        path = raw.removeprefix(f"/{self.name}/rest/core")
        if path == raw or (path and not path.startswith("/")):
            return no_service()
        self._note(request.method, raw)
        try:
            session = self.access.check(request.headers)
        except AccessRefused as refused:
            return empty(refused.status)
        response = await self._route(request, session, path.strip("/").split("/", 3), path)
        response.headers[SESSION_HEADER] = session.id
        left = max(0, int((session.expires - time.time()) * 1000))
        response.headers[f"{SESSION_HEADER}-lifetime"] = str(left)
        return response

    async def _route(  # noqa: PLR0911, PLR0912 - one return per resource
        self, request: Request, session: SecuritySession, parts: list[str], path: str
    ) -> Response:
        kind, name, sub = [*parts, "", "", ""][:3]
        if kind == "":
            return self._base(request, session) if request.method == "GET" else empty(405)
        if kind == "token":
            return PlainTextResponse(self.access.token) if session.known else empty(403)
        if kind == "jobs" and not name:
            return await self._job_resources.handle_list(request, session)
        if kind in _KINDS and not name:
            return self._list(request, kind, known=session.known)
        if not session.known:
            return empty(403)
        match kind:
            case "factories":
                return self._factory(request) if name == _FACTORY else empty(404)
            case "sites":
                if name != self.tss:
                    return empty(404)
                if not sub:
                    return self._tss_shown(request)
                return await self._job_resources.handle_list(request, session)
            case "storages":
                rest = path.lstrip("/").split("/", 3)[3:]
                return await self._storage(request, name, sub, rest[0] if rest else "")
            case "transfers":
                return await self._transfers.handle(request, name)
            case "jobs":
                job = self.jobs.get(name)
                if job is None or job.hidden:
                    return empty(404)
                return await self._job_resources.handle(request, job, parts[2:])
        return empty(404)

    def _base(self, request: Request, session: SecuritySession) -> Response:
        client: dict[str, Any] = {"dn": session.dn, "role": {"selected": "anonymous"}, "xlogin": {}}
        if session.known:
            client["role"] = {"selected": "user", "availableRoles": ["user"]}
            client["authenticationMethod"] = "PASSWORD_FILE"
            client["xlogin"] = {
                "UID": _USER, "availableUIDs": [_USER], "group": _USER, "availableGroups": [_USER]
            }  # fmt: skip
        server = {
            "version": _VERSION, "siteName": self.name, "currentTime": date(time.time()),
            "upSince": date(self._since), "jobSubmission": {"enabled": True, "message": ""},
            "externalConnections": {"TSI 1": "OK" if self.tsi.up else "DOWN"}, "trustedCAs": [],
            "trustedSAMLIssuers": [],
        }  # fmt: skip
        urls = {kind: f"{self.url}/{kind}" for kind in _KINDS}
        return shown(request, {"client": client, "server": server, "_links": links(urls)})

    def _list(self, request: Request, kind: str, *, known: bool) -> Response:
        storages = list(_SHARED_STORAGES)
        if request.query_params.get("filter") == "all":
            storages += [f"{name}-uspace" for name, job in self.jobs.items() if not job.hidden]
        shown = {"sites": [self.tss], "transfers": self._transfers.ids, "storages": storages}
        ids = {"factories": [_FACTORY], **(shown if known else {})}.get(kind, ())
        return paged(request, kind, f"{self.url}/{kind}", ids)

    def _cluster(self) -> dict[str, Any]:
        return {
            "siteName": self.name, "supportsReservation": "false", "applications": [],
            "otherInfo": {},
            # The value of a TSI without a script that queries budgets.
            "remainingComputeTime": {
                "__CURRENT_PROJECT__": {"rel": "-1%", "units": "core-h", "remaining": "-1"}
            },
            "resources": {
                partition.name: {
                    name: f"{low}-{high}" for name, (low, high) in ranges(partition).items()
                }
                for partition in self.scheduler.partitions
                if not partition.hidden
            },
            "acl": [], "tags": [],
        }  # fmt: skip

    def _factory(self, request: Request) -> Response:
        url = f"{self.url}/factories/{_FACTORY}"
        urls = {"self": url, "sites": f"{self.url}/sites", "applications": f"{url}/applications"}
        return shown(request, self._cluster() | {"_links": links(urls)})

    def _tss_shown(self, request: Request) -> Response:
        url = f"{self.url}/sites/{self.tss}"
        parent = f"{self.url}/factories/{_FACTORY}"
        urls = {"self": url, "jobs": f"{url}/jobs", "parent": parent}
        more = {"numberOfJobs": len(self.jobs), "umask": "0027", "resourceStatus": "READY"}
        return shown(request, self._cluster() | more | {"_links": links(urls)})

    # --- storages ------------------------------------------------------------------------------

    def _root(self, storage: str) -> Path | None:
        if storage in _SHARED_STORAGES:
            return self.directory / storage.lower()
        job = self.jobs.get(storage.removesuffix("-uspace"))
        if job is None or job.hidden or not storage.endswith("-uspace"):
            return None
        return job.directory

    def local_path(self, url: str) -> Path | None:
        """Return the file behind a URL of one of this site's storages."""
        _, found, rest = url.partition(f"{self.url}/storages/")
        storage, _, path = rest.partition("/files/")
        root = self._root(storage) if found else None
        return root / decode_path(path).lstrip("/") if root else None

    async def _storage(  # noqa: PLR0911 - one return per resource
        self, request: Request, name: str, sub: str, rest: str
    ) -> Response:
        root = self._root(name)
        if root is None:
            return empty(404)
        url = f"{self.url}/storages/{name}"
        if sub == "files":
            return await SandboxFiles(root, url, self.tsi).handle(request, rest)
        if sub == "transfers" and request.method == "POST":
            return await self._transfers.create(request, root)
        if sub == "actions" and request.method == "POST" and rest in ("copy", "rename"):
            body = await request.json()
            if not body.get("from") or not body.get("to"):
                return empty(400)
            files = SandboxFiles(root, url, self.tsi)
            return await files.move(body["from"], body["to"], copy=rest == "copy")
        if sub:
            return empty(404)
        if request.method != "GET":
            return empty(405)
        if "json" not in request.headers.get("accept", ""):
            return empty(406)
        urls = {
            "self": url,
            "files": f"{url}/files",
            "action:copy": f"{url}/actions/copy",
            "action:rename": f"{url}/actions/rename",
        }
        if name.endswith("-uspace"):
            urls["job"] = f"{self.url}/jobs/{name.removesuffix('-uspace')}"
        space = os.statvfs(root)
        free = space.f_bavail * space.f_frsize if self.tsi.up else -1
        properties = {
            "mountPoint": str(root), "resourceStatus": "READY", "resourceStatusMessage": "N/A",
            "description": "Job workspace" if "job" in urls else "Filesystem",
            "filesystemDescription": "Remote TSI", "freeSpace": free, "usableSpace": -1,
            "umask": "027", "metadataSupported": False, "protocols": ["BFT"],
            "owner": self.access.dn, "acl": [], "tags": [], "_links": links(urls),
        }  # fmt: skip
        return shown(request, properties)
