"""Explain the scheduler's reasons why jobs wait, in words for people.

The reasons are Slurm's (`squeue`, "Job reason codes" in its documentation). PBS gives a sentence of
its own, which needs no explanation.
"""

import re
from typing import Final

from snakemake_executor_plugin_mantik.sites.slurm import pending_obstacle

_NEVER_STARTS: Final = "it never starts as it is"

_WORDS: Final = (
    (r"Priority", "other jobs come first"),
    (r"Resources", "the nodes that it needs are busy"),
    (r"Dependency", "the jobs before it have not ended"),
    (r"DependencyNeverSatisfied", "a job before it failed"),
    (r"BeginTime", "its start time has not come"),
    (r"Licenses", "its licences are in use"),
    (r"Cleaning|Prolog", "it is being started, or was put back into the queue"),
    (r"JobHeldUser", "it is held: scontrol release starts it"),
    (r"JobHeldAdmin", "the site's administrators hold it: ask the site's support"),
    (r"ReqNodeNotAvail|Nodes?Down|NodeNotAvail", "nodes that it needs are down or reserved"),
    (r"ReservedForMaintenance|Reservation\w*", "its nodes are reserved, often for maintenance"),
    (r"Partition(Down|Inactive)", "the queue does not start jobs just now"),
    (r"PartitionNodeLimit|BadConstraints", "no node that is up has what it requests"),
    (r"PartitionTimeLimit", "it requests more time than the queue allows"),
    (r"(QOS|Assoc)MaxJobs\w*Limit|AssociationJobLimit", "your limit of running jobs is reached"),
    (r"(QOS|Assoc)MaxWall\w*PerJob\w*", "it requests more time than a job may"),
    (r"(QOS|Assoc)Max\w*Per(Job|Node)(Limit)?", "it requests more than a job may"),
    (r"QOSMin\w+", "it requests less than a job has to"),
    (r"(QOS|Assoc)Grp(CPU|Billing|GRES)?\w*(Minutes|Mins|RunMin)\w*", "the budget is used up"),
    (r"(QOS|Assoc)(Grp|Max)\w+", "a limit of your account or QOS is reached by other jobs"),
    (r"InvalidAccount|AccountNotAllowed", "the account may not use this queue"),
    (r"InvalidQOS|QOSNotAllowed", "the QOS may not be used here"),
)
"""Patterns of Slurm's reasons, the first one that matches counts."""


def explain_pending(reason: str) -> str:
    """Return a scheduler's reason with an explanation, and whether the job can ever start.

    An unknown reason is returned as it is.
    """
    words = [text for pattern, text in _WORDS if re.fullmatch(pattern, reason)][:1]
    if pending_obstacle(reason)[1]:
        words.append(_NEVER_STARTS)
    return f"{reason} ({'; '.join(words)})" if words else reason
