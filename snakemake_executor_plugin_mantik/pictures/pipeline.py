"""Draw the pipeline: jobs as boxes, or rules if there are many jobs.

It goes from left to right, or downwards if it would be too wide otherwise.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.pictures.layout import (
    Bend,
    Layout,
    Position,
    layer_graph,
)
from snakemake_executor_plugin_mantik.pictures.text import (
    GLYPHS,
    column_count,
    count_states,
    format_wildcards,
    node_title,
    ran_s,
    render_template,
    shorten_text,
)
from snakemake_executor_plugin_mantik.pictures.value import Node, NodeState, Picture

MAX_JOB_BOXES: Final = 60
"""The number of jobs above which the boxes are rules."""
_LETTERS: Final = 32
"""The widest text in a box, in columns."""

_LETTER: Final = 7.2
_LINE: Final = 16.0
_SMALLEST: Final = 110.0
_BETWEEN_COLUMNS: Final = 56.0
_BETWEEN_ROWS: Final = 34.0
_BETWEEN_BOXES: Final = 14.0
_BEND: Final = 12.0
_MARGIN: Final = 12.0
_SEEN: Final = 5.0
_PASSES: Final = 12
_WIDEST: Final = 900.0
"""The width from which a pipeline that goes downwards is preferred, if it is narrower."""

_Size = Callable[[Position], float]


@dataclass(frozen=True)
class Box:
    """A box for a job or a rule.

    Attributes:
        lines: its text.
        states: the states of its jobs, with the number of jobs in each.
        title: its tooltip.
    """

    id: str
    lines: Sequence[str]
    states: Sequence[tuple[NodeState, int]]
    title: str
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    @property
    def state(self) -> NodeState:
        """The state that decides its colour: the one that needs most attention."""
        there = {state for state, _ in self.states}
        return next(state for state in _ATTENTION if state in there)

    @property
    def parts(self) -> Sequence[tuple[NodeState, float, float]]:
        """Its states as parts of a bar: x and width of each; small parts stay visible."""
        total = sum(number for _, number in self.states)
        widths = [max(_SEEN, self.width * number / total) for _, number in self.states]
        drawn, x = [], self.x
        for (state, _), width in zip(self.states, widths, strict=True):
            fitting = width * self.width / sum(widths)
            drawn.append((state, x, fitting))
            x += fitting
        return drawn


_ATTENTION: Final = (
    NodeState.FAILED, NodeState.KILLED, NodeState.RUNNING, NodeState.QUEUED,
    NodeState.WAITING, NodeState.SKIPPED, NodeState.FINISHED,
)  # fmt: skip


def render_pipeline(picture: Picture) -> str:
    """Draw the pipeline as SVG."""
    if len(picture.nodes) <= MAX_JOB_BOXES and (picture.edges or not picture.rule_edges):
        boxes = [_job(node, picture.now) for node in picture.nodes]
        edges: Sequence[tuple[str, str]] = picture.edges
    else:
        boxes = _rules(picture)
        edges = picture.rule_edges or _between_rules(picture)
    layout = layer_graph([box.id for box in boxes], edges)
    drawing = _drawn(boxes, layout, down=False)
    if drawing.width > _WIDEST:
        drawing = min(drawing, _drawn(boxes, layout, down=True), key=lambda one: one.width)
    return render_template("pipeline.svg.j2", drawing=drawing, line=_LINE)


def _job(node: Node, now: float) -> Box:
    seconds = ran_s(node, now)
    caption = [
        f"{GLYPHS[node.state]} {node.state}",
        humanize_duration(seconds) if seconds else "",
        node.site,
    ]
    lines = [node.rule, format_wildcards(node), " · ".join(part for part in caption if part)]
    return _box(node.id, lines, [(node.state, 1)], node_title(node, now))


def _rules(picture: Picture) -> list[Box]:
    by_rule = defaultdict[str, list[Node]](list)
    for node in picture.nodes:
        by_rule[node.rule].append(node)
    return [_rule(rule, nodes, picture.now) for rule, nodes in by_rule.items()]


def _rule(rule: str, nodes: Sequence[Node], now: float) -> Box:
    states = count_states(node.state for node in nodes)
    times = [seconds for node in nodes if (seconds := ran_s(node, now)) is not None]
    sites = ", ".join(sorted({node.site for node in nodes if node.site}))
    caption = [f"{number} {state}" for state, number in states]
    typical = [f"half ran {humanize_duration(median(times))} or less"] if times else []
    counts = " ".join(f"{GLYPHS[state]} {number}" for state, number in states)
    last = " · ".join(
        [*([f"~{humanize_duration(median(times))}"] if times else []), *([sites] * bool(sites))]
    )
    name = f"{shorten_text(rule, _LETTERS - 8)} ×{len(nodes)}" if len(nodes) > 1 else rule
    whole = "\n".join([rule, ", ".join(caption), *typical, *([f"at {sites}"] * bool(sites))])
    return _box(rule, [name, counts, last], states, whole)


def _between_rules(picture: Picture) -> Sequence[tuple[str, str]]:
    rule = {node.id: node.rule for node in picture.nodes}
    found = [(rule[a], rule[b]) for a, b in picture.edges if a in rule and b in rule]
    return list(dict.fromkeys(found))


def _box(
    box_id: str, lines: Sequence[str], states: Sequence[tuple[NodeState, int]], shown: str
) -> Box:
    fitting = [text for text in (shorten_text(each, _LETTERS) for each in lines) if text]
    width = max(_SMALLEST, max(column_count(text) for text in fitting) * _LETTER + 24)
    return Box(box_id, fitting, states, shown, width=width, height=len(fitting) * _LINE + 16)


# Positions

_Ports = Mapping[Position, tuple[float, float, float]]
"""For each position: where edges enter and leave along the flow, and where it is across."""


@dataclass(frozen=True)
class _Drawing:
    boxes: Sequence[Box]
    paths: Sequence[str]

    @property
    def width(self) -> float:
        return max((box.x + box.width for box in self.boxes), default=0) + _MARGIN

    @property
    def height(self) -> float:
        return max((box.y + box.height for box in self.boxes), default=0) + _MARGIN


def _drawn(boxes: Sequence[Box], layout: Layout, *, down: bool) -> _Drawing:
    """Place the boxes in columns from left to right, or in rows from the top `down`."""
    by_id = {box.id: box for box in boxes}

    def across(place: Position) -> float:
        if isinstance(place, Bend):
            return _BEND
        return by_id[place].width if down else by_id[place].height

    middles = _middles(layout, across)
    placed: list[Box] = []
    ports: dict[Position, tuple[float, float, float]] = {}
    at = _MARGIN
    for layer in layout.layers:
        there = [by_id[place] for place in layer if not isinstance(place, Bend)]
        depth = max((box.height if down else box.width for box in there), default=0.0)
        ports |= {place: (at, at + depth, middles[place]) for place in layer}
        for box in there:
            if down:
                x, y, width = middles[box.id] - box.width / 2, at, box.width
                ports[box.id] = (at, at + box.height, middles[box.id])
            else:
                x, y, width = at, middles[box.id] - box.height / 2, depth
            placed.append(replace(box, x=x, y=y, width=width))
        at += depth + (_BETWEEN_ROWS if down else _BETWEEN_COLUMNS)
    return _Drawing(placed, [_path(route, ports, down=down) for route in layout.routes.values()])


def _middles(layout: Layout, size: _Size) -> dict[Position, float]:
    """Return each position's middle across the flow, near its neighbours, without overlaps."""
    near = defaultdict[Position, list[Position]](list)
    for route in layout.routes.values():
        for one, other in pairwise(route):
            near[one].append(other)
            near[other].append(one)
    at: dict[Position, float] = {}
    for layer in layout.layers:
        at |= _apart(layer, dict.fromkeys(layer, 0.0), size)
    for step in range(_PASSES):
        for layer in layout.layers if step % 2 else reversed(layout.layers):
            wished = {
                p: sum(at[n] for n in near[p]) / len(near[p]) if near[p] else at[p] for p in layer
            }
            at |= _apart(layer, wished, size)
    top = min((at[p] - size(p) / 2 for p in at), default=0.0)
    return {place: middle - top + _MARGIN for place, middle in at.items()}


