"""Job states from UNICORE and the batch system behind it. Pure functions.

For UNICORE a job without an exit code is just FAILED: time limit, memory, node failure and
cancellation look the same. The batch system's own details, and Slurm's texts in the job's standard
error, show the difference; each text here was seen on a real server.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from pyunicore.aio.client import JobStatus

from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.answers import shorten
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase
from snakemake_executor_plugin_mantik.sites.pending import pending_obstacle, pending_reason
from snakemake_executor_plugin_mantik.sites.slurm import (
    AWAY,
    SLURM_RUNNING,
    SLURM_WAITING,
    TOO_MANY_JOBS,
    describe_end,
    end_reason,
)
from snakemake_executor_plugin_mantik.sites.unicore.answers import root_cause

STATUS_FIELDS: Final = "status,statusMessage,exitCode,batchSystemID,queue"
"""Properties that are requested for a job's state: 40 bytes of the 4 kB that an answer has with the
log, which holds the whole script."""
EXPLAIN_FIELDS: Final = f"{STATUS_FIELDS},log"

_LONGEST_DETAIL: Final = 500

_PHASES: Final = {
    JobStatus.READY.value: Phase.WAITING,
    JobStatus.STAGINGIN.value: Phase.WAITING,
    JobStatus.QUEUED.value: Phase.WAITING,
    JobStatus.RUNNING.value: Phase.RUNNING,
    JobStatus.STAGINGOUT.value: Phase.RUNNING,
    JobStatus.SUCCESSFUL.value: Phase.ENDED,
    JobStatus.FAILED.value: Phase.ENDED,
    JobStatus.UNDEFINED.value: Phase.UNKNOWN,
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

_DETAILS: Final = ("JobState", "Reason", "ExitCode", "SubmitTime", "StartTime", "RunTime")
"""Fields of `scontrol show job`."""
_LOGGED_DETAILS: Final = "Detailed job information from batch system:"
_REJECTION: Final = re.compile(r"Could not submit job: (?P<text>.*)", re.DOTALL)
_UNICORE_DATE: Final = re.compile(r"^\w{3} \w{3} \d+ [\d:]+ \S+ \d{4}: ")


def unicore_state(properties: Mapping[str, Any]) -> JobState:
    """Return the state in a job's properties (`STATUS_FIELDS`)."""
    phase = _PHASES.get(str(properties.get("status")), Phase.UNKNOWN)
    message = root_cause(str(properties.get("statusMessage") or ""))
    code = _number(properties.get("exitCode"))
    state = JobState(
        phase,
        _reason(str(properties.get("status")), message, code) if phase is Phase.ENDED else None,
        detail=shorten(message, _LONGEST_DETAIL),
        exit_code=code,
        scheduler_id=_known(properties.get("batchSystemID")),
        queue=_known(properties.get("queue")),
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
        text = _UNICORE_DATE.sub("", str(line))
        if match := _REJECTION.search(text):
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
    end = word, _number(code), _number(signal)
    reason = end_reason(*end)
    given_up = state.phase is Phase.UNKNOWN
    if word in SLURM_WAITING and (given_up or state.phase is Phase.WAITING):
        pending = pending_reason(details.get("Reason"))
        waits, never = pending_obstacle(pending)
        return replace(
            state, phase=Phase.WAITING, waits=waits, never=never, pending=pending,
            starts_after=_starts_after(details) or None,  # 0: it expects none
        )  # fmt: skip
    if given_up and word in SLURM_RUNNING:
        return replace(state, phase=Phase.RUNNING)
    by_itself = reason in (Reason.EXIT_CODE, Reason.UNKNOWN) and state.reason is Reason.EXIT_CODE
    if reason is None or by_itself or (reason is Reason.SUCCESS and not given_up):
        return state
    words = describe_end(word, details.get("Reason", ""), *end[1:])
    return replace(
        state, phase=Phase.ENDED, reason=reason, detail=words,
        ran=_ran(details), starts_after=_starts_after(details),
    )  # fmt: skip


def _reason(status: str, message: str, code: int | None) -> Reason:
    if status == JobStatus.SUCCESSFUL.value:
        return Reason.SUCCESS
    for text, reason in _STATUS_TEXTS:
        if re.search(text, message):
            return reason
    return Reason.EXIT_CODE if code else Reason.UNKNOWN


def _number(value: object) -> int | None:
    """Parse the exit code, which UNICORE gives as a text."""
    try:
        return int(str(value))
    except ValueError:
        return None


def _known(value: object) -> str:
    text = str(value or "")
    return "" if text == "N/A" else text
