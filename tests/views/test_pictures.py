"""Pictures of workflows: what is in them, that nothing overlaps, and that names are only names."""

import random
import re
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik.views import render_files, render_pipeline, render_timeline
from snakemake_executor_plugin_mantik.views.picture import Node, NodeState, Picture, make_picture
from snakemake_executor_plugin_mantik.views.pipeline import MAX_JOB_BOXES, Bend, layer_graph
from snakemake_executor_plugin_mantik.views.timeline import MOST_BARS, SOME_BARS, Axis

SVG = "{http://www.w3.org/2000/svg}"
T = 1_795_000_000.0
NASTY = "<script>alert(1)</script>&\"'\x00\x1b[31m\udcff\n]]> {{ x }} {% y %}"


def groups(svg: str, kind: str) -> list[ElementTree.Element]:
    """The groups of a class, of an SVG that is well-formed XML."""
    root = ElementTree.fromstring(svg)
    return [g for g in root.iter(f"{SVG}g") if kind in g.attrib.get("class", "").split()]


def texts(group: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in group.iter(f"{SVG}text")]


def rectangles(group: ElementTree.Element) -> list[ElementTree.Element]:
    return list(group.iter(f"{SVG}rect"))


def rectangle(rect: ElementTree.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def job(name: str, state: NodeState = NodeState.SUCCEEDED, rule: str = "", **more: object) -> Node:
    made = Node(
        name, name, rule or name, state, site="hpc1", queued=T, started=T + 60, ended=T + 90
    )
    return replace(made, **more)  # type: ignore[arg-type]  # fields of a Node


def digits() -> Picture:
    """A pipeline with each state: a retry, one that never ran, local ones without times."""
    states = [
        NodeState.SUCCEEDED,
        NodeState.FAILED,
        NodeState.RUNNING,
        NodeState.QUEUED,
        NodeState.CANCELLED,
    ]
    nodes = [job("prepare")]
    nodes += [
        job(f"train C={n}", state, "train", wildcards={"C": str(n)})
        for n, state in enumerate(states)
    ]
    nodes[3] = replace(nodes[3], ended=None)
    nodes[4] = replace(nodes[4], started=None, ended=None, site="hpc2")
    nodes += [Node("report", "report", "report", NodeState.WAITING)]
    edges = [("prepare", f"train C={n}") for n in range(5)]
    edges += [(f"train C={n}", "report") for n in range(5)] + [("prepare", "report")]
    earlier = job("train C=0", NodeState.FAILED, "train", note="exit code 137")
    return Picture("digits", tuple(nodes), T + 200, tuple(edges), earlier=(earlier,))


def test_each_job_is_a_box_with_its_state_in_words() -> None:
    boxes = {texts(box)[0] + (texts(box)[1] if len(texts(box)) > 2 else ""): texts(box)[-1]
             for box in groups(render_pipeline(digits()), "node")}  # fmt: skip
    assert boxes == {
        "prepare": "✓ succeeded · 30 s · hpc1",
        "trainC=0": "✓ succeeded · 30 s · hpc1",
        "trainC=1": "✗ failed · 30 s · hpc1",
        "trainC=2": "▶ running · 2 min 20 s · hpc1",
        "trainC=3": "… queued · hpc2",
        "trainC=4": "■ cancelled · 30 s · hpc1",
        "report": "○ waiting",
    }
    # The edge from prepare to report says nothing that the others do not.
    assert render_pipeline(digits()).count('class="edge"') == 10


def test_what_never_ran_was_skipped_once_the_run_is_over() -> None:
    job = {"id": "a", "name": "a", "rule": "a", "wildcards": {}, "needed": True, "done": False}
    pipeline = {"jobs": [job], "edges": [], "rule_edges": []}
    for over, state in ((False, NodeState.WAITING), (True, NodeState.SKIPPED)):
        [node] = make_picture("p", pipeline, (), T, over=over).nodes
        assert node.state is state


def test_each_attempt_is_a_bar_at_its_site_from_queue_to_end() -> None:
    svg = render_timeline(digits())
    bars = groups(svg, "job")
    assert len(bars) == 7
    told = {texts(bar)[0] + texts(bar)[1]: bar for bar in bars}
    assert sorted(told) == [
        "prepare✓ 30 s", "train C=0✓ 30 s", "train C=0✗ failed, 30 s", "train C=1✗ failed, 30 s",
        "train C=2▶ running, 2 min 20 s", "train C=3… queued, 3 min 20 s",
        "train C=4■ cancelled, 30 s",
    ]  # fmt: skip
    waiting, running = (
        rectangle(r) for r in told["train C=2▶ running, 2 min 20 s"].iter(f"{SVG}rect")
    )
    assert waiting[2] == running[0]
    assert (running[2] - running[0]) / (waiting[2] - waiting[0]) == pytest.approx(
        140 / 60, abs=0.01
    )
    (only,) = told["train C=3… queued, 3 min 20 s"].iter(f"{SVG}rect")
    assert "wait" in only.attrib["class"].split()
    for one, other in combinations(bars, 2):
        assert apart(
            rectangle(next(one.iter(f"{SVG}rect"))), rectangle(next(other.iter(f"{SVG}rect")))
        )
    headings = [t.text for t in ElementTree.fromstring(svg).findall(f"{SVG}text[@class='name']")]
    assert headings == ["hpc1: 6 jobs", "hpc2: 1 job"]
    assert "exit code 137" in "".join(bar.findtext(f"{SVG}title") or "" for bar in bars)


def apart(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two rectangles have nothing in common."""
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@pytest.mark.parametrize("seed", range(8))
def test_no_box_overlaps_another_or_lies_outside(seed: int) -> None:
    draw = random.Random(seed)
    number = draw.randint(2, MAX_JOB_BOXES)
    nodes = tuple(
        job(
            f"{'n' * draw.randint(1, 60)}{n}",
            draw.choice(list(NodeState)),
            wildcards={"w": "日本" * n},
        )
        for n in range(number)
    )
    edges = tuple(
        (nodes[a].id, nodes[b].id)
        for a, b in combinations(range(number), 2) if draw.random() < 3 / number
    )  # fmt: skip
    svg = render_pipeline(Picture("p", nodes, T, edges))
    root = ElementTree.fromstring(svg)
    boxes = [rectangle(r) for r in root.iter(f"{SVG}rect") if r.attrib["class"] == "box"]
    assert len(boxes) == number
    assert all(apart(one, other) for one, other in combinations(boxes, 2))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert all(x >= 0 and right <= width and y >= 0 and low <= height for x, y, right, low in boxes)


def test_many_jobs_are_drawn_by_rules_and_stay_small() -> None:
    nodes = [
        job(f"simulate {n}", NodeState.FAILED if n % 100 == 0 else NodeState.SUCCEEDED, "simulate",
            site=f"hpc{n % 2}", queued=T + n, started=T + n + 10, ended=T + n + 500)
        for n in range(3000)
    ]  # fmt: skip
    nodes += [job(f"analyse {n}", NodeState.RUNNING, "analyse", ended=None) for n in range(2000)]
    nodes.append(Node("all", "all", "all", NodeState.WAITING))
    edges = tuple((f"simulate {n}", f"analyse {n}") for n in range(2000))
    picture = Picture("ensemble", tuple(nodes), T + 9000, edges)
    by_rule = replace(picture, edges=(), rule_edges=(("simulate", "analyse"),))
    for each in (picture, by_rule):
        boxes = groups(render_pipeline(each), "node")
        assert [texts(box)[:2] for box in boxes] == [
            ["simulate ×3000", "✓ 2970 ✗ 30"], ["all", "○ 1"], ["analyse ×2000", "▶ 2000"],
        ]  # fmt: skip
        assert render_pipeline(each).count('class="edge"') == 1
    shown = groups(render_timeline(picture), "job")
    assert len(shown) == SOME_BARS
    assert sum("failed" in bar.attrib["class"] for bar in shown) == SOME_BARS // 2
    assert len(groups(render_timeline(picture), "profile")) == 3
    assert sum(map(len, render_files(picture).values())) < 100_000
    few = replace(picture, nodes=(*nodes[: MOST_BARS - 2], job(f"{'early ' * 20}n=7")))
    late = job(f"late {'x' * 50}", started=T + 3000, queued=T + 3000, ended=T + 9000)
    few = replace(few, nodes=(*few.nodes, late))
    bars = [texts(bar)[0] for bar in groups(render_timeline(few), "job")]
    assert len(bars) == MOST_BARS
    assert late.name in bars, "a name takes the space that is blank before its bar"
    assert [name for name in bars if name.startswith("early") and name.endswith("early n=7")]


def test_names_are_only_names() -> None:
    node = Node(NASTY, NASTY, NASTY, NodeState.FAILED, {NASTY: NASTY}, NASTY, T, T, T, NASTY)
    for many in (1, MOST_BARS + 1):
        nodes = tuple(replace(node, id=f"{n}") for n in range(many))
        for text in render_files(Picture(NASTY, nodes, T)).values():
            text.encode()
            assert "<script" not in text
            assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
            # Well-formed as a whole; HTML's doctype is none of XML's business.
            root = ElementTree.fromstring(text.partition("\n")[2])
            assert "alert(1)" in "".join(root.itertext())
            assert not [
                e for e in root.iter() if e.tag.rpartition("}")[2] in {"script", "image", "a"}
            ]
            assert "http://www.w3.org/2000/svg" in text
            assert text.count("http") == text.count("http://www.w3.org/2000/svg")


def test_little_can_be_drawn_too() -> None:
    for nodes in (
        (),
        (Node("a", "a", "a", NodeState.WAITING),),
        (job("a", queued=None, started=None),),
    ):
        for text in render_files(Picture("p", nodes, T)).values():
            ElementTree.fromstring(text.partition("\n")[2])


@given(st.integers(1, 25), st.data())
@settings(max_examples=40, deadline=None)
def test_every_edge_leads_to_the_right_through_each_layer(number: int, data: st.DataObject) -> None:
    names = [f"n{n}" for n in range(number)]
    name = st.sampled_from([*names, "elsewhere"])
    edges = data.draw(st.lists(st.tuples(name, name), max_size=60))
    layout = layer_graph(names, edges)
    layer = {place: n for n, there in enumerate(layout.layers) for place in there}
    assert sorted(p for p in layer if isinstance(p, str)) == sorted(names)
    for route in layout.routes:
        assert (route[0], route[-1]) in edges
        assert all(isinstance(place, Bend) for place in route[1:-1])
        assert [layer[b] - layer[a] for a, b in pairwise(route)] == [1] * (len(route) - 1)


def test_the_layout_keeps_order_and_has_few_crossings() -> None:
    # Two chains whose nodes are named crosswise: without a sort every edge would cross.
    layout = layer_graph(["a", "b", "y", "x"], [("a", "x"), ("b", "y")])
    assert list(map(list, layout.layers)) in [[["a", "b"], ["x", "y"]], [["b", "a"], ["y", "x"]]]
    assert list(map(list, layer_graph(["a", "b", "c"], []).layers)) == [["a", "b", "c"]]


def test_the_axis_has_round_times() -> None:
    for length in (1, 40, 3000, 90_000, 86_400 * 40, 86_400 * 4000):
        ticks = Axis(T, T + length, 0, 700).ticks()
        assert 1 <= len(ticks) <= 9, length
        assert len({text for _, text in ticks}) == len(ticks), ticks
    hours = Axis(T - T % 3600, T - T % 3600 + 6 * 3600, 0, 600).ticks()
    assert [text[-3:] for _, text in hours] == [":00"] * 7


def test_averages_are_those_of_each_part() -> None:
    axis = Axis(0, 10, 0, 100)
    assert axis.average_use([(0, 10), (2, 4), (3, 3.5)], 5) == pytest.approx([1, 2.25, 1, 1, 1])
    assert axis.average_use([], 2) == [0, 0]
    assert axis.average_use([(-5, 20)], 2) == pytest.approx([1, 1])
