"""Jobs through UNICORE's job API, and what its answers say of their states."""

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from ...common.errors import SiteError, SiteNotFound, SiteRejected
from ...jobs.reasons import Reason
from ..base import MISSING, JobState, Phase, Submission, do_nothing
from ..http import server_time, shorten
from ..rest import RestSite, states_of
from ..slurm import (
    AWAY,
    TOO_MANY_JOBS,
    describe_end,
    end_reason,
    failed_node,
    is_scheduler_id,
    memory_message,
    parse_number,
    pending_obstacle,
    pending_reason,
    slurm_phase,
)
from .connection import UnicoreConnection, UnicoreOpened, last_part, parse_server_time, root_cause
from .description import job_description, lost_resources

STATUS_FIELDS: Final = "status,statusMessage,exitCode,batchSystemID"
"""Properties that are requested for a job's state: 40 bytes of the 4 kB that an answer has with the
log, which holds the whole script."""
EXPLAIN_FIELDS: Final = f"{STATUS_FIELDS},log"

_LONGEST_DETAIL: Final = 500

_PHASES: Final = {
    "READY": Phase.WAITING,
    "STAGINGIN": Phase.WAITING,
    "QUEUED": Phase.WAITING,
    "RUNNING": Phase.RUNNING,
    "STAGINGOUT": Phase.RUNNING,
    "SUCCESSFUL": Phase.ENDED,
    "FAILED": Phase.ENDED,
    "UNDEFINED": Phase.UNKNOWN,
}

_STATUS_TEXTS: Final = (
    (r"Job aborted", Reason.CANCELLED),
    (r"Could not submit job", Reason.REJECTED),
    (r"Resource request <.*> is out of range|Resource <.*> is not available", Reason.REJECTED),
    (r"No conversion for unit|NumberFormatException", Reason.REJECTED),
    (r"Staging in failed|Stage-out failed", Reason.LAUNCH_FAILURE),
    (r"Pre-command\(s\) failed|Post-command\(s\) failed", Reason.LAUNCH_FAILURE),
    (r"User application exited with non-zero exit code", Reason.EXIT_CODE),
)
"""Texts of `statusMessage` of a FAILED job."""

_LOST_TEXTS: Final = re.compile(
    # The TSI was away while the job was made, submitted or queried.
    r"TSIUnavailableException|Error communicating to the TSI|TSI (is )?(currently )?unavailable|"
    # The TSI was killed while it started a command on the login node.
    r"Could not read PID file .*Submission to login node failed|"
    # The server itself was away in the middle of staging in.
    r"File transfer '\S+' not found|Error processing stage-in.*No such action|"
    r"java\.net\.\w+Exception|Broken pipe|Connection (reset|refused)",
    re.IGNORECASE,
)
"""Texts of `statusMessage` of a job that UNICORE gave up because something was away: the site did
not refuse it, and it may be in the scheduler's queue."""

_DETAILS: Final = (
    "JobState", "Reason", "ExitCode", "SubmitTime", "StartTime", "RunTime", "NodeList",
)  # fmt: skip
"""Fields of `scontrol show job`."""
_LOGGED_DETAILS: Final = "Detailed job information from batch system:"
_REJECTION: Final = re.compile(r"Could not submit job: (?P<text>.*)", re.DOTALL)


def unicore_state(properties: Mapping[str, Any]) -> JobState:
    """Return the state in a job's properties (`STATUS_FIELDS`)."""
    phase = _PHASES.get(str(properties.get("status")), Phase.UNKNOWN)
    message = root_cause(str(properties.get("statusMessage") or ""))
    code = parse_number(properties.get("exitCode"))
    scheduler_id = str(properties.get("batchSystemID") or "")
    state = JobState(
        phase,
        _reason(str(properties.get("status")), message, code) if phase is Phase.ENDED else None,
        detail=shorten(message, _LONGEST_DETAIL),
        scheduler_id="" if scheduler_id == "N/A" else scheduler_id,
    )
    if state.reason in (None, Reason.SUCCESS) or code is not None:
        return state
    if not _LOST_TEXTS.search(message):
        return state
    if state.scheduler_id:  # it may wait or run: UNICORE's state is no longer valid
        return replace(state, phase=Phase.UNKNOWN, reason=None)
    return replace(state, reason=Reason.LAUNCH_FAILURE, later=True)


def rejection_message(log: list[Any]) -> str:
    """Return the scheduler's words if the job's log shows that it refused the job, else empty."""
    for line in reversed(log):
        if match := _REJECTION.search(str(line)):
            return shorten(root_cause(match["text"]), _LONGEST_DETAIL)
    return ""


def state_of_log(state: JobState, log: list[Any]) -> JobState:
    """Return `state` with the scheduler's own words if it refused a job that has ended."""
    if state.phase is not Phase.ENDED or state.reason is Reason.SUCCESS or state.later:
        return state
    words = rejection_message(log)
    if not words or state.scheduler_id:
        return state
    if AWAY.search(words):
        return replace(state, reason=Reason.LAUNCH_FAILURE, detail=words, later=True)
    later = TOO_MANY_JOBS.search(words) is not None
    return replace(state, reason=Reason.REJECTED, detail=words, later=later)