def _apart(
    layer: Sequence[Position], wished: Mapping[Position, float], size: _Size
) -> dict[Position, float]:
    """Return middles in the layer's order, without overlaps and nearest to the wished ones.

    Solves least squares by pooling neighbours that would overlap.
    """
    offset, total = {}, 0.0
    for before, place in zip([None, *layer], layer, strict=False):
        if before is not None:
            total += (size(before) + size(place)) / 2 + _BETWEEN_BOXES
        offset[place] = total
    pools: list[tuple[float, list[Position]]] = []
    for place in layer:
        pool = (wished[place] - offset[place], [place])
        while pools and pools[-1][0] >= pool[0]:
            mean, members = pools.pop()
            count = len(members) + len(pool[1])
            pool = ((mean * len(members) + pool[0] * len(pool[1])) / count, members + pool[1])
        pools.append(pool)
    return {place: mean + offset[place] for mean, members in pools for place in members}


def _path(route: Sequence[Position], ports: _Ports, *, down: bool) -> str:
    """Draw an edge as a path: curves between layers, a straight line through each."""

    def point(along: float, across: float) -> str:
        return f"{across:.1f} {along:.1f}" if down else f"{along:.1f} {across:.1f}"

    _, here, at = ports[route[0]]
    drawn = [f"M{point(here, at)}"]
    for place in route[1:]:
        enters, leaves, to = ports[place]
        middle = (here + enters) / 2
        drawn.append(f"C{point(middle, at)} {point(middle, to)} {point(enters, to)}")
        if isinstance(place, Bend):
            drawn.append(f"L{point(leaves, to)}")
        here, at = leaves, to
    return "".join(drawn)
