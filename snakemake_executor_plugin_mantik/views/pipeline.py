"""Draw the pipeline: jobs as boxes, or rules if there are many jobs.

It goes from left to right, or downwards if it would be too wide otherwise.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from ..common.humanize import humanize_duration
from .picture import (
    GLYPHS,
    Node,
    NodeState,
    Picture,
    column_count,
    count_states,
    render_template,
    shorten_text,
)

_SWEEPS: Final = 8
"""How often the layers are sorted, to and fro; more sweeps change next to nothing."""
_PASSES: Final = 12
"""How often the boxes are moved towards their neighbours."""


class Bend(NamedTuple):
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
    routes: Sequence[Sequence[Position]]

    def neighbours(self) -> Mapping[Position, Sequence[Sequence[Position]]]:
        """Return for each position those that edges lead to it from, and from it to."""
        found: dict[Position, tuple[list[Position], list[Position]]] = {
            place: ([], []) for layer in self.layers for place in layer
        }
        for route in self.routes:
            for before, after in pairwise(route):
                found[after][0].append(before)
                found[before][1].append(after)
        return found


def layer_graph(nodes: Sequence[str], edges: Iterable[tuple[str, str]]) -> Layout:
    """Lay out a graph, whose `nodes` have their order in a layer unless their edges decide.

    Edges with unknown ends, from a node to itself, or closing a cycle are left out (rules may have
    cycles, jobs cannot), and those that a longer path implies.
    """
    before: dict[str, dict[str, None]] = {node: {} for node in nodes}
    wanted = {(a, b): None for a, b in edges if a in before and b in before and a != b}
    for source, target in wanted:
        before[target][source] = None
    depth: dict[str, int] = {}
    reached: dict[str, set[str]] = {}
    for node in _sorted(before):
        depth[node] = max((depth[source] + 1 for source in before[node]), default=0)
        reached[node] = {far for source in before[node] for far in (source, *reached[source])}
    layers: list[list[Position]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in nodes:
        layers[depth[node]].append(node)
    routes: list[list[Position]] = []
    for source, target in wanted:
        if source in before[target] and not any(source in reached[n] for n in before[target]):
            bends = [Bend(source, target, n) for n in range(depth[source] + 1, depth[target])]
            for bend in bends:
                layers[bend.layer].append(bend)
            routes.append([source, *bends, target])
    return _ordered(Layout(layers, routes))


def _sorted(before: Mapping[str, dict[str, None]]) -> Sequence[str]:
    """Return nodes in an order that their edges allow; remove edges that close a cycle."""
    while True:
        try:
            return list(TopologicalSorter(before).static_order())
        except CycleError as error:
            source, target, *_ = error.args[1]
            del before[target][source]


def _ordered(layout: Layout) -> Layout:
    """Return a layout with few crossings, whose layers are sorted by the middles of neighbours."""
    layers, near = [list(layer) for layer in layout.layers], layout.neighbours()
    best, fewest = layout.layers, _crossings(layout.layers, near)
    for sweep in range(_SWEEPS):
        side = sweep % 2
        for layer in layers[-2::-1] if side else layers[1:]:
            at = {p: n - (len(each) - 1) / 2 for each in layers for n, p in enumerate(each)}
            layer.sort(key={p: _mean(near[p][side], at, at[p]) for p in layer}.__getitem__)
        if (crossings := _crossings(layers, near)) < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return replace(layout, layers=best)


def _mean(places: Sequence[Position], at: Mapping[Position, float], default: float) -> float:
    return sum(at[place] for place in places) / len(places) if places else default


def _crossings(
    layers: Sequence[Sequence[Position]], near: Mapping[Position, Sequence[Sequence[Position]]]
) -> int:
    at = {place: index for layer in layers for index, place in enumerate(layer)}
    found = 0
    for layer in layers:
        ends = [end for place in layer for end in sorted(at[after] for after in near[place][1])]
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
_WIDEST: Final = 900.0
"""The width from which a pipeline that goes downwards is preferred, if it is narrower."""


@dataclass(frozen=True)
class Box:
    """A box for a job or a rule.

    Attributes:
        states: the states of its jobs, with the number of jobs in each.
        title: its tooltip.
    """

    id: str
    lines: Sequence[str]
    states: Mapping[NodeState, int]
    title: str
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    @property
    def state(self) -> NodeState:
        """The state that decides its colour: the one that needs most attention."""
        return next(state for state in _ATTENTION if state in self.states)

    @property
    def parts(self) -> Sequence[tuple[NodeState, float, float]]:
        """Its states as parts of a bar: x and width of each; small parts stay visible."""
        total = sum(self.states.values())
        widths = {s: max(_SEEN, self.width * n / total) for s, n in self.states.items()}
        drawn, x = [], self.x
        for state, width in widths.items():
            fitting = width * self.width / sum(widths.values())
            drawn.append((state, x, fitting))
            x += fitting
        return drawn


_ATTENTION: Final = (
    NodeState.FAILED, NodeState.ORPHANED, NodeState.CANCELLED, NodeState.RUNNING,
    NodeState.QUEUED, NodeState.WAITING, NodeState.SKIPPED, NodeState.SUCCEEDED,
)  # fmt: skip


def render_pipeline(picture: Picture) -> str:
    """Draw the pipeline as SVG."""
    if len(picture.nodes) <= MAX_JOB_BOXES and (picture.edges or not picture.rule_edges):
        boxes = [_job(node, picture.now) for node in picture.nodes]
        edges: Iterable[tuple[str, str]] = picture.edges
    else:
        by_rule = defaultdict[str, list[Node]](list)
        for node in picture.nodes:
            by_rule[node.rule].append(node)
        boxes = [_rule(rule, nodes, picture.now) for rule, nodes in by_rule.items()]
        rules = {node.id: node.rule for node in picture.nodes}
        edges = picture.rule_edges or [(rules[a], rules[b]) for a, b in picture.edges]
    layout = layer_graph([box.id for box in boxes], edges)
    drawing = _drawn(boxes, layout, down=False)
    if drawing.width > _WIDEST:
        drawing = min(drawing, _drawn(boxes, layout, down=True), key=lambda one: one.width)
    return render_template("pipeline.svg.j2", drawing=drawing, line=_LINE)


def _job(node: Node, now: float) -> Box:
    seconds = node.running_s(now)
    wildcards = ", ".join(f"{name}={value}" for name, value in node.wildcards.items())
    other = wildcards or (node.name if node.name != node.rule else "")
    time = humanize_duration(seconds) if seconds else ""
    caption = " · ".join(filter(None, [f"{GLYPHS[node.state]} {node.state}", time, node.site]))
    states = count_states([node.state])
    return _box(node.id, [node.rule, other, caption], states, node.title(now))


def _rule(rule: str, nodes: Sequence[Node], now: float) -> Box:
    states = count_states(node.state for node in nodes)
    times = [seconds for node in nodes if (seconds := node.running_s(now)) is not None]
    typical = humanize_duration(median(times)) if times else ""
    sites = ", ".join(sorted({node.site for node in nodes if node.site}))
    name = f"{shorten_text(rule, _LETTERS - 8)} ×{len(nodes)}" if len(nodes) > 1 else rule
    counts = " ".join(f"{GLYPHS[state]} {number}" for state, number in states.items())
    last = " · ".join(filter(None, [f"~{typical}" if typical else "", sites]))
    title = [
        rule,
        ", ".join(f"{number} {state}" for state, number in states.items()),
        f"half ran {typical} or less" if typical else "",
        f"at {sites}" if sites else "",
    ]
    return _box(rule, [name, counts, last], states, "\n".join(filter(None, title)))


def _box(name: str, lines: Iterable[str], states: Mapping[NodeState, int], title: str) -> Box:
    fitting = [text for text in (shorten_text(each, _LETTERS) for each in lines) if text]
    width = max(_SMALLEST, max(map(column_count, fitting)) * _LETTER + 24)
    return Box(name, fitting, states, title, width=width, height=len(fitting) * _LINE + 16)


class _Port(NamedTuple):
    """Where edges enter and leave a position along the flow, and where it is across."""

    enters: float
    leaves: float
    across: float


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
    sizes: dict[Position, float] = {
        p: _BEND for layer in layout.layers for p in layer if isinstance(p, Bend)
    }
    sizes |= {box.id: box.width if down else box.height for box in boxes}
    middles = _middles(layout, sizes)
    placed: list[Box] = []
    ports: dict[Position, _Port] = {}
    at = _MARGIN
    for layer in layout.layers:
        there = [by_id[place] for place in layer if not isinstance(place, Bend)]
        depth = max((box.height if down else box.width for box in there), default=0.0)
        ports |= {place: _Port(at, at + depth, middles[place]) for place in layer}
        for box in there:
            middle = middles[box.id]
            if down:
                placed.append(replace(box, x=middle - box.width / 2, y=at))
                ports[box.id] = _Port(at, at + box.height, middle)
            else:
                placed.append(replace(box, x=at, y=middle - box.height / 2, width=depth))
        at += depth + (_BETWEEN_ROWS if down else _BETWEEN_COLUMNS)
    return _Drawing(placed, [_path(route, ports, down=down) for route in layout.routes])


def _middles(layout: Layout, sizes: Mapping[Position, float]) -> Mapping[Position, float]:
    """Return each position's middle across the flow, near its neighbours, without overlaps."""
    near = {place: [*before, *after] for place, (before, after) in layout.neighbours().items()}
    at: dict[Position, float] = {}
    for layer in layout.layers:
        at |= _apart(dict.fromkeys(layer, 0.0), sizes)
    for step in range(_PASSES):
        for layer in layout.layers if step % 2 else reversed(layout.layers):
            at |= _apart({place: _mean(near[place], at, at[place]) for place in layer}, sizes)
    top = min((at[place] - sizes[place] / 2 for place in at), default=0.0)
    return {place: middle - top + _MARGIN for place, middle in at.items()}


def _apart(
    wished: Mapping[Position, float], sizes: Mapping[Position, float]
) -> Mapping[Position, float]:
    """Return the middles of a layer, in its order, without overlaps and nearest to `wished`.

    Solves least squares by pooling neighbours that would overlap.
    """
    offset: dict[Position, float] = {}
    total = half = 0.0
    for place in wished:
        total += half + sizes[place] / 2 + _BETWEEN_BOXES if offset else 0.0
        offset[place], half = total, sizes[place] / 2
    pools: list[tuple[float, list[Position]]] = []
    for place, middle in wished.items():
        mean, members = middle - offset[place], [place]
        while pools and pools[-1][0] >= mean:
            other, before = pools.pop()
            mean = (other * len(before) + mean * len(members)) / (len(before) + len(members))
            members = before + members
        pools.append((mean, members))
    return {place: mean + offset[place] for mean, members in pools for place in members}


def _path(route: Sequence[Position], ports: Mapping[Position, _Port], *, down: bool) -> str:
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