def slurm_details(details: Mapping[str, Any]) -> dict[str, str]:
    """Extract state, reason, exit code and times from a job's /details, where present.

    They are entries of the JSON, or `Name=value` in a text in it, depending on the server.
    """
    entries = {name: str(details[name]) for name in _DETAILS if name in details}
    return entries or _found_details(" ".join(map(str, details.values())))


def logged_details(log: list[Any]) -> dict[str, str]:
    """Extract the same from the log of a job that left no exit code.

    UNICORE queries the details once, when it gives such a job up, and keeps them; the scheduler
    forgets a job some minutes after its end.
    """
    for line in reversed(log):
        _, marker, text = str(line).partition(_LOGGED_DETAILS)
        if marker:
            try:
                return slurm_details(json.loads(text))
            except (ValueError, AttributeError):
                return _found_details(text)
    return {}


def _found_details(text: str) -> dict[str, str]:
    """Extract the details from what `scontrol show job` prints, which has no blanks in values."""
    pairs = (word.partition("=") for word in text.split())
    return {name: value for name, _, value in reversed(list(pairs)) if name in _DETAILS}


def _starts_after(details: Mapping[str, str]) -> float | None:
    """Return the seconds between a job's submission and its start, if both are told.

    Slurm's times have no time zone, but the same one.
    """
    try:
        start = datetime.fromisoformat(details.get("StartTime", ""))
        wait = start - datetime.fromisoformat(details.get("SubmitTime", ""))
    except (ValueError, TypeError):
        return None
    return wait.total_seconds() if wait.total_seconds() >= 0 else None


