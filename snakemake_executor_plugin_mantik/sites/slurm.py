"""Slurm's words for states and ends of jobs, and for why they wait, independent of the API."""

import re
import signal as signals
from collections.abc import Mapping
from enum import Enum
from typing import Final

from ..jobs.reasons import Reason
from .base import Phase


class Wait(Enum):
    """What a reason to wait means.

    TURN: it passes by itself. HINDERED: somebody has to do something. NEVER: the job's own request
    is beyond a limit, so that it never starts.
    """

    TURN = "turn"
    HINDERED = "hindered"
    NEVER = "never"


_LIMIT: Final = r"(Cpu|CPU|Mem|Memory|Node|GRES|License|BB|Energy|Billing|Unknown)"
_BY: Final = r"(QOS|Assoc)"

_REASONS: Final = {
    Wait.TURN: {
        r"Priority": "other jobs come first",
        r"Resources": "the nodes that it needs are busy",
        r"Nodes required for job are DOWN.*": "nodes that it needs are down, drained, or kept for "
        "other jobs",
        r"ReqNodeNotAvail.*|NodeDown|FrontEndDown": "nodes that it needs are down, or reserved, "
        "often for maintenance",
        r"Dependency": "the jobs before it have not ended",
        r"BeginTime": "its start time has not come",
        r"Licenses": "its licences are in use",
        r"Reservation": "its reservation has not begun, or is in use",
        r"Cleaning|Prolog|SchedDefer|FedJobLock": "it is being started, or was put back into the "
        "queue",
        r"BurstBuffer(Resources|StageIn)": "its burst buffer is being prepared",
        r"Power(NotAvail|Reserved)|MaxPoweredUpNodes": "there is no power for more nodes",
        rf"{_BY}(Max|Grp)Jobs\w*|MaxJobsPerAccount|AssociationJobLimit|QOSJobLimit"
        r"|JobArrayTaskLimit": "your limit of running jobs is reached",
        rf"{_BY}(Max|Grp)SubmitJobs?\w*|MaxSubmitJobsPerAccount": "the limit of submitted jobs is "
        "reached",
        rf"{_BY}Max\w+PerUser(Limit)?|Max\w+PerAccount|{_BY}Grp{_LIMIT}(Run(Minutes|Mins))?(Limit)?"
        r"|(QOS|Association)ResourceLimit": "a limit of your account or QOS is reached by running "
        "jobs",
    },
    Wait.HINDERED: {
        rf"{_BY}Grp\w*(Minutes|Mins|Wall)(Limit)?|(QOS|Association)TimeLimit|QOSUsageThreshold":
        "the budget is used up",
        r"DependencyNeverSatisfied": "a job before it failed",
        r"JobHeldUser": "it is held: scontrol release starts it",
        r"JobHeldAdmin|JobHoldMaxRequeue|.*requeued (in )?held.*": "the site's administrators hold "
        "it: ask the site's support",
        r"(Invalid)?Reservation(Deleted|Invalid)?": "its reservation does not exist, or not any "
        "more",
        r"Partition(Down|Inactive)": "the queue does not start jobs just now",
        # Which also stand for nodes that are down.
        r"PartitionNodeLimit|PartitionConfig|(Bad)?Constraints|MaxMemPerLimit": "no node that is "
        "up has what it requests",
    },
    Wait.NEVER: {
        r"PartitionTimeLimit": "it requests more time than the queue allows",
        rf"{_BY}MaxWall\w*PerJob\w*": "it requests more time than a job may",
        rf"{_BY}Max\w*Per(Job|Node)(Limit)?": "it requests more than a job may",
        r"QOSMin\w+": "it requests less than a job has to",
        r"InvalidAccount|AccountNotAllowed": "the account may not use this queue",
        r"InvalidQOS|QOSNotAllowed": "the QOS may not be used here",
    },
}  # fmt: skip
"""Patterns of reasons to wait, with an explanation; the first that matches counts."""


def pending_reason(text: object) -> str:
    """Return a reason as a scheduler writes it, in one form; empty if it names none."""
    words = " ".join(str(text or "").split()).strip("() ,")
    words = words if " " in words else words.replace("_", " ")
    return "" if words in ("None", "null") else words


def judge_pending(reason: str) -> tuple[Wait, str]:
    """Return what a reason means, and an explanation, empty if it is unknown.

    An unknown word is an obstacle, a sentence is not.
    """
    for wait, patterns in _REASONS.items():
        for pattern, text in patterns.items():
            if re.fullmatch(pattern, reason):
                return wait, text
    return (Wait.HINDERED if re.fullmatch(r"\w+", reason) else Wait.TURN), ""


def pending_obstacle(reason: str) -> tuple[str, bool]:
    """Return why a pending job cannot start, and whether it never will, from Slurm's `StateReason`.

    The reason is empty if the job only waits its turn.
    """
    wait, _ = judge_pending(reason)
    return ("" if wait is Wait.TURN else reason), wait is Wait.NEVER


