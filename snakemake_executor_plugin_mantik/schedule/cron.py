"""Compute the due times of a crontab line in a time zone.

A line has the five fields of crontab(5). They are expanded here, to report each mistake; cronsim
then finds the dates in wall clock time.

Daylight saving: cronsim follows Debian's cron, where a line with * runs in both passes of a
repeated hour. Here a wall clock time is due once a day. A skipped time moves by the length of the
change (02:30 becomes 03:30), and a repeated time is due the first time only.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from itertools import takewhile
from types import ModuleType
from typing import Final
from zoneinfo import ZoneInfo

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.humanize import humanize_count
from snakemake_executor_plugin_mantik.common.installing import install_command

_DO: Final = (
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
"""Longer than any daylight saving change."""


@dataclass(frozen=True)
class _Field:
    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()

    def values(self, text: str) -> list[int]:
        """Return all values of the field, or raise a ValueError with the reason."""
        return sorted({n for item in text.split(",") for n in self._item(item.strip())})

    def _item(self, item: str) -> range:
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is not a valid crontab value")
        star, one, other, step = match.groups()
        if step is not None and not int(step):
            raise ValueError(f"in {item!r} the step is 0")
        most = self.last - (self.names == _DAYS)  # 7 is Sunday again
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
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of the week", 0, 7, _DAYS),
)


class Cron:
    """A crontab line in a time zone."""

    def __init__(self, text: str, zone: ZoneInfo) -> None:
        """Parse the line, or raise UserError with each wrong field and the reason."""
        self.text, self.zone = text, zone
        self._line = _numbers(text)

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the due times later than `moment`, in order, in the line's time zone.

        The iterator ends if the line is not due within fifty years. Raise UserError if cronsim is
        not installed.
        """
        last, found = moment.astimezone(UTC), list[datetime]()
        for wall in self._walls(moment.astimezone(self.zone) - _SHIFT):
            heappush(found, due := self._moment(wall))
            if due.astimezone(self.zone).replace(tzinfo=None) != wall:
                continue  # The clocks skip it: earlier ones may follow.
            while found and found[0] <= due:
                if (first := heappop(found)) > last:
                    last = first
                    yield first.astimezone(self.zone)

    def latest(self, after: datetime, upto: datetime) -> datetime | None:
        """Return the last due time later than `after` and not later than `upto`, or None."""
        # Compare in UTC: Python compares datetimes of one zone by wall clock time.
        after, upto = after.astimezone(UTC), upto.astimezone(UTC)
        end = upto.astimezone(self.zone) + timedelta(minutes=1)
        dues = (self._moment(wall) for wall in self._walls(end, back=True))
        found = next((due for due in dues if due <= upto), None)
        if found is None:
            return None
        # Around a clock change a later moment may have an earlier wall clock time.
        start = max(after, found - timedelta(seconds=1))
        return max(takewhile(lambda due: due <= upto, self.after(start)), default=None)

    def _moment(self, wall: datetime) -> datetime:
        return wall.replace(tzinfo=self.zone).astimezone(UTC)

    def _walls(self, start: datetime, *, back: bool = False) -> Iterator[datetime]:
        """Yield wall clock times later than `start`; with `back`, earlier ones, latest first."""
        cronsim = _cronsim()
        try:
            yield from cronsim.CronSim(self._line, start.replace(tzinfo=None), reverse=back)
        except cronsim.CronSimError:
            return  # no month has such a day


def _numbers(text: str) -> str:
    """Return the line in numbers only, or raise UserError.

    A * stays, since it decides whether one of the two day fields is enough.
    """
    where = f"the crontab line {text!r}"
    words = _NICKNAMES.get(text.strip().lower(), text).split()
    if len(words) != len(_FIELDS):
        raise UserError(f"it has {humanize_count(len(words), 'field')}", where=where, do=_DO)
    numbers, wrong = [], []
    for field, word in zip(_FIELDS, words, strict=True):
        try:
            values = ",".join(map(str, field.values(word)))
        except ValueError as error:
            wrong.append(f"the {field.name}: {error}")
        else:
            star = f"{word.partition(',')[0]}," if word.startswith("*") else ""
            numbers.append(star + values)
    if wrong:
        raise UserError("; ".join(wrong), where=where, do=_DO)
    return " ".join(numbers)


def _cronsim() -> ModuleType:
    try:
        import cronsim
    except ImportError:
        raise UserError(
            "cronsim is not installed here",
            do=f"Install it with: {install_command('schedule')}",
        ) from None
    return cronsim
