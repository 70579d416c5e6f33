"""Say what a scheduler's reason why a job waits means: its turn, an obstacle, or never.

The reasons are those of Slurm 20 to 25: one word, or one of a few sentences. `scontrol`, which
UNICORE reads, writes blanks in them as `_`. PBS gives a sentence of its own, which needs no
explanation.
"""

import re
from enum import Enum
from typing import Final


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

_REASONS: Final = (
    (Wait.TURN, r"Priority", "other jobs come first"),
    (Wait.TURN, r"Resources", "the nodes that it needs are busy"),
    (
        Wait.TURN,
        r"Nodes required for job are DOWN.*",
        "nodes that it needs are down, drained, or kept for other jobs",
    ),
    (
        Wait.TURN,
        r"ReqNodeNotAvail.*|NodeDown|FrontEndDown",
        "nodes that it needs are down, or reserved, often for maintenance",
    ),
    (Wait.TURN, r"Dependency", "the jobs before it have not ended"),
    (Wait.TURN, r"BeginTime", "its start time has not come"),
    (Wait.TURN, r"Licenses", "its licences are in use"),
    (Wait.TURN, r"Reservation", "its reservation has not begun, or is in use"),
    (
        Wait.TURN,
        r"Cleaning|Prolog|SchedDefer|FedJobLock",
        "it is being started, or was put back into the queue",
    ),
    (Wait.TURN, r"BurstBuffer(Resources|StageIn)", "its burst buffer is being prepared"),
    (Wait.TURN, r"Power(NotAvail|Reserved)|MaxPoweredUpNodes", "there is no power for more nodes"),
    (
        Wait.TURN,
        rf"{_BY}(Max|Grp)Jobs\w*|MaxJobsPerAccount|AssociationJobLimit|QOSJobLimit"
        r"|JobArrayTaskLimit",
        "your limit of running jobs is reached",
    ),
    (
        Wait.TURN,
        rf"{_BY}(Max|Grp)SubmitJobs?\w*|MaxSubmitJobsPerAccount",
        "the limit of submitted jobs is reached",
    ),
    (
        Wait.TURN,
        rf"{_BY}Max\w+PerUser(Limit)?|Max\w+PerAccount|{_BY}Grp{_LIMIT}(Run(Minutes|Mins))?(Limit)?"
        r"|(QOS|Association)ResourceLimit",
        "a limit of your account or QOS is reached by running jobs",
    ),
    (
        Wait.HINDERED,
        rf"{_BY}Grp\w*(Minutes|Mins|Wall)(Limit)?|(QOS|Association)TimeLimit|QOSUsageThreshold",
        "the budget is used up",
    ),
    (Wait.HINDERED, r"DependencyNeverSatisfied", "a job before it failed"),
    (Wait.HINDERED, r"JobHeldUser", "it is held: scontrol release starts it"),
    (
        Wait.HINDERED,
        r"JobHeldAdmin|JobHoldMaxRequeue|.*requeued (in )?held.*",
        "the site's administrators hold it: ask the site's support",
    ),
    (
        Wait.HINDERED,
        r"(Invalid)?Reservation(Deleted|Invalid)?",
        "its reservation does not exist, or not any more",
    ),
    (
        Wait.HINDERED,
        r"Partition(Down|Inactive)",
        "the queue does not start jobs just now",
    ),
    # Which also stand for nodes that are down.
    (
        Wait.HINDERED,
        r"PartitionNodeLimit|PartitionConfig|(Bad)?Constraints|MaxMemPerLimit",
        "no node that is up has what it requests",
    ),
    (Wait.NEVER, r"PartitionTimeLimit", "it requests more time than the queue allows"),
    (Wait.NEVER, rf"{_BY}MaxWall\w*PerJob\w*", "it requests more time than a job may"),
    (Wait.NEVER, rf"{_BY}Max\w*Per(Job|Node)(Limit)?", "it requests more than a job may"),
    (Wait.NEVER, r"QOSMin\w+", "it requests less than a job has to"),
    (Wait.NEVER, r"InvalidAccount|AccountNotAllowed", "the account may not use this queue"),
    (Wait.NEVER, r"InvalidQOS|QOSNotAllowed", "the QOS may not be used here"),
)
"""What a reason means, its pattern, and an explanation; the first pattern that matches counts."""

_NEVER_STARTS: Final = "it never starts as it is"


def pending_reason(text: object) -> str:
    """Return a reason as a scheduler writes it, in one form; empty if it names none."""
    words = " ".join(str(text or "").split()).strip("() ,")
    words = words if " " in words else words.replace("_", " ")
    return "" if words in ("None", "null") else words


def judge_pending(reason: str) -> Wait:
    """Return what a reason means. An unknown word is an obstacle, a sentence is not."""
    for wait, pattern, _ in _REASONS:
        if re.fullmatch(pattern, reason):
            return wait
    return Wait.HINDERED if re.fullmatch(r"\w+", reason) else Wait.TURN


def pending_obstacle(reason: str) -> tuple[str, bool]:
    """Return why a pending job cannot start, and whether it never will, from Slurm's `StateReason`.

    The reason is empty if the job only waits its turn.
    """
    wait = judge_pending(reason)
    return ("" if wait is Wait.TURN else reason), wait is Wait.NEVER


def explain_pending(reason: str) -> str:
    """Return a scheduler's reason with an explanation, and whether the job can ever start.

    An unknown reason is returned as it is.
    """
    words = [text for _, pattern, text in _REASONS if re.fullmatch(pattern, reason)][:1]
    if judge_pending(reason) is Wait.NEVER:
        words.append(_NEVER_STARTS)
    return f"{reason} ({'; '.join(words)})" if words else reason
