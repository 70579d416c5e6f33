"""What pictures of a workflow show, as values and as text: its jobs, their times, their edges."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, Final

import jinja2

from snakemake_executor_plugin_mantik.common.errors import printable
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration


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


GLYPHS: Final[Mapping[NodeState, str]] = {
    NodeState.FINISHED: "✓",
    NodeState.RUNNING: "▶",
    NodeState.QUEUED: "…",
    NodeState.WAITING: "○",
    NodeState.SKIPPED: "–",
    NodeState.FAILED: "✗",
    NodeState.KILLED: "■",
}
"""A symbol for each state besides its colour, in the order of counts."""

_LEAST: Final = 0.7
"""The least scale of a drawing in a narrow frame."""


def text_line(text: str) -> str:
    """Return a text as one line without control characters, which XML cannot hold."""
    return " ".join(printable(text).split())


def column_count(text: str) -> int:
    """Return the width of a text in narrow characters."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten_text(text: str, most: int) -> str:
    """Return a text as one line, cut to `most` columns."""
    text = text_line(text)
    if column_count(text) <= most:
        return text
    while text and column_count(text) >= most:
        text = text[:-1]
    return f"{text}…"


def format_timestamp(moment: float) -> str:
    """Format a time in UTC, to the second."""
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"


def count_states(states: Iterable[NodeState]) -> Sequence[tuple[NodeState, int]]:
    """Count the nodes in each state that occurs."""
    number = Counter(states)
    return [(state, number[state]) for state in GLYPHS if number[state]]


def waited_s(node: Node, now: float) -> float | None:
    """Return the seconds in the queue so far; None if it was not queued."""
    if node.queued is None:
        return None
    end = node.started if node.started is not None else node.ended
    return max(0.0, (now if end is None else end) - node.queued)


def ran_s(node: Node, now: float) -> float | None:
    """Return the running time so far, in seconds; None if it has not started."""
    if node.started is None:
        return None
    return max(0.0, (now if node.ended is None else node.ended) - node.started)


def format_wildcards(node: Node) -> str:
    """Format a job's wildcards; without any, return its name if that differs from the rule."""
    if node.wildcards:
        return ", ".join(f"{name}={value}" for name, value in node.wildcards.items())
    return "" if node.name == node.rule else node.name


def node_title(node: Node, now: float) -> str:
    """Return a job's tooltip: all known facts, one per line."""
    facts = [
        text_line(node.name),
        f"{node.state}" + (f" at {text_line(node.site)}" if node.site else ""),
    ]
    if node.submitted is not None and (node.queued is None or node.queued > node.submitted):
        until = now if node.queued is None else node.queued
        until = min(until, node.ended) if node.ended is not None else until
        facts.append(f"waited {humanize_duration(max(0.0, until - node.submitted))} for other jobs")
    if (seconds := waited_s(node, now)) is not None and node.queued is not None:
        facts.append(f"queued {format_timestamp(node.queued)}, waited {humanize_duration(seconds)}")
    if (seconds := ran_s(node, now)) is not None and node.started is not None:
        facts.append(f"started {format_timestamp(node.started)}, ran {humanize_duration(seconds)}")
    if node.ended is not None:
        facts.append(f"ended {format_timestamp(node.ended)}")
    if node.fetched is not None and node.ended is not None and node.fetched > node.ended:
        facts.append(f"results here {humanize_duration(node.fetched - node.ended)} later")
    return "\n".join([*facts, text_line(node.note)] if node.note else facts)


def render_template(name: str, **values: Any) -> str:
    """Render a template beside this module; escape values for HTML."""
    template = template_environment(__package__).get_template(name)
    return template.render(values, glyphs=GLYPHS, least=_LEAST)


def _writable(value: Any) -> Any:
    """Remove from a text what XML and UTF-8 cannot hold."""
    return printable(value) if type(value) is str else value


@cache
def template_environment(*packages: str) -> jinja2.Environment:
    """Return an environment for templates in packages, which escapes values for HTML."""
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package, ".") for package in packages]),
        autoescape=True,
        finalize=_writable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


MAX_LISTED_JOBS: Final = 1000
"""The most jobs that a pipeline lists; of more it holds only the edges between rules."""


@dataclass(frozen=True)
class PicturedTry:
    """A try of a job, or of a group.

    Attributes:
        jobs: the identities of its job, or of the members of its group, as the pipeline has them.
        node: what it looks like; its id is that of the try.
    """

    jobs: tuple[str, ...]
    node: Node


def make_picture(
    title: str, pipeline: Any, tries: Iterable[PicturedTry], now: float, *, over: bool = False
) -> Picture:
    """Make the picture of a workflow.

    Args:
        title: the workflow's name.
        pipeline: None, or what `adapter.workflow_metadata` describes: `jobs`, each with `id`,
            `name`, `rule`, `wildcards`, `needed` (whether it is to run) and `done`; `edges` between
            them; and `rule_edges`. Without `jobs`, the picture shows the submitted ones.
        tries: all tries of the submitted jobs, the oldest first.
        now: seconds since the epoch.
        over: whether no Snakemake is to run the jobs that have no try.
    """
    known = pipeline or {"jobs": [], "edges": [], "rule_edges": []}
    by_job: dict[str, list[PicturedTry]] = {}
    for each in tries:
        for job in each.jobs:
            by_job.setdefault(job, []).append(each)
    declared = {each["id"]: each for each in known["jobs"]}
    nodes = [
        _node(each, by_job.get(name, []), over=over)
        for name, each in declared.items()
        if each["needed"] or name in by_job
    ]
    nodes += [replace(of[-1].node, id=name) for name, of in by_job.items() if name not in declared]
    shown = {node.id for node in nodes}
    return Picture(
        title,
        tuple(nodes),
        now,
        tuple((a, b) for a, b in known["edges"] if a in shown and b in shown),
        tuple((a, b) for a, b in known["rule_edges"]),
        tuple(each.node for of in by_job.values() for each in of[:-1]),
    )


def _node(declared: Mapping[str, Any], tries: Sequence[PicturedTry], *, over: bool) -> Node:
    of = {
        "id": declared["id"], "name": declared["name"], "rule": declared["rule"],
        "wildcards": declared["wildcards"],
    }  # fmt: skip
    if not tries:
        left = NodeState.SKIPPED if over else NodeState.WAITING
        return Node(**of, state=NodeState.FINISHED if declared["done"] else left)
    return replace(tries[-1].node, **of)
