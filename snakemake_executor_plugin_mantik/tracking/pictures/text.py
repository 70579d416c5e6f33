"""What pictures say in words: names that fit, states, times; and the templates they are made of."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

import jinja2

from snakemake_executor_plugin_mantik.common.errors import printable
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.tracking.pictures.value import Node, NodeState

GLYPHS: Final[Mapping[NodeState, str]] = {
    NodeState.FINISHED: "✓",
    NodeState.RUNNING: "▶",
    NodeState.QUEUED: "…",
    NodeState.WAITING: "○",
    NodeState.FAILED: "✗",
    NodeState.KILLED: "■",
}
"""A sign for each state besides its colour, in the order in which states are counted."""

_LEAST: Final = 0.7
"""What is left, at least, of a drawing's width in a narrow frame."""


def text_line(text: str) -> str:
    """Text as one line without control characters; XML cannot hold them."""
    return " ".join(printable(text).split())


def column_count(text: str) -> int:
    """How wide a text is, in narrow letters."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten_text(text: str, most: int) -> str:
    """The text as one line, cut to `most` columns."""
    text = text_line(text)
    if column_count(text) <= most:
        return text
    while text and column_count(text) >= most:
        text = text[:-1]
    return f"{text}…"


def format_timestamp(moment: float) -> str:
    """A time, to the second."""
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"


def count_states(states: Iterable[NodeState]) -> Sequence[tuple[NodeState, int]]:
    """How many there are of each state, without those that there are none of."""
    number = Counter(states)
    return [(state, number[state]) for state in GLYPHS if number[state]]


def waited_s(node: Node, now: float) -> float | None:
    """Seconds in the queue, so far."""
    if node.queued is None:
        return None
    end = node.started if node.started is not None else node.ended
    return max(0.0, (now if end is None else end) - node.queued)


def ran_s(node: Node, now: float) -> float | None:
    """Seconds of running, so far."""
    if node.started is None:
        return None
    return max(0.0, (now if node.ended is None else node.ended) - node.started)


def format_wildcards(node: Node) -> str:
    """The wildcards as users write them; of a job without any its name, if that says more."""
    if node.wildcards:
        return ", ".join(f"{name}={value}" for name, value in node.wildcards.items())
    return "" if node.name == node.rule else node.name


def node_title(node: Node, now: float) -> str:
    """All that is known of a job, a fact a line, for where the mouse is."""
    told = [
        text_line(node.name),
        f"{node.state}" + (f" at {text_line(node.site)}" if node.site else ""),
    ]
    if (seconds := waited_s(node, now)) is not None and node.queued is not None:
        told.append(f"queued {format_timestamp(node.queued)}, waited {humanize_duration(seconds)}")
    if (seconds := ran_s(node, now)) is not None and node.started is not None:
        told.append(f"started {format_timestamp(node.started)}, ran {humanize_duration(seconds)}")
    if node.ended is not None:
        told.append(f"ended {format_timestamp(node.ended)}")
    return "\n".join([*told, text_line(node.note)] if node.note else told)


def render_template(name: str, **values: Any) -> str:
    """A template beside this module, filled in; what is put in is escaped for HTML."""
    return _environment().get_template(name).render(values, glyphs=GLYPHS, least=_LEAST)


def _writable(value: Any) -> Any:
    """Text that XML and UTF-8 can hold, wherever it comes from."""
    return printable(value) if type(value) is str else value


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        finalize=_writable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
