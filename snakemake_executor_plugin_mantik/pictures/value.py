"""The values that pictures of a workflow show: its jobs, their times and sites, and their edges."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class NodeState(StrEnum):
    """The state of a job, in the words that pictures use.

    SKIPPED: it did not run before Snakemake ended.
    """

    WAITING = "waiting"
    SKIPPED = "skipped"
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"


@dataclass(frozen=True)
class Node:
    """A job, or a try of it among the `earlier` ones of a `Picture`.

    Attributes:
        id: its name in edges; unique among the nodes.
        name: usually the rule with its wildcards.
        site: empty: this machine, or none yet.
        prepared, submitted, queued, started, ended, fetched: seconds since the epoch, if known:
            when it was taken up, to be uploaded; was submitted; when only the queue kept it, not
            other jobs any more; when it began; ended; and when its results were here.
        note: a line about how it ended (exit code, reason), shown in the tooltip.
    """

    id: str
    name: str
    rule: str
    state: NodeState
    wildcards: Mapping[str, str] = field(default_factory=dict)
    site: str = ""
    queued: float | None = None
    started: float | None = None
    ended: float | None = None
    note: str = ""
    prepared: float | None = None
    fetched: float | None = None
    submitted: float | None = None


@dataclass(frozen=True)
class Picture:
    """A workflow at a moment.

    Attributes:
        title: the workflow's name.
        nodes: its jobs, by the last try of each.
        now: the moment, in seconds since the epoch; running jobs are drawn up to it.
        edges: (job, job that needs it) by id; may be left out if there are many.
        rule_edges: (rule, rule that needs it); empty: derived from `edges`.
        earlier: tries that later ones have replaced; shown in the timeline.
    """

    title: str
    nodes: tuple[Node, ...]
    now: float
    edges: tuple[tuple[str, str], ...] = ()
    rule_edges: tuple[tuple[str, str], ...] = ()
    earlier: tuple[Node, ...] = ()
