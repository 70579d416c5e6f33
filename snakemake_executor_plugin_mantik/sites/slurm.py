"""Slurm's words for states and ends of jobs, independent of the API."""

import re
import signal as signals
from typing import Final

from snakemake_executor_plugin_mantik.jobs.reasons import Reason

SLURM_WAITING: Final = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD")
)
"""`JobState` of jobs that have not started."""
SLURM_RUNNING: Final = frozenset(
    ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
)
"""`JobState` of jobs that have started and not ended."""
SLURM_STATES: Final = {
    "TIMEOUT": Reason.TIME_LIMIT,
    "DEADLINE": Reason.TIME_LIMIT,
    "OUT_OF_MEMORY": Reason.OUT_OF_MEMORY,
    "NODE_FAIL": Reason.NODE_FAILURE,
    "BOOT_FAIL": Reason.NODE_FAILURE,
    "PREEMPTED": Reason.PREEMPTED,
    "CANCELLED": Reason.CANCELLED,
    "REVOKED": Reason.CANCELLED,
}
"""Reasons by the `JobState` of jobs that ended without an exit code of their own."""

_MEMORY_TEXTS: Final = re.compile(
    r"exceeded (job |step )?memory limit|oom[-_]kill|OOM Killed|Out Of Memory|out-of-memory",
    re.IGNORECASE,
)
"""What slurmstepd writes to a job's standard error when it or the kernel killed the job."""

_LONGEST_WORDS: Final = 500

TOO_MANY_JOBS: Final = re.compile(
    r"\b(QOS|Assoc)\w*Submit\w*Limit|would exceed \S+ (per-\S+ )?limit of jobs", re.IGNORECASE
)
"""Errors of sbatch and qsub about a limit on submitted jobs; other limits stay exceeded."""

AWAY: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out on send/recv|"
    r"Slurm backup controller in standby mode|Slurm temporarily unable to accept job",
    re.IGNORECASE,
)
"""Errors of sbatch while its controller is away, restarts or is overloaded."""

LAUNCH_SIGNAL: Final = 53
"""The signal that Slurm reports if a job's working directory or output file cannot be used.

Slurm sets `Reason=JobLaunchFailure` for every job whose batch script a signal ended (22.05).
"""


def is_scheduler_id(text: str) -> bool:
    """Return whether a text can be the id of a job of Slurm or PBS (`17`, `17.server`)."""
    return re.fullmatch(r"[0-9]+(\.[A-Za-z0-9.-]+)?", text, re.ASCII) is not None


def end_reason(state: str, code: int | None, signal: int | None) -> Reason | None:
    """Return why a job ended, from Slurm's `JobState`; None if that is not an end.

    `code` and `signal` are those with which the batch script ended, if reported; signal 0 means
    none.
    """
    if state == "COMPLETED":
        return Reason.SUCCESS
    if state in SLURM_STATES:
        return SLURM_STATES[state]
    if state != "FAILED":
        return None
    if code:
        return Reason.EXIT_CODE
    return Reason.LAUNCH_FAILURE if signal == LAUNCH_SIGNAL else Reason.UNKNOWN


def describe_end(state: str, reason: str, code: int | None, signal: int | None) -> str:
    """Describe an end in Slurm's words on one line, without misleading reasons.

    Slurm reports `JobLaunchFailure` for all jobs that a signal ended, and for cancelled jobs still
    the reason for which they waited.
    """
    misleads = state.startswith("CANCELLED") or (
        reason == "JobLaunchFailure" and signal != LAUNCH_SIGNAL
    )
    words = state if misleads or reason in ("", "None") else f"{state} ({reason})"
    if state != "FAILED":
        return words
    if signal:
        known = signal in set(signals.Signals)
        name = f" ({signals.Signals(signal).name})" if known else ""
        return f"{words}, ended by signal {signal}{name}"
    return f"{words}, exit code {code}" if code else words


def memory_message(output: str) -> str:
    """Return the line of a job's output in which Slurm reports a lack of memory; else empty.

    Slurm's state need not show it: Slurm kills one process after the other, and the batch script
    may end by itself after its command was killed (COMPLETED, exit code 0).
    """
    for line in output.splitlines():
        if _MEMORY_TEXTS.search(line):
            return " ".join(line.split())[:_LONGEST_WORDS]
    return ""
