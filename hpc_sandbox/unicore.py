"""One UNICORE site: the resources below `/SITE/rest/core`."""

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from .access import (
    ANONYMOUS,
    SESSION_HEADER,
    Access,
    AccessRefused,
    SecuritySession,
)
from .answers import (
    date,
    empty,
    links,
    no_service,
    paged,
    shown,
)
from .faults import Action, Fault
from .files import SandboxFiles, decode_path, free_space
from .job_resources import JobResources, new_id
from .jobs import UnicoreJob
from .record import RequestRecord
from .resources import ranges
from .sbatch import SlurmVariant
from .schedulers import scheduler_of
from .server_transfers import ServerTransfers
from .settings import SandboxSettings
from .tsi import Tsi

_VERSION = "11.0.0"
"""The server version that the site reports: the version that it was compared with."""

_FACTORY = "default_target_system_factory"
_SHARED_STORAGES = ("HOME", "SCRATCH")
_WORKERS = 4
"""Number of jobs that the server stages in, or submits, or runs commands of, at the same time."""


class UnicoreServer:
    """A site: storages, a scheduler, jobs, and the REST API in front of them.

    Attributes:
        directory: contains `home`, `scratch`, `jobs`, `spool`, `tsi`.
        workers, submitting: limit how many jobs are processed and submitted at a time, in order.
        tss: the id of the site's target system.
        forget_next, repeat_next: how many of the next submissions are acknowledged and then
            forgotten, or submitted to the scheduler twice (both seen at a real server).
        ignore_next: how many of the next aborts end nothing (seen at one without a scheduler).
    """

    def __init__(self, name: str, directory: Path, settings: SandboxSettings, base: str) -> None:
        """Create the site's directories; `base` is the server's URL."""
        self.name = name
        self.directory = directory.resolve()
        self.settings = settings
        self.access = Access("mantik", settings.timing.session_lifetime, trusted=settings.trusted)
        self.record = RequestRecord()
        self.jobs: dict[str, UnicoreJob] = {}
        self.forget_next = 0
        self.repeat_next = 0
        self.ignore_next = 0
        self.url = f"{base}/{name}/rest/core"
        for storage in _SHARED_STORAGES:
            (self.directory / storage.lower()).mkdir(parents=True, exist_ok=True)
        home = self.directory / "home"
        self.user_variables = {
            "HOME": str(home),
            "USER": self.access.username,
            "LOGNAME": self.access.username,
        }
        self.tsi = Tsi(self.directory / "tsi", self.user_variables, settings.timing.round_trip)
        self.workers = asyncio.Semaphore(_WORKERS)
        self.submitting = asyncio.Lock()
        self.scheduler = scheduler_of(
            settings,
            self.directory / "spool",
            home=home,
            user=self.access.username,
            rules=SlurmVariant(accounts=settings.accounts),
        )
        self._since = time.time()
        self._job_resources = JobResources(self)
        self._transfers = ServerTransfers(self.url, settings.trusted, settings.timing.transfer_time)
        self.tss = new_id()
        self._updates: asyncio.Task[None] | None = None

    def credentials(self) -> tuple[str, str]:
        return self.access.username, self.access.password

    def recorded(self) -> dict[str, Any]:
        jobs = [
            {
                "id": job.id,
                "tags": job.tags,
                "name": job.name,
                "status": job.status,
                "exit_code": job.exit_code,
                "scheduler_ids": job.batch_ids,
                "submitted": job.submitted,
                "ended": job.ended,
            }
            for job in self.jobs.values()
        ]
        return self.record.as_json(jobs, self.scheduler)

    def refusal(self, fault: Fault) -> dict[str, Any]:
        return {"errorMessage": fault.message, "status": fault.status}

    def act(self, action: Action, scope: Scope) -> None:
        del scope
        match action:
            case "expire_sessions":
                self.access.expire_sessions()
            case "forget_job":
                self.forget_next += 1
            case "repeat_job":
                self.repeat_next += 1
            case "ignore_abort":
                self.ignore_next += 1

    def start(self) -> None:
        """Start to follow the scheduler. Call this in the loop that serves the site."""
        self.scheduler.start()
        self._updates = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """End all jobs and remove their directories; the storages' files stay."""
        if self._updates is not None:
            self._updates.cancel()
        await self._transfers.stop()
        await asyncio.gather(*(job.destroy(self) for job in self.jobs.values()))
        await self.scheduler.stop()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.settings.timing.status_interval)
            for job in list(self.jobs.values()):
                if self.tsi.up:
                    job.look()
                if job.termination < time.time():
                    await self.destroy(job)

    async def destroy(self, job: UnicoreJob) -> None:
        self.jobs.pop(job.id, None)
        await job.destroy(self)

    # --- requests ------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Response:
        raw = request.scope["raw_path"].decode("ascii").partition("?")[0]
        path = raw.removeprefix(f"/{self.name}/rest/core")
        if path == raw or (path and not path.startswith("/")):
            return no_service()
        self.record.note(request.method, raw)
        try:
            session = self.access.check(request.headers)
        except AccessRefused as refused:
            return empty(refused.status)
        response = await self._route(request, session, path.strip("/").split("/", 3), path)
        response.headers[SESSION_HEADER] = session.id
        left = max(0, int((session.expires - time.time()) * 1000))
        response.headers[f"{SESSION_HEADER}-lifetime"] = str(left)
        return response

    async def _route(  # noqa: PLR0911 - one return per resource
        self, request: Request, session: SecuritySession, parts: list[str], path: str
    ) -> Response:
        kind, name, sub = [*parts, "", "", ""][:3]
        known = session.dn != ANONYMOUS
        if kind == "":
            return self._base(request, session) if request.method == "GET" else empty(405)
        if kind == "token":
            return PlainTextResponse(self.access.token) if known else empty(403)
        if kind == "jobs" and not name:
            return await self._job_resources.handle_list(request, session)
        if kind in ("factories", "sites", "storages", "transfers", "tasks", "reservations",
                    "storagefactories", "client-server-transfers") and not name:  # fmt: skip
            return self._list(request, kind, known=known)
        if not known:
            return empty(403)
        match kind:
            case "factories":
                return self._factory(request) if name == _FACTORY else empty(404)
            case "sites":
                if name != self.tss:
                    return empty(404)
                return (
                    await self._job_resources.handle_list(request, session)
                    if sub
                    else self._tss_shown(request)
                )
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
        known = session.dn != ANONYMOUS
        user = self.access.username
        client: dict[str, Any] = {"dn": session.dn, "role": {"selected": "anonymous"}, "xlogin": {}}
        if known:
            client["role"] = {"selected": "user", "availableRoles": ["user"]}
            client["authenticationMethod"] = "PASSWORD_FILE"
            client["xlogin"] = {
                "UID": user, "availableUIDs": [user], "group": user, "availableGroups": [user]
            }  # fmt: skip
        server = {
            "version": _VERSION,
            "siteName": self.name,
            "currentTime": date(time.time()),
            "upSince": date(self._since),
            "jobSubmission": {"enabled": True, "message": ""},
            "externalConnections": {"TSI 1": "OK" if self.tsi.up else "DOWN"},
            "trustedCAs": [],
            "trustedSAMLIssuers": [],
        }
        names = (
            "factories", "sites", "jobs", "reservations", "storages", "storagefactories",
            "transfers", "client-server-transfers", "tasks",
        )  # fmt: skip
        urls = {name: f"{self.url}/{name}" for name in names}
        return shown(request, {"client": client, "server": server, "_links": links(urls)})

    def _list(self, request: Request, kind: str, *, known: bool) -> Response:
        ids: list[str] = []
        if kind == "factories":
            ids = [_FACTORY]
        elif known and kind == "sites":
            ids = [self.tss]
        elif known and kind == "transfers":
            ids = self._transfers.ids
        elif known and kind == "storages":
            ids = list(_SHARED_STORAGES)
            if request.query_params.get("filter") == "all":
                ids += [f"{name}-uspace" for name, job in self.jobs.items() if not job.hidden]
        return paged(request, kind, f"{self.url}/{kind}", ids)

    def _cluster(self) -> dict[str, Any]:
        return {
            "siteName": self.name,
            "supportsReservation": "false",
            "applications": [],
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
            "acl": [],
            "tags": [],
        }

    def _factory(self, request: Request) -> Response:
        url = f"{self.url}/factories/{_FACTORY}"
        urls = {"self": url, "sites": f"{self.url}/sites", "applications": f"{url}/applications"}
        return shown(request, self._cluster() | {"_links": links(urls)})

    def _tss_shown(self, request: Request) -> Response:
        url = f"{self.url}/sites/{self.tss}"
        urls = {
            "self": url, "jobs": f"{url}/jobs", "parent": f"{self.url}/factories/{_FACTORY}"
        }  # fmt: skip
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
        free = free_space(root) if self.tsi.up else -1
        properties = {
            "mountPoint": str(root),
            "resourceStatus": "READY",
            "resourceStatusMessage": "N/A",
            "description": "Job workspace" if "job" in urls else "Filesystem",
            "filesystemDescription": "Remote TSI",
            "freeSpace": free,
            "usableSpace": -1,
            "umask": "027",
            "metadataSupported": False,
            "protocols": ["BFT"],
            "owner": self.access.dn,
            "acl": [],
            "tags": [],
            "_links": links(urls),
        }
        return shown(request, properties)
