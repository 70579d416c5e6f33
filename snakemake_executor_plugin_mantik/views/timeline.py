"""Draw the timeline by site: the stages of each job, or of many jobs, counts per rule."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import Any, Final

from ..common.errors import one_line
from ..common.humanize import humanize_count, humanize_duration
from .picture import GLYPHS, Node, NodeState, Picture, column_count, render_template, shorten_text

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
        return self.x + self.width * (moment - self.first) / (self.last - self.first)

    def ticks(self) -> Sequence[tuple[float, str]]:
        """Return some round times in UTC: their x and their labels."""
        length = self.last - self.first
        longest = _STEPS[-1] * max(1, -(-length // (_STEPS[-1] * _MOST_TICKS)))
        step = next((s for s in _STEPS if length / s <= _MOST_TICKS), longest)
        form = "%d %b" if step >= _DAY else "%d %b %H:%M" if length > _DAY else "%H:%M"
        form = "%H:%M:%S" if step < _MINUTE else form
        moment, found = -(-self.first // step) * step, []
        while moment <= self.last:
            found.append((self.at(moment), f"{datetime.fromtimestamp(moment, UTC):{form}}"))
            moment += step
        return found

    def average_use(self, spans: Sequence[tuple[float, float]], bins: int) -> Sequence[float]:
        """Return the average number of spans in each of `bins` equal parts of the axis."""
        width = (self.last - self.first) / bins
        areas = [0.0] * (bins + 1)  # of all spans, up to the end of each part
        for sign, times in ((1, [a for a, _ in spans]), (-1, [b for _, b in spans])):
            passed = sorted(moment - self.first for moment in times)
            sums = [0.0, *accumulate(passed)]
            for n in range(bins + 1):
                number = bisect(passed, n * width)
                areas[n] += sign * (number * n * width - sums[number])
        return [(after - before) / width for before, after in pairwise(areas)]


MOST_BARS: Final = 100
"""The number of attempts above which only the failed, cancelled and longest have a bar."""
SOME_BARS: Final = 40
"""The number of bars then, of which up to a half are of the failed and cancelled."""

_NAMES: Final = (120.0, 300.0)
"""The least and the most width of the names."""
_PLOT: Final = 560.0
_AFTER: Final = 195.0
_TOP: Final = 46.0
_ROW: Final = 20.0
_HEAD: Final = 26.0
_PROFILE: Final = 40.0
_BINS: Final = 280
_LETTER: Final = 7.4
_BAD: Final = (NodeState.FAILED, NodeState.CANCELLED, NodeState.ORPHANED)


def render_timeline(picture: Picture) -> str:
    """Draw the timeline as SVG."""
    now = picture.now
    attempts = [node for node in (*picture.earlier, *picture.nodes) if node.begin is not None]
    first = min((node.begin for node in attempts if node.begin is not None), default=now)
    last = max((max(node.end(now), node.fetched or 0) for node in attempts), default=now)
    longest = max((column_count(node.name) for node in attempts), default=0)
    names = min(max(_NAMES[0], 12 + _LETTER * longest), _NAMES[1])
    axis = Axis(first, max(last, first + 1), names, _PLOT)
    y = _TOP
    headings: list[tuple[str, float]] = []
    bars: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []

    def head(site: str, number: int, what: str) -> None:
        nonlocal y
        where = one_line(site) if site else "this machine"
        headings.append((f"{where}: {humanize_count(number, 'job')}{what}", y + 17))
        y += _HEAD

    many = len(attempts) > MOST_BARS
    for site, nodes in _grouped(attempts, "site") if many else ():
        head(site, len(nodes), "")
        for rule, of_rule in _grouped(nodes, "rule"):
            profiles.append(_profile(rule, of_rule, axis, now, y))
            y += _PROFILE
        y += 6
    if many:
        attempts.sort(key=lambda node: -(node.running_s(now) or 0))
        bad = [node for node in attempts if node.state in _BAD][: SOME_BARS // 2]
        attempts = list({id(node): node for node in (*bad, *attempts)}.values())[:SOME_BARS]
    for site, nodes in _grouped(attempts, "site"):
        head(site, len(nodes), ", failed or longest" if many else "")
        for node in nodes:
            bars.append(_bar(node, axis, now, y))
            y += _ROW
        y += 6
    return render_template(
        "timeline.svg.j2",
        headings=headings, bars=bars, profiles=profiles, ticks=axis.ticks(), top=_TOP, bottom=y,
        width=names + _PLOT + _AFTER, right=names + _PLOT,
    )  # fmt: skip


def _grouped(attempts: Iterable[Node], key: str) -> Iterable[tuple[str, list[Node]]]:
    """Return attempts by their site or rule, in the order of time."""
    found = defaultdict[str, list[Node]](list)
    for node in sorted(attempts, key=lambda node: (node.begin or 0, node.end(0))):
        found[getattr(node, key)].append(node)
    return found.items()


def _bar(node: Node, axis: Axis, now: float, y: float) -> dict[str, Any]:
    """Return a job's bar: its parts, and the texts before and behind it."""
    height, y = _ROW * 0.76, y + _ROW * 0.12
    spans = [
        # A span longer than 0 stays visible.
        (axis.at(begin), max(1.0, axis.at(end) - axis.at(begin)) if end > begin else 0.0)
        for begin, end in node.stages(now)
    ]
    stage_in, behind, queue, run, stage_out = spans
    if not queue[1]:
        run = (run[0], max(1.0, run[1]))
    parts = [
        ("stage", *stage_in, y, height),
        ("stage", *stage_out, y, height),
        ("stage", *behind, y + height * 0.4, height * 0.2),
        (f"wait {node.state}", *queue, y, height),
        (node.state, *run, y, height),
    ]
    caption = [] if node.state is NodeState.SUCCEEDED else [node.state.value]
    if (seconds := node.running_s(now)) is not None:
        caption.append(humanize_duration(seconds))
    elif (seconds := node.queued_s(now)) is not None:
        word = "" if node.state is NodeState.QUEUED else "waited "
        caption.append(f"{word}{humanize_duration(seconds)}")
    return {
        "state": node.state, "title": node.title(now), "behind": behind[1] > 0,
        "parts": [part for part in parts if part[2]],
        "name": shorten_text(node.name, _letters(min(x for x, _ in spans))),
        "caption": f"{GLYPHS[node.state]} {', '.join(caption)}",
        "end": stage_out[0] + stage_out[1], "y": y,
    }  # fmt: skip


