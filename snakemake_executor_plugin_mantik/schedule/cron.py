"""When a crontab line is due, by a time zone's clocks.

Five fields as crontab(5) has them, expanded here; APScheduler's cron trigger finds the dates. It
would take them differently: 0 is Monday there and Sunday in a crontab, and days of the month and of
the week must both fit there, where for a crontab one of them is enough.

Daylight saving: the trigger searches in wall clock times, which become moments here. A wall clock
time that is skipped counts as the one as long after the change (02:30 is 03:30), a time that comes
twice as its first one. So a time is due once a day, whatever the clocks do.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush, merge
from itertools import takewhile
from typing import Any, Final
from zoneinfo import ZoneInfo

from snakemake_executor_plugin_mantik.errors import UserError

DO: Final = (
    "Write five fields: minute, hour, day of the month, month, day of the week; as in"
    " '0 6 * * 1', Mondays at six"
)
_MONTHS: Final = (
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
)  # fmt: skip
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_NICKNAMES: Final[Mapping[str, str]] = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_ITEM: Final = re.compile(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/(\d+))?", re.ASCII)

_SHIFT: Final = timedelta(hours=3)
"""By how much clocks are changed at most."""
_RARE: Final = timedelta(days=366 * 9)
"""Within this a date comes, if it ever does: 29 February may be eight years away."""
_WINDOWS: Final = (
    timedelta(hours=1), timedelta(days=1), timedelta(days=32), timedelta(days=366), _RARE,
)  # fmt: skip


@dataclass(frozen=True)
class _Field:
    name: str
    trigger: str
    first: int
    last: int
    names: tuple[str, ...] = ()

    def values(self, text: str) -> list[int]:
        """All the values that a field of a crontab line means.

        Raises:
            ValueError: it is none; its text says why.
        """
        return sorted({n for item in text.split(",") for n in self._item(item.strip())})

    def _item(self, item: str) -> range:
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is nothing that a crontab may have there")
        star, one, other, step = match.groups()
        if step is not None and not int(step):
            raise ValueError(f"in {item!r} the step is 0")
        most = self.last - (self.names == _DAYS)  # 7 is Sunday once more
        first = self.first if star else self._number(one)
        last = self._number(other) if other else max(first, most) if star or step else first
        if self.names == _DAYS and other and last == 0:
            last = 7
        if first > last:
            raise ValueError(f"{item!r} goes backwards")
        return range(first, last + 1, int(step or 1))

    def _number(self, text: str) -> int:
        if text.lower() in self.names:
            return self.names.index(text.lower()) + (self.names == _MONTHS)
        if text.isdigit() and self.first <= int(text) <= self.last:
            return int(text)
        names = f" or {self.names[0]} to {self.names[-1]}" if self.names else ""
        raise ValueError(f"{text!r} is not {self.first} to {self.last}{names}")


_FIELDS: Final = (
    _Field("minute", "minute", 0, 59),
    _Field("hour", "hour", 0, 23),
    _Field("day of the month", "day", 1, 31),
    _Field("month", "month", 1, 12, _MONTHS),
    _Field("day of the week", "day_of_week", 0, 7, _DAYS),
)


class Cron:
    """A crontab line in a time zone.

    Attributes:
        text: the line.
        zone: whose clocks are meant.
    """

    def __init__(self, text: str, zone: ZoneInfo) -> None:
        """Read the line.

        Raises:
            UserError: it is none; which field is wrong, and why.
        """
        self.text, self.zone = text, zone
        self._alternatives = _alternatives(text)

    def after(self, moment: datetime) -> Iterator[datetime]:
        """The moments later than this one at which the line is due, in order, in the zone's time.

        Ends if there is none within nine years.
        """
        last, soon = moment.astimezone(UTC), list[datetime]()
        start = moment.astimezone(self.zone).replace(tzinfo=UTC)
        for wall in self._walls(start if self._calm(last) else start - _SHIFT):
            due = wall.replace(tzinfo=self.zone).astimezone(UTC)
            heappush(soon, due)
            # A change of the clocks can put a later wall clock time first.
            while soon and (soon[0] < due - _SHIFT or self._calm(soon[0])):
                if (first := heappop(soon)) > last:
                    last = first
                    yield first.astimezone(self.zone)
        for due in sorted(set(soon)):
            if due > last:
                yield due.astimezone(self.zone)

    def _calm(self, moment: datetime) -> bool:
        """Whether the clocks are not changed around a moment."""
        before, after = (at.astimezone(self.zone) for at in (moment - _SHIFT, moment + _SHIFT))
        return before.utcoffset() == after.utcoffset()

    def latest(self, after: datetime, upto: datetime) -> datetime | None:
        """The last moment later than `after` and not later than `upto`; None: there is none."""
        for window in _WINDOWS:
            start = max(after, upto - window)
            found = list(takewhile(lambda due: due <= upto, self.after(start)))
            if found or start == after:
                return found[-1] if found else None
        return None

    def _walls(self, start: datetime) -> Iterator[datetime]:
        """Wall clock times, not before `start`, in order, as if they were UTC."""
        last = None
        for wall in merge(*(_dates(values, start) for values in self._alternatives)):
            if wall != last:
                yield wall
            last = wall


def _alternatives(text: str) -> list[dict[str, str]]:
    """What APScheduler's trigger is made with: once, or twice where one of two is enough."""
    where = f"the crontab line {text!r}"
    words = _NICKNAMES.get(text.strip().lower(), text).split()
    if len(words) != len(_FIELDS):
        raise UserError(f"it has {len(words)} fields", where=where, do=DO)
    values, wrong = {}, []
    for field, word in zip(_FIELDS, words, strict=True):
        try:
            numbers = field.values(word)
        except ValueError as error:
            wrong.append(f"the {field.name}: {error}")
            continue
        if field.names == _DAYS:
            numbers = sorted({(day - 1) % 7 for day in numbers})
        values[field.trigger] = "*" if word == "*" else ",".join(map(str, numbers))
    if wrong:
        raise UserError("; ".join(wrong), where=where, do=DO)
    # What begins with * restricts nothing by itself.
    if words[2].startswith("*") or words[4].startswith("*"):
        return [values]
    return [values | {"day": "*"}, values | {"day_of_week": "*"}]


def _dates(values: Mapping[str, str], start: datetime) -> Iterator[datetime]:
    trigger = _trigger()
    while True:
        dates = trigger(**values, timezone=UTC, end_date=start + _RARE)
        found: datetime | None = dates.get_next_fire_time(None, start)
        if found is None:
            return
        while found is not None:
            yield found
            start = found + timedelta(minutes=1)
            found = dates.get_next_fire_time(None, start)


def _trigger() -> Any:
    try:
        from apscheduler.triggers.cron import CronTrigger
    except ImportError:
        raise UserError(
            "APScheduler is not installed here",
            do="Install it: pip install 'snakemake-executor-plugin-mantik[schedule]'",
        ) from None
    return CronTrigger
