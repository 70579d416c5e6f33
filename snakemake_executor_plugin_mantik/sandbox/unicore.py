"""One UNICORE site: the resources below `/SITE/rest/core`."""

import asyncio
import json
import secrets
import string
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from snakemake_executor_plugin_mantik.sandbox.access import (
    ANONYMOUS,
    SESSION_HEADER,
    Access,
    Refused,
    Session,
)
from snakemake_executor_plugin_mantik.sandbox.answers import (
    date,
    empty,
    failure,
    links,
    no_service,
    page,
    selected,
)
from snakemake_executor_plugin_mantik.sandbox.description import tags_of
from snakemake_executor_plugin_mantik.sandbox.files import Files, decode_path, free_space
from snakemake_executor_plugin_mantik.sandbox.jobs import UnicoreJob
from snakemake_executor_plugin_mantik.sandbox.record import Record
from snakemake_executor_plugin_mantik.sandbox.resources import ranges
from snakemake_executor_plugin_mantik.sandbox.scheduler import Scheduler
from snakemake_executor_plugin_mantik.sandbox.settings import Settings

VERSION = "11.0.0"
"""The server version that the site claims: the one that it was compared with."""

PAGE = 200
"""Entries of a list when the request does not say."""

_FACTORY = "default_target_system_factory"
_LETTERS = string.ascii_letters + string.digits
_SHARED_STORAGES = ("HOME", "SCRATCH")