def _ran(details: Mapping[str, str]) -> float | None:
    """Return the seconds that a job has run, from Slurm's `days-hours:minutes:seconds`."""
    text = details.get("RunTime", "")
    match = re.fullmatch(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + seconds


def slurm_state(details: Mapping[str, str], state: JobState) -> JobState:
    """Complete `state` by the end, or the reason to wait, in Slurm's details.

    For two more minutes UNICORE calls a job that left no exit code running, and it does not report
    why it ended. If a script ended by itself, only UNICORE knows the exit code: the batch file of a
    RAW job may end with another one.
    """
    word = details.get("JobState", "")
    code, _, signal = details.get("ExitCode", "").partition(":")
    end = word, parse_number(code), parse_number(signal)
    reason = end_reason(*end)
    given_up = state.phase is Phase.UNKNOWN
    if slurm_phase(word) is Phase.WAITING and (given_up or state.phase is Phase.WAITING):
        pending = pending_reason(details.get("Reason"))
        waits, never = pending_obstacle(pending)
        return replace(
            state, phase=Phase.WAITING, waits=waits, never=never, pending=pending,
            starts_after=_starts_after(details) or None,  # 0: it expects none
        )  # fmt: skip
    if given_up and slurm_phase(word) is Phase.RUNNING:
        return replace(state, phase=Phase.RUNNING)
    by_itself = reason in (Reason.EXIT_CODE, Reason.UNKNOWN) and state.reason is Reason.EXIT_CODE
    if reason is None or by_itself or (reason is Reason.SUCCESS and not given_up):
        return state
    words = describe_end(word, details.get("Reason", ""), *end[1:])
    return replace(
        state, phase=Phase.ENDED, reason=reason, detail=words,
        ran=_ran(details), starts_after=_starts_after(details),
        failed_node=failed_node(reason, details.get("NodeList")),
    )  # fmt: skip


def _reason(status: str, message: str, code: int | None) -> Reason:
    if status == "SUCCESSFUL":
        return Reason.SUCCESS
    for text, reason in _STATUS_TEXTS:
        if re.search(text, message):
            return reason
    return Reason.EXIT_CODE if code else Reason.UNKNOWN


_PAGE: Final = 200
"""Jobs in one answer; servers list no more by default."""
_STDERR_BYTES: Final = 16_384
"""Bytes of a job's standard error that are read to explain its end."""

_MOST_FOUND: Final = 10_000
"""Maximum number of jobs listed for one tag, page by page; an attempt has about three."""

_BEYOND_DOUBT: Final = (Reason.TIME_LIMIT, Reason.NODE_FAILURE, Reason.PREEMPTED)
"""Ends unrelated to memory, whatever a job's standard error holds."""

_ID: Final = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_log = logging.getLogger(__name__)


class UnicoreJobs(RestSite[UnicoreConnection, UnicoreOpened]):
    """The part of a site that deals with the user's jobs.

    UNICORE waits two minutes for the exit code of a job that has left the scheduler's queue
    (measured: 133 to 142 s) and calls it running until then.
    """

    connection = UnicoreConnection
    states_lag = True

    async def submit(self, submission: Submission, begin: Callable[[], None] = do_nothing) -> str:
        known = self._open.known.get(submission.resources.queue or "", frozenset())
        server = self._open.server
        description = job_description(submission, self._settings.scheduler, known, server)
        for lost in lost_resources(submission.resources, server):
            _log.debug("%s: submitted RAW, since %s loses %s", submission.name, server, lost)
        async with self._turn():
            begin()
            response = await self._connection.once("submit", "POST", "/jobs", json=description)
        job_id = last_part(response.headers.get("Location", ""))
        if response.status_code != 201 or not _ID.fullmatch(job_id):
            raise self._connection.nonsense("/jobs")
        return job_id

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for tag, answer in (await self._all(list(names), self._find)).items():
            if isinstance(answer, SiteError):
                raise answer
            found[tag] = answer
        return found

    async def _find(self, tag: str) -> list[str]:
        found: list[str] = []
        while True:
            params: dict[str, str | int] = {"tags": tag, "num": _PAGE, "offset": len(found)}
            answer = await self._connection.get("find", "/jobs", params)
            urls = answer.get("jobs")
            if not isinstance(urls, list):
                raise self._connection.nonsense("/jobs")
            found += map(last_part, urls)
            if len(urls) < _PAGE or len(found) > _MOST_FOUND:
                return [job_id for job_id in dict.fromkeys(found) if _ID.fullmatch(job_id)]

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        return states_of(await self._all(ids, self._state))

    async def glance(self, ids: Sequence[str]) -> None:
        """Return None: each job takes a request of its own."""

    async def scheduler_ids(self, ids: Sequence[str]) -> dict[str, str]:
        known = {i: state.scheduler_id for i, state in (await self.states(ids)).items()}
        return {i: known[i] for i in ids if is_scheduler_id(known[i])}

    async def _state(self, job_id: str) -> JobState:
        try:
            fields = {"fields": STATUS_FIELDS}
            return unicore_state(await self._connection.get("status", _url(job_id), fields))
        except SiteNotFound:
            return MISSING

    async def explain(self, job_id: str) -> JobState:
        try:
            fields = {"fields": EXPLAIN_FIELDS}
            answer = await self._connection.get("explain", _url(job_id), fields)
        except SiteNotFound:
            return MISSING
        found = answer.get("log")
        log = found if isinstance(found, list) else []
        state = state_of_log(unicore_state(answer), log)
        if state.later or state.reason not in (None, Reason.UNKNOWN, Reason.EXIT_CODE):
            return state
        if state.phase is not Phase.ENDED and not state.scheduler_id:
            return state
        known = slurm_state(logged_details(log) or await self._details(job_id), state)
        if known.phase is not Phase.ENDED or known.reason in _BEYOND_DOUBT:
            return known
        # Slurm's state does not always show that a job ran out of memory.
        words = memory_message(await self._stderr(job_id))
        return replace(known, reason=Reason.OUT_OF_MEMORY, detail=words) if words else known

    async def _details(self, job_id: str) -> dict[str, str]:
        try:
            answer = await self._connection.get("explain", f"{_url(job_id)}/details")
        except SiteNotFound:
            return {}
        return slurm_details(answer)

    async def _stderr(self, job_id: str) -> str:
        """Return the beginning of the job's standard error, as far as it can be read."""
        path = f"/storages/{quote(job_id, safe='')}-uspace/files/stderr"
        text = b""
        try:
            async with self._connection.download(path, 0) as (_, chunks):
                async for chunk in chunks:
                    text += chunk
                    if len(text) >= _STDERR_BYTES:
                        break
        except SiteError as error:
            _log.debug("standard error of job %s cannot be read: %s", job_id, error)
        return text.decode(errors="replace")

    async def cancel(self, ids: Sequence[str]) -> None:
        def abort(job_id: str) -> Awaitable[object]:
            path = f"{_url(job_id)}/actions/abort"
            return self._connection.ask("cancel", "POST", path, json={})

        await self._each(ids, abort)

    async def forget(
        self,
        ids: Sequence[str],
        *,
        succeeded: bool = False,  # noqa: ARG002 - directories are left
    ) -> None:
        await self._each(ids, lambda job: self._connection.ask("forget", "DELETE", _url(job)))

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        await self._each(ids, lambda job: self._extend(job, seconds))

    async def _extend(self, job_id: str, seconds: float) -> None:
        got = await self._connection.ask(
            "extend", "GET", _url(job_id), params={"fields": "terminationTime"}
        )
        answer = self._connection.json_of(got)
        # The server's current clock: it may differ from ours, and either may be set.
        now = server_time(got)
        until = (time.time() if now is None else now) + seconds
        try:
            if parse_server_time(str(answer.get("terminationTime"))) >= until:
                return
        except ValueError:
            pass  # an unknown format: set it
        # The only form with a time zone that UNICORE accepts.
        wanted = {
            "terminationTime": f"{datetime.fromtimestamp(until).astimezone():%Y-%m-%dT%H:%M:%S%z}"
        }
        response = await self._connection.ask("extend", "PUT", _url(job_id), json=wanted)
        result = self._connection.json_of(response).get("terminationTime")
        if result != "OK":  # the status is 200 all the same
            raise SiteRejected(
                f"the retention time of job {job_id} could not be extended: {result}",
                where=self._connection.where,
            )


def _url(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"