def explain_pending(reason: str) -> str:
    """Return a scheduler's reason with an explanation, and whether the job can ever start.

    An unknown reason is returned as it is.
    """
    wait, text = judge_pending(reason)
    never = "; it never starts as it is" if wait is Wait.NEVER else ""
    return f"{reason} ({text}{never})" if text else reason


_WAITS: Final = (Phase.WAITING, None)
_RUNS: Final = (Phase.RUNNING, None)
SLURM_STATES: Final[Mapping[str, tuple[Phase, Reason | None]]] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"), _WAITS),
    **dict.fromkeys(("REQUEUE_FED", "RESV_DEL_HOLD"), _WAITS),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"), _RUNS),
    **dict.fromkeys(("STAGE_OUT", "RESIZING"), _RUNS),
    "COMPLETED": (Phase.ENDED, Reason.SUCCESS),
    "FAILED": (Phase.ENDED, None),
    "TIMEOUT": (Phase.ENDED, Reason.TIME_LIMIT),
    "DEADLINE": (Phase.ENDED, Reason.TIME_LIMIT),
    "OUT_OF_MEMORY": (Phase.ENDED, Reason.OUT_OF_MEMORY),
    "NODE_FAIL": (Phase.ENDED, Reason.NODE_FAILURE),
    "BOOT_FAIL": (Phase.ENDED, Reason.NODE_FAILURE),
    "PREEMPTED": (Phase.ENDED, Reason.PREEMPTED),
    "CANCELLED": (Phase.ENDED, Reason.CANCELLED),
    "REVOKED": (Phase.ENDED, Reason.CANCELLED),
}
"""The meaning of a `JobState`; codes and signals say why a job FAILED."""


def slurm_phase(word: str) -> Phase:
    """Return the phase that a `JobState` means."""
    return SLURM_STATES.get(word, (Phase.UNKNOWN, None))[0]


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

_LAUNCH_SIGNAL: Final = 53
"""The signal that Slurm reports if a job's working directory or output file cannot be used.

Slurm sets `Reason=JobLaunchFailure` for every job whose batch script a signal ended (22.05).
"""


def parse_number(value: object) -> int | None:
    """Parse an exit code or a time, which may come as a text."""
    try:
        return int(str(value))
    except ValueError:
        return None


def is_scheduler_id(text: str) -> bool:
    """Return whether a text can be the id of a job of Slurm or PBS (`17`, `17.server`)."""
    return re.fullmatch(r"[0-9]+(\.[A-Za-z0-9.-]+)?", text, re.ASCII) is not None


def end_reason(state: str, code: int | None, signal: int | None) -> Reason | None:
    """Return why a job ended, from Slurm's `JobState`; None if that is not an end.

    `code` and `signal` are those with which the batch script ended, if reported; signal 0 means
    none.
    """
    if state != "FAILED":
        return SLURM_STATES.get(state, (Phase.UNKNOWN, None))[1]
    if code:
        return Reason.EXIT_CODE
    return Reason.LAUNCH_FAILURE if signal == _LAUNCH_SIGNAL else Reason.UNKNOWN


def describe_end(state: str, reason: str, code: int | None, signal: int | None) -> str:
    """Describe an end in Slurm's words on one line, without misleading reasons.

    Slurm reports `JobLaunchFailure` for all jobs that a signal ended, and for cancelled jobs still
    the reason for which they waited.
    """
    misleads = state.startswith("CANCELLED") or (
        reason == "JobLaunchFailure" and signal != _LAUNCH_SIGNAL
    )
    words = state if misleads or reason in ("", "None") else f"{state} ({reason})"
    if state != "FAILED":
        return words
    if signal:
        known = signal in set(signals.Signals)
        name = f" ({signals.Signals(signal).name})" if known else ""
        return f"{words}, ended by signal {signal}{name}"
    return f"{words}, exit code {code}" if code else words


def failed_node(reason: Reason | None, nodes: object) -> str:
    """Return the node because of which a job ended, from the list of its nodes; else empty.

    Of several nodes Slurm does not say which one it was.
    """
    single = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", str(nodes or ""), re.ASCII)
    of_node = reason in (Reason.NODE_FAILURE, Reason.LAUNCH_FAILURE)
    return single[0] if single and of_node else ""


def memory_message(output: str) -> str:
    """Return the line of a job's output in which Slurm reports a lack of memory; else empty.

    Slurm's state need not show it: Slurm kills one process after the other, and the batch script
    may end by itself after its command was killed (COMPLETED, exit code 0).
    """
    told = filter(_MEMORY_TEXTS.search, output.splitlines())
    return " ".join(next(told, "").split())[:_LONGEST_WORDS]
