"""Draw the pipeline: jobs as boxes, or rules if there are many jobs.

It goes from left to right, or downwards if it would be too wide otherwise.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from snakemake_executor_plugin_mantik.common.humanize import humanize_duration

from .value import (
    GLYPHS,
    Node,
    NodeState,
    Picture,
    column_count,
    count_states,
    format_wildcards,
    node_title,
    ran_s,
    render_template,
    shorten_text,
)

_SWEEPS: Final = 8
"""How often the layers are sorted, to and fro; more sweeps change next to nothing."""


@dataclass(frozen=True)
class Bend:
    """The point where an edge passes a layer between its ends."""

    source: str
    target: str
    layer: int


Position = str | Bend


@dataclass(frozen=True)
class Layout:
    """The positions of nodes and of the bends of edges.

    Attributes:
        layers: the nodes and bends of each layer, in order.
        routes: for each edge its source, its bends and its target.
    """

    layers: Sequence[Sequence[Position]]
    routes: Mapping[tuple[str, str], Sequence[Position]]


def layer_graph(nodes: Sequence[str], edges: Iterable[tuple[str, str]]) -> Layout:
    """Lay out a graph.

    Args:
        nodes: in the order that they have in a layer unless their edges decide.
        edges: edges with unknown ends, from a node to itself, or closing a cycle are left out
            (rules may have cycles, jobs cannot).
    """
    known = set(nodes)
    wanted = {(a, b): None for a, b in edges if a in known and b in known and a != b}
    depth, there = _depths(nodes, list(wanted))
    kept = _reduced(nodes, there, depth)
    routes: dict[tuple[str, str], list[Position]] = {}
    layers: list[list[Position]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in nodes:
        layers[depth[node]].append(node)
    for source, target in kept:
        bends = [Bend(source, target, at) for at in range(depth[source] + 1, depth[target])]
        for bend in bends:
            layers[bend.layer].append(bend)
        routes[source, target] = [source, *bends, target]
    return Layout(_ordered(layers, routes.values()), routes)


def _depths(
    nodes: Sequence[str], edges: Sequence[tuple[str, str]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the length of the longest path to each node, and the edges that close no cycle."""
    before, after = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    missing = {node: len(before[node]) for node in nodes}
    depth: dict[str, int] = {}
    left = dict.fromkeys(nodes)
    ready = [node for node in nodes if not missing[node]]
    while left:
        if not ready:  # only cycles are left: the first node breaks one
            ready = [next(iter(left))]
        node = ready.pop()
        del left[node]
        depth[node] = max((depth[b] + 1 for b in before[node] if b in depth), default=0)
        for target in after[node]:
            missing[target] -= 1
            if not missing[target] and target in left:
                ready.append(target)
    return depth, [(a, b) for a, b in edges if depth[a] < depth[b]]


def _reduced(
    nodes: Sequence[str], edges: Sequence[tuple[str, str]], depth: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the edges that no longer path implies (the transitive reduction)."""
    after = defaultdict[str, list[str]](list)
    for source, target in edges:
        after[source].append(target)
    reached: dict[str, set[str]] = {}
    for node in sorted(nodes, key=lambda node: -depth[node]):
        reached[node] = {further for n in after[node] for further in (n, *reached[n])}
    return [
        (source, target)
        for source, target in edges
        if not any(target in reached[other] for other in after[source])
    ]


def _ordered(
    layers: list[list[Position]], routes: Iterable[Sequence[Position]]
) -> Sequence[Sequence[Position]]:
    above, below = (
        defaultdict[Position, list[Position]](list),
        defaultdict[Position, list[Position]](list),
    )
    for route in routes:
        for upper, lower in pairwise(route):
            above[lower].append(upper)
            below[upper].append(lower)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, below)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        neighbours = above if downwards else below
        for layer in layers[1:] if downwards else layers[-2::-1]:
            _sort(layer, neighbours, _positions(layers))
        crossings = _crossings(layers, below)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _positions(layers: Sequence[Sequence[Position]]) -> dict[Hashable, float]:
    """Return each position in its layer, counted from the layer's middle."""
    return {place: at - (len(layer) - 1) / 2 for layer in layers for at, place in enumerate(layer)}


def _sort(
    layer: list[Position],
    neighbours: Mapping[Position, Sequence[Position]],
    at: Mapping[Hashable, float],
) -> None:
    def barycentre(place: Position) -> float:
        near = neighbours.get(place, ())
        return sum(at[n] for n in near) / len(near) if near else at[place]

    layer.sort(key=barycentre)


def _crossings(
    layers: Sequence[Sequence[Position]], below: Mapping[Position, Sequence[Position]]
) -> int:
    """Count the crossings of edges between neighbouring layers."""
    at = {place: index for layer in layers for index, place in enumerate(layer)}
    found = 0
    for layer in layers:
        ends = [end for place in layer for end in sorted(at[b] for b in below.get(place, ()))]
        # Pairs in the wrong order; a few thousand at most, as large graphs are drawn by rules.
        found += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
    return found


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
