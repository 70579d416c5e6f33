"""Jobs over firecREST's REST API: `/compute/SYSTEM/jobs`."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..batch import BatchScheduler, CancelError, cancel_error
from ..sbatch import SbatchError
from ..slurm import SlurmError
from .accounting import WINDOWS, Accounting
from .answers import Failure, either, flag, invalid, json_body, text
from .shell import LoginNode, too_slow

_ID = re.compile(r"[a-zA-Z0-9]+")
_LONGEST_NAME = 235
_SERVER_VARIABLES = {"F7T_version": "v2.0.0"}
"""Environment of a job whose request contains no variables."""

_OPTIONS = (
    ("partition", ("partition",)), ("reservation", ("reservation",)), ("account", ("account",)),
    ("job-name", ("name",)), ("error", ("standardError", "standard_error")),
    ("output", ("standardOutput", "standard_output")),
    ("input", ("standardInput", "standard_input")), ("constraint", ("constraints",)),
)  # fmt: skip
"""sbatch's options, and the fields of a request that set them."""

_OVER_QUOTA = "Job submission rejected: accounting/QOS policy limit exceeded."
_QUOTA = re.compile(r"\b(?:QOS|Assoc)(?:Max|Min)\w*Limit\b", re.IGNORECASE)
"""The part of sbatch's messages that the server treats as a limit of the account."""


def _slurm_failure(stderr: str, status: int = 1) -> Failure:
    """Return the response to a failed Slurm command: a 500, also for lasting reasons."""
    return Failure(
        500, f"Unexpected Slurm command response. exit_status:{status} std_err:{stderr}\n"
    )


def no_answer(reason: str) -> Failure:
    """Return the response to a query for jobs if sacct or squeue does not answer."""
    return Failure(500, "Error executing Slurm command.", caused_by=[reason])


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except (Failure, SlurmError) as error:
        raise no_answer(str(error)) from error


