"""Draw the timeline by site: the stages of each job, or of many jobs, counts per rule.

The stages of a job are stage-in, waiting for other jobs, queue, run and stage-out.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from snakemake_executor_plugin_mantik.common.humanize import humanize_count, humanize_duration

from .value import (
    GLYPHS,
    Node,
    NodeState,
    Picture,
    node_title,
    ran_s,
    render_template,
    shorten_text,
    text_line,
    waited_s,
)

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_STEPS: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 28)),
)
_MOST_TICKS: Final = 8


@dataclass(frozen=True)
class Axis:
    """A span of time, drawn as a span of the x axis.

    Attributes:
        first, last: seconds since the epoch; `last` is later.
    """

    first: float
    last: float
    x: float
    width: float

    def at(self, moment: float) -> float:
        """Return the x of a time."""
        return self.x + self.width * (moment - self.first) / (self.last - self.first)

    def ticks(self) -> Sequence[tuple[float, str]]:
        """Return some round times in UTC: their x and their labels."""
        length = self.last - self.first
        longest = _STEPS[-1] * max(1, -(-length // (_STEPS[-1] * _MOST_TICKS)))
        step = next((s for s in _STEPS if length / s <= _MOST_TICKS), longest)
        moment, found = -(-self.first // step) * step, []
        while moment <= self.last:
            found.append((self.at(moment), _written(moment, step, length)))
            moment += step
        return found


def _written(moment: float, step: float, length: float) -> str:
    when = datetime.fromtimestamp(moment, UTC)
    if step >= _DAY:
        return f"{when:%d %b}"
    if step < _MINUTE:
        return f"{when:%H:%M:%S}"
    return f"{when:%d %b %H:%M}" if length > _DAY else f"{when:%H:%M}"


def average_use(spans: Sequence[tuple[float, float]], axis: Axis, bins: int) -> Sequence[float]:
    """Return the average number of spans in each of `bins` equal parts of the axis."""
    edges = [axis.first + (axis.last - axis.first) * n / bins for n in range(bins + 1)]
    changes = sorted([*((a, 1) for a, _ in spans), *((b, -1) for _, b in spans)])
    area, number, since, position = 0.0, 0, edges[0], 0
    areas = []
    for edge in edges:
        while position < len(changes) and changes[position][0] <= edge:
            moment, change = changes[position]
            area += number * max(0.0, moment - since)
            number, since, position = number + change, max(since, moment), position + 1
        area += number * (edge - since)
        since = edge
        areas.append(area)
    width = edges[1] - edges[0]
    return [(after - before) / width for before, after in pairwise(areas)]


MOST_BARS: Final = 300
"""The number of tries above which only the failed, killed and longest have a bar."""
SOME_BARS: Final = 40
"""The number of bars then."""
_MOST_NAMES: Final = 100
"""The number of bars above which bars are thin, with their names in tooltips only."""

_NAMES: Final = 205.0
_PLOT: Final = 560.0
_AFTER: Final = 195.0
_TOP: Final = 46.0
_ROW: Final = 20.0
_THIN_ROW: Final = 7.0
_HEAD: Final = 26.0
_PROFILE: Final = 40.0
_BINS: Final = 280
_LETTERS: Final = 29


@dataclass(frozen=True)
class Bar:
    """A job: x and width of each of its stages; the width is 0 if there was none.

    The stages are stage-in, behind other jobs, waiting, running and stage-out. `name` and `caption`
    stand before and behind the bar, the latter at `end`.
    """

    node: Node
    title: str
    y: float
    height: float
    stage_in: tuple[float, float]
    behind: tuple[float, float]
    waiting: tuple[float, float]
    running: tuple[float, float]
    stage_out: tuple[float, float]
    end: float
    name: str
    caption: str


@dataclass(frozen=True)
class Profile:
    """The waiting and running jobs of a rule at a site, as two areas scaled to their peaks."""

    name: str
    caption: str
    title: str
    y: float
    running: str
    waiting: str
    failures: str


@dataclass(frozen=True)
class Heading:
    """The heading of a site."""

    text: str
    y: float


def render_timeline(picture: Picture) -> str:
    """Draw the timeline as SVG."""
    tries = [node for node in (*picture.earlier, *picture.nodes) if _begin(node) is not None]
    axis = _axis(tries, picture.now)
    drawing = _Drawing(axis, picture.now)
    if len(tries) <= MOST_BARS:
        drawing.bars(tries, thin=len(tries) > _MOST_NAMES)
    else:
        drawing.profiles(tries)
        drawing.bars(_outstanding(tries, picture.now), thin=False, what=", failed or longest")
    return render_template(
        "timeline.svg.j2",
        keys=_legend(drawing),
        headings=drawing.headings, bars=drawing.drawn_bars, profiles=drawing.drawn_profiles,
        sign=_SIGN, ticks=axis.ticks(), bottom=drawing.y, height=drawing.y + 24, top=_TOP,
        width=_NAMES + _PLOT + _AFTER, left=_NAMES, right=_NAMES + _PLOT,
    )  # fmt: skip


_SIGN: Final = 14.0
_KEYS: Final = 178.0


def _legend(drawing: "_Drawing") -> Sequence[tuple[str, float, str]]:
    """Return the legend: the class of each sign, its x, and its words."""
    keys = []
    if drawing.drawn_bars:
        keys += [
            ("stage", "stage-in or -out"), ("wait", "in the queue"), ("run", "running")
        ]  # fmt: skip
        if any(bar.behind[1] for bar in drawing.drawn_bars):
            keys.insert(1, ("behind", "behind other jobs"))
    if drawing.drawn_profiles:
        keys += [("many", "jobs that run"), ("line", "jobs in the queue"), ("mark", "failures")]
    width = min(_KEYS, (_NAMES + _PLOT + _AFTER) / max(1, len(keys)))
    return [(kind, n * width, words) for n, (kind, words) in enumerate(keys)]


def _begin(node: Node) -> float | None:
    times = (node.prepared, node.submitted, node.queued, node.started, node.ended)
    return next((t for t in times if t is not None), None)


def _axis(tries: Sequence[Node], now: float) -> Axis:
    begins = [begin for node in tries if (begin := _begin(node)) is not None]
    ends = [max(_end(node, now), node.fetched or 0) for node in tries]
    first, last = min(begins, default=now), max(ends, default=now)
    return Axis(first, max(last, first + 1), _NAMES, _PLOT)


def _end(node: Node, now: float) -> float:
    """Return up to where a job is drawn: its end, `now` if it is open, or its last known time."""
    if node.ended is not None:
        return node.ended
    if node.state in {NodeState.QUEUED, NodeState.RUNNING}:
        return now
    return next(t for t in (node.started, node.queued, now) if t is not None)


def _outstanding(tries: Sequence[Node], now: float) -> Sequence[Node]:
    def rank(node: Node) -> tuple[bool, float]:
        return node.state not in {NodeState.FAILED, NodeState.KILLED}, -(ran_s(node, now) or 0)

    return sorted(tries, key=rank)[:SOME_BARS]


def _by_site(tries: Iterable[Node]) -> list[tuple[str, list[Node]]]:
    found = defaultdict[str, list[Node]](list)
    for node in sorted(tries, key=lambda node: (_begin(node) or 0, _end(node, 0))):
        found[node.site].append(node)
    return list(found.items())


class _Drawing:
    def __init__(self, axis: Axis, now: float) -> None:
        self.axis, self.now = axis, now
        self.y = _TOP
        self.headings: list[Heading] = []
        self.drawn_bars: list[Bar] = []
        self.drawn_profiles: list[Profile] = []

    def _head(self, site: str, number: int, what: str) -> None:
        where = text_line(site) if site else "this machine"
        self.headings.append(
            Heading(f"{where}: {humanize_count(number, 'job')}{what}", self.y + 17)
        )
        self.y += _HEAD

    def bars(self, tries: Iterable[Node], *, thin: bool, what: str = "") -> None:
        row = _THIN_ROW if thin else _ROW
        for site, nodes in _by_site(tries):
            self._head(site, len(nodes), what)
            for node in nodes:
                self._bar(node, row, thin=thin)
                self.y += row
            self.y += 6

    def _bar(self, node: Node, row: float, *, thin: bool) -> None:
        end = _end(node, self.now)
        left = end if node.started is None else node.started
        queued = left if node.queued is None else node.queued
        submitted = queued if node.submitted is None else node.submitted
        prepared = submitted if node.prepared is None else node.prepared
        fetched = end if node.fetched is None else node.fetched
        seconds = ran_s(node, self.now)
        caption = [] if node.state is NodeState.FINISHED else [node.state.value]
        if seconds is not None:
            caption.append(humanize_duration(seconds))
        elif (in_queue := waited_s(node, self.now)) is not None:
            word = "" if node.state is NodeState.QUEUED else "waited "
            caption.append(f"{word}{humanize_duration(in_queue)}")
        self.drawn_bars.append(
            Bar(
                node, node_title(node, self.now), self.y + row * 0.12, row * 0.76,
                self._stretch(prepared, submitted), self._stretch(submitted, queued),
                self._stretch(queued, left),
                self._stretch(left, end), self._stretch(end, fetched),
                self.axis.at(max(end, fetched)),
                "" if thin else shorten_text(node.name, _LETTERS),
                "" if thin else f"{GLYPHS[node.state]} {', '.join(caption)}",
            )
        )  # fmt: skip

    def _stretch(self, first: float, last: float) -> tuple[float, float]:
        """Return x and width of a span; a span longer than 0 stays visible."""
        if last <= first:
            return self.axis.at(first), 0.0
        return self.axis.at(first), max(1.0, self.axis.at(last) - self.axis.at(first))

    def profiles(self, tries: Iterable[Node]) -> None:
        """Draw the numbers of waiting and running jobs for each site and rule."""
        for site, nodes in _by_site(tries):
            self._head(site, len(nodes), "")
            by_rule = defaultdict[str, list[Node]](list)
            for node in nodes:
                by_rule[node.rule].append(node)
            for rule, some in by_rule.items():
                self._profile(rule, some)
                self.y += _PROFILE
            self.y += 6

    def _profile(self, rule: str, nodes: Sequence[Node]) -> None:
        spans = [(n.started, _end(n, self.now)) for n in nodes if n.started is not None]
        queued = [
            (n.queued, n.started if n.started is not None else _end(n, self.now))
            for n in nodes if n.queued is not None
        ]  # fmt: skip
        running, waiting = (
            average_use(spans, self.axis, _BINS),
            average_use(queued, self.axis, _BINS),
        )
        bad = [n for n in nodes if n.state in {NodeState.FAILED, NodeState.KILLED}]
        caption = [f"{max(running):.0f} ran", f"{max(waiting):.0f} waited"]
        most = f"at most {' and '.join(caption)} at once"
        failed = f"{GLYPHS[NodeState.FAILED]} {len(bad)}" if bad else ""
        marks = dict.fromkeys(f"{self.axis.at(_end(n, self.now)):.0f}" for n in bad)
        name = f"{shorten_text(rule, _LETTERS - 8)} ×{len(nodes)}"
        shown = "\n".join(
            t for t in (f"{text_line(rule)}: {humanize_count(len(nodes), 'job')}", most) if t
        )
        shown += f"\n{failed} failed or killed" if bad else ""
        self.drawn_profiles.append(
            Profile(
                name, " · ".join([", ".join(caption), failed][: 1 + bool(bad)]), shown, self.y,
                self._area(running), self._area(waiting),
                "".join(f"M{x} {self.y + 4:.1f}v{_PROFILE - 8}" for x in marks),
            )
        )  # fmt: skip

    def _area(self, numbers: Sequence[float]) -> str:
        """Return a stepped path, scaled so that the largest number fills the row."""
        bottom, step = self.y + _PROFILE - 4, self.axis.width / len(numbers)
        scale = (_PROFILE - 8) / (max(numbers) or 1)
        drawn, before = [f"M{self.axis.x:.0f} {bottom:.1f}"], ""
        for position, number in enumerate(numbers):
            height = f"{bottom - number * scale:.1f}"
            if height != before:
                drawn.append(f"H{self.axis.x + position * step:.0f}V{height}")
                before = height
        return "".join([*drawn, f"H{self.axis.x + self.axis.width:.0f}V{bottom:.1f}z"])
