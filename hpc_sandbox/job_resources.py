"""The REST resources of UNICORE jobs: the list, submission, and each job with its actions."""

import json
import secrets
import string
import time
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import SecuritySession
from .answers import date, empty, failure, links, paged, shown
from .description import tags_of
from .jobs import UnicoreJob
from .tsi import TsiUnavailableError

if TYPE_CHECKING:
    from .unicore import UnicoreServer

_LETTERS = string.ascii_letters + string.digits


class JobResources:
    """The resources `jobs`, `jobs/ID` and those below them, of one site."""

    def __init__(self, site: "UnicoreServer") -> None:
        self._site = site

    async def handle_list(self, request: Request, session: SecuritySession) -> Response:
        """Answer a request for the list of jobs: GET lists, POST submits."""
        if request.method == "POST":
            return await self._submit(request, session) if session.known else empty(403)
        if request.method != "GET":
            return empty(405)
        # The server reads only the first of repeated `tags=`.
        text = next(iter(request.query_params.getlist("tags")), "")
        wanted = text.replace("+", " ").replace(",", " ").split()
        ids = [
            job.id
            for job in self._site.jobs.values()
            if session.known and not job.hidden and all(_has_tag(job, tag) for tag in wanted)
        ]
        return paged(request, "jobs", f"{self._site.url}/jobs", ids)

    async def _submit(self, request: Request, session: SecuritySession) -> Response:
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
        name = new_id()
        job = UnicoreJob(
            site=self._site, id=name, json=description,
            directory=self._site.directory / "jobs" / name, owner=session.dn,
            tags=tags_of(description),
            termination=time.time() + self._site.settings.timing.lifetime,
        )  # fmt: skip
        job.hidden = self._site.takes_fault("forget_job")
        job.submissions += self._site.takes_fault("repeat_job")
        self._site.jobs[name] = job
        job.begin()
        return empty(201, {"Location": f"{self._site.url}/jobs/{name}"})

    async def handle(self, request: Request, job: UnicoreJob, sub: list[str]) -> Response:
        """Answer a request for a job; `sub` is the path below it, in parts."""
        match request.method, sub:
            case "GET", []:
                return shown(request, self._job_shown(job))
            case "GET", ["details"]:
                return await self._details(request, job)
            case "GET", ["submitted"]:
                hidden = [item | {"Data": "n/a"} if "Data" in item else item
                          for item in job.json.get("Imports") or []]  # fmt: skip
                return JSONResponse(job.json | ({"Imports": hidden} if hidden else {}))
            case "POST", ["actions", "start"]:
                job.started.set()
            case "POST", ["actions", "abort"]:
                await job.abort(ignored=self._site.takes_fault("ignore_abort"))
            case "POST", ["actions", "restart"]:
                pass
            case "PUT", []:
                return await self._change(request, job)
            case "DELETE", []:
                await self._site.destroy(job)
            case _:
                return empty(404)
        return empty(204)

    async def _details(self, request: Request, job: UnicoreJob) -> Response:
        try:
            return shown(request, await job.details())
        except TsiUnavailableError as error:
            return failure(500, f"Could not get job details: {error}")

    def _job_shown(self, job: UnicoreJob) -> dict[str, Any]:
        url = f"{self._site.url}/jobs/{job.id}"
        urls = {
            "self": url, "details": f"{url}/details", "submitted": f"{url}/submitted",
            "action:start": f"{url}/actions/start", "action:abort": f"{url}/actions/abort",
            "action:restart": f"{url}/actions/restart", "forwarding": f"{url}/forward-port",
            "workingDirectory": f"{self._site.url}/storages/{job.id}-uspace",
            "parentTSS": f"{self._site.url}/sites/{self._site.tss}",
        }  # fmt: skip
        properties = {
            "status": job.status, "statusMessage": job.status_message, "log": job.log,
            "queue": job.queue, "batchSystemID": job.batch_id, "name": job.name,
            "jobType": job.description.shown_type, "submissionTime": date(job.submitted),
            "terminationTime": date(job.termination), "submissionPreferences": {},
            "consumedTime": dict.fromkeys(
                ("total", "stage-in", "preCommand", "queued", "main", "postCommand", "stage-out"),
                "N/A",
            ),
            "owner": job.owner, "acl": [], "tags": job.tags, "_links": links(urls),
        }  # fmt: skip
        if job.exit_code is not None:
            properties["exitCode"] = str(job.exit_code)
        return properties

    async def _change(self, request: Request, job: UnicoreJob) -> Response:
        try:
            changes = json.loads(await request.body())
        except ValueError as error:
            return failure(500, f"Error setting properties: org.json.JSONException: {error}")
        reply = {}
        for name, value in changes.items():
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
    """Return whether a job has a tag; `_` is a wildcard, as in the server's SQL, but `%` is not."""
    if not set(tag) & set("_%"):
        return tag in job.tags
    return any(len(own) == len(tag) and all(a in ("_", b) for a, b in zip(tag, own, strict=True))
               for own in job.tags)  # fmt: skip


def new_id() -> str:
    """Return a new id in the server's form."""
    return "".join(secrets.choice(_LETTERS) for _ in range(11))