def _letters(x: float) -> int:
    """Return how many letters of a name there is space for, up to what is drawn at `x`."""
    return int((x - 10) / _LETTER)


def _profile(rule: str, nodes: Sequence[Node], axis: Axis, now: float, y: float) -> dict[str, Any]:
    """Return the running and waiting jobs of a rule at a site, as areas scaled to their peaks."""
    stages = [node.stages(now) for node in nodes]
    running = axis.average_use([run for *_, run, _ in stages], _BINS)
    waiting = axis.average_use([queue for *_, queue, _, _ in stages], _BINS)
    bad = [node for node in nodes if node.state in _BAD]
    failed = f"{GLYPHS[NodeState.FAILED]} {len(bad)}" if bad else ""
    marks = dict.fromkeys(f"{axis.at(node.end(now)):.0f}" for node in bad)
    ran, waited = f"{max(running):.0f} ran", f"{max(waiting):.0f} waited"
    title = f"{one_line(rule)}: {humanize_count(len(nodes), 'job')}\n"
    title += f"at most {ran} and {waited} at once"
    return {
        "name": f"{shorten_text(rule, _letters(axis.x) - 8)} ×{len(nodes)}",
        "caption": " · ".join(filter(None, [f"{ran}, {waited}", failed])),
        "title": title + (f"\n{failed} failed or cancelled" if bad else ""),
        "running": _area(running, axis, y), "waiting": _area(waiting, axis, y),
        "failures": "".join(f"M{x} {y + 4:.1f}v{_PROFILE - 8}" for x in marks), "y": y,
    }  # fmt: skip


def _area(numbers: Sequence[float], axis: Axis, y: float) -> str:
    """Return a stepped path, scaled so that the largest number fills the row."""
    bottom, step = y + _PROFILE - 4, axis.width / len(numbers)
    scale = (_PROFILE - 8) / (max(numbers) or 1)
    drawn, before = [f"M{axis.x:.0f} {bottom:.1f}"], ""
    for position, number in enumerate(numbers):
        height = f"{bottom - number * scale:.1f}"
        if height != before:
            drawn.append(f"H{axis.x + position * step:.0f}V{height}")
            before = height
    return "".join([*drawn, f"H{axis.x + axis.width:.0f}V{bottom:.1f}z"])