class UnicoreSite:
    """A site: storages, a scheduler, jobs, and the REST API in front of them.

    Attributes:
        name: as in the URL.
        directory: where all of it lies: `home`, `scratch`, `jobs`.
        access: users and sessions.
        jobs: all jobs by id.
        forget_next, repeat_next: how many of the next submissions are forgotten after they were
            acknowledged, or submitted to the scheduler twice (both seen at a real server).
    """

    def __init__(self, name: str, directory: Path, settings: Settings) -> None:
        """Make the site's directories; nothing runs before `start`."""
        self.name = name
        self.directory = directory.resolve()
        self.settings = settings
        self.access = Access("mantik", settings.timing.session_lifetime)
        self.record = Record()
        self.jobs: dict[str, UnicoreJob] = {}
        self.forget_next = 0
        self.repeat_next = 0
        self.url = f"http://127.0.0.1/{name}/rest/core"
        for storage in _SHARED_STORAGES:
            (self.directory / storage.lower()).mkdir(parents=True, exist_ok=True)
        home = self.directory / "home"
        self.user_variables = {
            "HOME": str(home),
            "USER": self.access.username,
            "LOGNAME": self.access.username,
        }
        self.scheduler = Scheduler(
            self.directory / "spool", settings, home=home, user=self.access.username
        )
        self._since = time.time()
        self._tss = _new_id()
        self._updates: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look at the scheduler; to be called in the loop that serves the site."""
        self._updates = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """End all jobs and remove their directories; the storages' files stay."""
        if self._updates is not None:
            self._updates.cancel()
        await asyncio.gather(*(job.destroy(self) for job in self.jobs.values()))
        await self.scheduler.stop()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.settings.timing.status_interval)
            for job in list(self.jobs.values()):
                job.look()
                if job.termination < time.time():
                    await self._destroy(job)

    async def _destroy(self, job: UnicoreJob) -> None:
        self.jobs.pop(job.id, None)
        await job.destroy(self)

    # --- requests ------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Response:
        """Answer one request to this site."""
        raw = request.scope["raw_path"].decode("ascii").partition("?")[0]
        path = raw.removeprefix(f"/{self.name}/rest/core")
        if path == raw or (path and not path.startswith("/")):
            return no_service()
        self.record.note(request.method, raw)
        try:
            session = self.access.check(request.headers)
        except Refused as refused:
            return empty(refused.status)
        response = await self._route(request, session, path.strip("/").split("/", 3), path)
        response.headers[SESSION_HEADER] = session.id
        left = max(0, int((session.expires - time.time()) * 1000))
        response.headers[f"{SESSION_HEADER}-lifetime"] = str(left)
        return response

    async def _route(  # noqa: PLR0911 - one return per resource
        self, request: Request, session: Session, parts: list[str], path: str
    ) -> Response:
        kind, name, sub = [*parts, "", "", ""][:3]
        known = session.dn != ANONYMOUS
        if kind == "":
            return self._base(request, session) if request.method == "GET" else empty(405)
        if kind == "token":
            return PlainTextResponse(self.access.token) if known else empty(403)
        if kind == "jobs" and not name:
            return await self._job_list(request, session)
        if kind in ("factories", "sites", "storages", "transfers", "tasks", "reservations",
                    "storagefactories", "client-server-transfers") and not name:  # fmt: skip
            return self._list(request, kind, known=known)
        if not known:
            return empty(403)
        match kind:
            case "factories":
                return self._factory(request) if name == _FACTORY else empty(404)
            case "sites":
                if name != self._tss:
                    return empty(404)
                return await self._job_list(request, session) if sub else self._tss_shown(request)
            case "storages":
                rest = path.lstrip("/").split("/", 3)[3:]
                return await self._storage(request, name, sub, rest[0] if rest else "")
            case "jobs":
                job = self.jobs.get(name)
                if job is None or job.hidden:
                    return empty(404)
                return await self._job(request, job, parts[2:])
        return empty(404)

    def _shown(self, request: Request, properties: dict[str, Any]) -> Response:
        return JSONResponse(selected(properties, request.query_params.get("fields")))

    def _base(self, request: Request, session: Session) -> Response:
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
            "version": VERSION,
            "siteName": self.name,
            "currentTime": date(time.time()),
            "upSince": date(self._since),
            "jobSubmission": {"enabled": True, "message": ""},
            "externalConnections": {"TSI 1": "OK"},
            "trustedCAs": [],
            "trustedSAMLIssuers": [],
        }
        names = (
            "factories", "sites", "jobs", "reservations", "storages", "storagefactories",
            "transfers", "client-server-transfers", "tasks",
        )  # fmt: skip
        urls = {name: f"{self.url}/{name}" for name in names}
        return self._shown(request, {"client": client, "server": server, "_links": links(urls)})

    def _list(self, request: Request, kind: str, *, known: bool) -> Response:
        ids: list[str] = []
        if kind == "factories":
            ids = [_FACTORY]
        elif known and kind == "sites":
            ids = [self._tss]
        elif known and kind == "storages":
            ids = list(_SHARED_STORAGES)
            if request.query_params.get("filter") == "all":
                ids += [f"{name}-uspace" for name, job in self.jobs.items() if not job.hidden]
        return self._page(request, kind, f"{self.url}/{kind}", ids)

    @staticmethod
    def _page(request: Request, kind: str, base: str, ids: list[str]) -> Response:
        try:
            offset = int(request.query_params.get("offset", "0"))
            number = int(request.query_params.get("num", PAGE))
        except ValueError:
            return empty(404)
        return JSONResponse(page(kind, base, ids, offset, number))

    def _cluster(self) -> dict[str, Any]:
        return {
            "siteName": self.name,
            "supportsReservation": "false",
            "applications": [],
            "otherInfo": {},
            "remainingComputeTime": {},
            "resources": {
                partition.name: {
                    name: f"{low}-{high}" for name, (low, high) in ranges(partition).items()
                }
                for partition in self.settings.partitions
            },
            "acl": [],
            "tags": [],
        }

    def _factory(self, request: Request) -> Response:
        url = f"{self.url}/factories/{_FACTORY}"
        urls = {"self": url, "sites": f"{self.url}/sites", "applications": f"{url}/applications"}
        return self._shown(request, self._cluster() | {"_links": links(urls)})

    def _tss_shown(self, request: Request) -> Response:
        url = f"{self.url}/sites/{self._tss}"
        urls = {
            "self": url, "jobs": f"{url}/jobs", "parent": f"{self.url}/factories/{_FACTORY}"
        }  # fmt: skip
        more = {"numberOfJobs": len(self.jobs), "umask": "0077", "resourceStatus": "READY"}
        return self._shown(request, self._cluster() | more | {"_links": links(urls)})

    # --- storages ------------------------------------------------------------------------------

    def _root(self, storage: str) -> Path | None:
        if storage in _SHARED_STORAGES:
            return self.directory / storage.lower()
        job = self.jobs.get(storage.removesuffix("-uspace"))
        if job is None or job.hidden or not storage.endswith("-uspace"):
            return None
        return job.directory

    def local_path(self, url: str) -> Path | None:
        """The file behind a URL of one of this site's storages."""
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
            return await Files(root, url).handle(request, rest)
        if sub == "actions" and request.method == "POST" and rest in ("copy", "rename"):
            asked = await request.json()
            if not asked.get("from") or not asked.get("to"):
                return empty(400)
            return await asyncio.to_thread(
                Files(root, url).move, asked["from"], asked["to"], copy=rest == "copy"
            )
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
        free, usable = free_space(root)
        shown = {
            "mountPoint": str(root),
            "resourceStatus": "READY",
            "resourceStatusMessage": "N/A",
            "description": "Job workspace" if "job" in urls else "Filesystem",
            "filesystemDescription": "Remote TSI",
            "freeSpace": free,
            "usableSpace": usable,
            "umask": "077",
            "metadataSupported": False,
            "protocols": ["BFT"],
            "owner": self.access.dn,
            "acl": [],
            "tags": [],
            "_links": links(urls),
        }
        return self._shown(request, shown)

    # --- jobs ----------------------------------------------------------------------------------

    async def _job_list(self, request: Request, session: Session) -> Response:
        known = session.dn != ANONYMOUS
        if request.method == "POST":
            return await self._submit(request, session) if known else empty(403)
        if request.method != "GET":
            return empty(405)
        # Of repeated `tags=` the server reads the first only.
        text = next(iter(request.query_params.getlist("tags")), "")
        wanted = text.replace("+", " ").replace(",", " ").split()
        ids = [
            job.id
            for job in self.jobs.values()
            if known and not job.hidden and all(_has_tag(job, tag) for tag in wanted)
        ]
        return self._page(request, "jobs", f"{self.url}/jobs", ids)

    async def _submit(self, request: Request, session: Session) -> Response:
        if not request.headers.get("content-type", "").startswith("application/json"):
            return empty(415)
        try:
            description = json.loads(await request.body())
        except ValueError as error:
            return failure(500, f"Could not submit job: org.json.JSONException: {error}")
        if not isinstance(description, dict):
            return failure(
                500,
                "Could not submit job: org.json.JSONException: "
                "A JSONObject text must begin with '{' at 1 [character 2 line 1]",
            )
        name = _new_id()
        job = UnicoreJob(
            id=name,
            json=description,
            directory=self.directory / "jobs" / name,
            owner=session.dn,
            tags=tags_of(description),
            termination=time.time() + self.settings.timing.lifetime,
        )
        if self.forget_next > 0:
            self.forget_next -= 1
            job.hidden = True
        if self.repeat_next > 0:
            self.repeat_next -= 1
            job.submissions = 2
        self.jobs[name] = job
        job.begin(self)
        return empty(201, {"Location": f"{self.url}/jobs/{name}"})

    async def _job(self, request: Request, job: UnicoreJob, sub: list[str]) -> Response:
        match request.method, sub:
            case "GET", []:
                return self._shown(request, self._job_shown(job))
            case "GET", ["details"]:
                return self._shown(request, job.details())
            case "GET", ["submitted"]:
                hidden = [item | {"Data": "n/a"} if "Data" in item else item
                          for item in job.json.get("Imports") or []]  # fmt: skip
                return JSONResponse(job.json | ({"Imports": hidden} if hidden else {}))
            case "POST", ["actions", "start"]:
                job.start()
            case "POST", ["actions", "abort"]:
                await job.abort(self)
            case "POST", ["actions", "restart"]:
                pass
            case "PUT", []:
                return await self._change(request, job)
            case "DELETE", []:
                await self._destroy(job)
            case _:
                return empty(404)
        return empty(204)

    def _job_shown(self, job: UnicoreJob) -> dict[str, Any]:
        url = f"{self.url}/jobs/{job.id}"
        urls = {
            "self": url,
            "details": f"{url}/details",
            "submitted": f"{url}/submitted",
            "action:start": f"{url}/actions/start",
            "action:abort": f"{url}/actions/abort",
            "action:restart": f"{url}/actions/restart",
            "forwarding": f"{url}/forward-port",
            "workingDirectory": f"{self.url}/storages/{job.id}-uspace",
            "parentTSS": f"{self.url}/sites/{self._tss}",
        }
        shown = {
            "status": job.status,
            "statusMessage": job.status_message,
            "log": job.log,
            "queue": job.queue,
            "batchSystemID": job.batch_id,
            "name": job.name,
            "jobType": job.job_type,
            "submissionTime": date(job.submitted),
            "terminationTime": date(job.termination),
            "submissionPreferences": {},
            "consumedTime": dict.fromkeys(
                ("total", "stage-in", "preCommand", "queued", "main", "postCommand", "stage-out"),
                "N/A",
            ),
            "owner": job.owner,
            "acl": [],
            "tags": job.tags,
            "_links": links(urls),
        }
        if job.exit_code is not None:
            shown["exitCode"] = str(job.exit_code)
        return shown

    async def _change(self, request: Request, job: UnicoreJob) -> Response:
        try:
            asked = json.loads(await request.body())
        except ValueError as error:
            return failure(500, f"Error setting properties: org.json.JSONException: {error}")
        reply = {}
        for name, value in asked.items():
            match name:
                case "tags":
                    job.tags = [str(tag) for tag in value]
                    reply[name] = "OK"
                case "terminationTime":
                    reply[name] = _set_termination(job, str(value))
                case _:
                    reply[name] = "Property not found or cannot be modified!"
        return JSONResponse(reply)


def _set_termination(job: UnicoreJob, text: str) -> str:
    for form in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%d %H:%M"):
        with suppress(ValueError):
            job.termination = datetime.strptime(text, form).timestamp()
            return "OK"
    return (
        "Error setting property: java.lang.IllegalArgumentException: "
        f"Specified date string '{text}'could not be parsed!"
    )


def _has_tag(job: UnicoreJob, tag: str) -> bool:
    """Whether a job has a tag; `_` and `%` are wildcards, as the server's SQL makes them."""
    if not set(tag) & set("_%"):
        return tag in job.tags
    return any(len(own) == len(tag) and all(a in ("_", b) for a, b in zip(tag, own, strict=True))
               for own in job.tags)  # fmt: skip


def _new_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(11))
