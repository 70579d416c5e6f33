"""Format the texts of pictures (names, states, times), and render their templates."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

import jinja2

from snakemake_executor_plugin_mantik.common.errors import printable
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.pictures.value import Node, NodeState

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
