"""Lay out a directed acyclic graph in layers.

The method is Sugiyama's: the longest path decides a node's layer, the barycentre of its neighbours
its position there, which keeps crossings few. An edge over several layers gets a bend in each of
them, so that it leads around the nodes. An edge that a longer path implies is left out.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

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
