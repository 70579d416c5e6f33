"""The axis of time: where a time is drawn, and which times are written below."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

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
    """A stretch of time as a stretch of the drawing.

    Attributes:
        first, last: seconds since the epoch; `last` is later.
        x, width: where it is drawn.
    """

    first: float
    last: float
    x: float
    width: float

    def at(self, moment: float) -> float:
        """Where a time is."""
        return self.x + self.width * (moment - self.first) / (self.last - self.first)

    def ticks(self) -> Sequence[tuple[float, str]]:
        """Some round times: where, and what is written there. In UTC."""
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
    """How many of the spans there are on average in each of `bins` equal parts of the axis."""
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