def exported(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of a request that reach the job.

    They pass through `sbatch --export=ALL,K=V,...`, which splits at every comma.
    """
    items = ",".join(f"{name}={value}" for name, value in variables.items()).split(",")
    pairs = (item.partition("=") for item in items)
    return {name: value for name, equals, value in pairs if equals}


class Compute:
    """The jobs of one site."""

    def __init__(self, node: LoginNode, scheduler: BatchScheduler, accounting: Accounting) -> None:
        self._node = node
        self._scheduler = scheduler
        self._accounting = accounting
        self._hidden: set[int] = set()

    async def handle(self, request: Request, parts: list[str]) -> Response:
        """Answer a request, or raise `Failure`; `parts` follow `jobs` in the path."""
        match request.method, parts:
            case "POST", []:
                return await self._submit(request)
            case "GET", []:
                return await self._list(request)
            case "GET", [number]:
                return await self._one(number)
            case "GET", [number, "metadata"]:
                return await self._metadata(number)
            case "PUT", [number, "attach"]:
                return await self._attach(request, number)
            case "DELETE", [number]:
                return await self._cancel(number)
            case _, [] | [_] | [_, "metadata" | "attach"]:
                raise Failure(405, "Method Not Allowed")
        raise Failure(404, "Not Found")

    # --- submission ---------------------------------------------------------------------------

    async def _submit(self, request: Request) -> Response:
        body = await json_body(request)
        job = body.get("job")
        if not isinstance(job, dict):
            raise invalid("body", "job", "Field required")
        await self._node.occupy()
        number = await self.submit(job, twice=bool(request.scope.get("sandbox.repeat")))
        if request.scope.get("sandbox.forget"):
            self._hidden.add(number)
        return JSONResponse({"jobId": str(number)}, 201)

    async def submit(self, job: Mapping[str, Any], *, twice: bool = False) -> int:
        """Submit the job of a request, two times if `twice`, and return the last id.

        Raise `Failure` if the request is not valid, or Slurm refuses it.
        """
        directory = text(job, "workingDirectory", "working_directory")
        script = self._script(job)
        if script is None:
            # sbatch waits for its input until firecREST gives up.
            await asyncio.sleep(self._node.settings.command_timeout)
            raise too_slow()
        variables = either(job, "env", "environment")
        if variables is None:
            variables = _SERVER_VARIABLES
        if not isinstance(variables, dict):
            raise invalid("body", "job", "Input should be a valid dictionary")
        options = {
            option: value
            for option, names in _OPTIONS
            if (value := text(job, *names, needed=False))
        }
        environment = exported({name: str(value) for name, value in variables.items()})
        options["chdir"] = directory
        number = 0
        try:
            for _ in range(2 if twice else 1):
                made = await self._scheduler.submit(script, self._node.home, options, environment)
                number = made.id
        except SbatchError as error:
            if _QUOTA.search(str(error)):
                raise Failure(403, f"{_OVER_QUOTA} {error}") from error
            raise _slurm_failure(str(error)) from error
        return number

    @staticmethod
    def _script(job: Mapping[str, Any]) -> str | None:
        if path := text(job, "scriptPath", "script_path", needed=False):
            try:
                return Path(path).read_text()
            except OSError as error:
                raise _slurm_failure(f"sbatch: error: Unable to open file {path}") from error
        return text(job, "script", needed=False) or None

    # --- queries ------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        flag(request, "allusers")
        name, window = query.get("name", ""), query.get("time_window", "24h")
        if len(name) > _LONGEST_NAME:
            problem = f"String should have at most {_LONGEST_NAME} characters"
            raise invalid("query", "name", problem)
        if window not in WINDOWS:
            allowed = ", ".join(repr(text) for text in WINDOWS)
            raise invalid("query", "time_window", f"Input should be {allowed}")
        names = [one for one in name.split(",") if one]
        with _asking():
            found = await self._accounting.listed(names, query.get("account", ""), WINDOWS[window])
            jobs = [job for job in found if int(job["jobId"]) not in self._hidden]
            await self._node.occupy(2, len(jobs) * self._node.settings.record_time)
        return JSONResponse({"jobs": jobs})

    async def _one(self, number: str) -> Response:
        _check_id(number)
        with _asking():
            await self._node.occupy(2)
            known = self._known(number)
            jobs = [] if known is None else await self._accounting.of_job(known)
        if not jobs:
            raise Failure(404, "Job not found.")
        return JSONResponse({"jobs": jobs})

    async def _metadata(self, number: str) -> Response:
        _check_id(number)
        await self._node.occupy(2)
        details = await self._scheduler.details(int(number)) if self._is_there(number) else None
        if details is None:
            raise Failure(404, "Job not found.")
        streams = {
            f"standard{name}": details.get(key, "").partition(" ")[0]
            # The server cuts scontrol's values at the first blank.
            for name, key in (("Input", "StdIn"), ("Output", "StdOut"), ("Error", "StdErr"))
        }
        script = await self._scheduler.script(int(number))
        return JSONResponse({"jobs": [{"jobId": details["JobId"], "script": script, **streams}]})

    def _known(self, number: str) -> int | None:
        """Return the id of a job, None for one that is denied and for what is no id."""
        found = int(number) if number.isdecimal() else None
        return None if found in self._hidden else found

    def _is_there(self, number: str) -> bool:
        return self._known(number) in self._scheduler.jobs

    # --- actions ------------------------------------------------------------------------------

    async def _cancel(self, number: str) -> Response:
        _check_id(number)
        await self._node.occupy()
        if not self._is_there(number):
            raise _slurm_failure(f"{cancel_error(number)}Invalid job id specified", 0)
        try:
            await self._scheduler.cancel(int(number))
        except CancelError as error:
            raise _slurm_failure(str(error), 0) from error
        return Response(status_code=204)

    async def _attach(self, request: Request, number: str) -> Response:
        """Run a command in a running job, as `srun --overlap` does."""
        _check_id(number)
        command = text(await json_body(request), "command")
        await self._node.occupy()
        if not self._is_there(number):
            raise _slurm_failure(
                "srun: error: Unable to confirm allocation for job: Invalid job id"
            )
        try:
            async with asyncio.timeout(self._node.settings.command_timeout):
                code, errors = await self._scheduler.attach(int(number), command)
        except TimeoutError as error:
            raise too_slow() from error
        if code:
            raise _slurm_failure(errors, code)
        return Response(status_code=204)


def _check_id(number: str) -> None:
    if not _ID.fullmatch(number):
        raise invalid("path", "job_id", "String should match pattern '^[a-zA-Z0-9]+$'")
