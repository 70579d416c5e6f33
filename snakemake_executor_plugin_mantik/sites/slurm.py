"""Slurm's own words for why a job ended, whatever API hands them on."""

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
"""`JobState` of Slurm, for jobs without an exit code of their own."""

_MEMORY_TEXTS: Final = re.compile(
    r"exceeded (job |step )?memory limit|oom[-_]kill|OOM Killed|Out Of Memory|out-of-memory",
    re.IGNORECASE,
)
"""What slurmstepd writes into a job's standard error when it or the kernel killed it."""

_LONGEST_WORDS: Final = 500

TOO_MANY_JOBS: Final = re.compile(
    r"\b(QOS|Assoc)\w*Submit\w*Limit|would exceed \S+ (per-\S+ )?limit of jobs", re.IGNORECASE
)
"""What sbatch, and qsub, say of a limit on how many jobs are submitted; other limits stay exceeded.
"""

_ITS_TURN: Final = re.compile(
    r"None|Priority|Resources|Licenses|BeginTime|Cleaning|Prolog|(QOS|Assoc)MaxJobs\w*Limit"
)
"""Reasons for which a job waits that pass by themselves."""
_NEVER: Final = re.compile(
    r"PartitionTimeLimit|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed"
    r"|(QOS|Assoc)Max\w*Per(Job|Node)(Limit)?|QOSMin\w+"
)
"""Reasons for which a job waits for ever as it is: its own request is beyond a limit.

Not PartitionNodeLimit and BadConstraints, which also stand for nodes that are down."""

AWAY: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out on send/recv|"
    r"Slurm backup controller in standby mode|Slurm temporarily unable to accept job",
    re.IGNORECASE,
)
"""What sbatch says while its controller is away, restarts or has too much to do."""

LAUNCH_SIGNAL: Final = 53
"""The signal that Slurm tells of a job whose working directory or output file cannot be had.

It calls every job so whose batch script a signal ended: `Reason=JobLaunchFailure` (22.05).
"""


def pending_obstacle(reason: str) -> tuple[str, bool]:
    """Why a pending job cannot start, empty if it is only not its turn; and whether it never will.

    Args:
        reason: Slurm's `StateReason`.
    """
    if not reason or _ITS_TURN.fullmatch(reason):
        return "", False
    return reason, _NEVER.fullmatch(reason) is not None


def end_reason(state: str, code: int | None, signal: int | None) -> Reason | None:
    """Why a job ended; None if Slurm's state of it is none of an end.

    Args:
        state: Slurm's word for it.
        code: the exit code of the batch script, where one is told.
        signal: the signal that ended it, 0 or None if none did.
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
    """Slurm's words for an end on one line, without those that mislead.

    It gives the reason `JobLaunchFailure` to all jobs that a signal ended, and leaves to those that
    are cancelled the one that they waited for.
    """
    misleads = state == "CANCELLED" or (reason == "JobLaunchFailure" and signal != LAUNCH_SIGNAL)
    words = state if misleads or reason in ("", "None") else f"{state} ({reason})"
    if state != "FAILED":
        return words
    if signal:
        known = signal in set(signals.Signals)
        name = f" ({signals.Signals(signal).name})" if known else ""
        return f"{words}, ended by signal {signal}{name}"
    return f"{words}, exit code {code}" if code else words


def memory_message(output: str) -> str:
    """The line of a job's output in which Slurm says that it ran out of memory; else empty.

    Slurm's state of such a job need not say it: it kills one process after the other, and may see
    a batch script end by itself whose command was killed (COMPLETED, exit code 0).
    """
    for line in output.splitlines():
        if _MEMORY_TEXTS.search(line):
            return " ".join(line.split())[:_LONGEST_WORDS]
    return ""
