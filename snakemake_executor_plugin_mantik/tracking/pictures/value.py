"""What pictures of a workflow show: its jobs, when and where they ran, and what needs what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class NodeState(StrEnum):
    """How far a job is, in the words that pictures use."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"


@dataclass(frozen=True)
class Node:
    """One job; or one try of it, among the `earlier` ones of a `Picture`.

    Attributes:
        id: what edges name it by; unique among the nodes.
        name: what it is called, usually the rule with its wildcards.
        rule: its rule.
        wildcards: of the job.
        state: how far it is.
        site: where it is or was; empty: on this machine, or nowhere yet.
        queued, started, ended: seconds since the epoch, where they are known.
        note: a line about how it ended (exit code, reason); shown where the mouse is.
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


@dataclass(frozen=True)
class Picture:
    """A workflow as it is at a time.

    Attributes:
        title: the workflow's name.
        nodes: its jobs, the last try of each.
        now: when that was, seconds since the epoch: what runs is drawn up to there.
        edges: (job, job that needs it) by their ids; may be left out where there are many.
        rule_edges: (rule, rule that needs it); empty: as the `edges` say.
        earlier: tries that others have replaced; shown in the timeline.
    """

    title: str
    nodes: tuple[Node, ...]
    now: float
    edges: tuple[tuple[str, str], ...] = ()
    rule_edges: tuple[tuple[str, str], ...] = ()
    earlier: tuple[Node, ...] = ()
