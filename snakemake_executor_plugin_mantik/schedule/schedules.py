"""Values: a schedule with its crontab line, and the outcome of its due times."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
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


class MissedPolicy(StrEnum):
    """How to treat due times that passed while no scheduler ran."""

    SKIP = "skip"
    ONCE = "once"


class FiringState(StrEnum):
    """The state of a claimed due time."""

    FIRING = "firing"
    FIRED = "fired"
    FAILED = "failed"
    MISSED = "missed"


@dataclass(frozen=True)
class Schedule:
    """A run that is submitted again at each due time.

    Attributes:
        id: never reused.
        name: unique among the existing schedules.
        run: the MLflow id of the run that is submitted again.
        tz: the time zone of `cron` and `until`.
        until: the last day on which the schedule may be due; None: no end.
        account: the compute budget account; empty: the run's.
        site: `NAME=FILE`, a backend config that is read at each due time; empty: the run's.
        since: only due times after this time are still to be checked; seconds since the epoch.
        revision: grows with each edit.
    """

    id: int
    name: str
    run: str
    cron: str
    tz: str
    until: date | None
    account: str
    missed: MissedPolicy
    since: float
    revision: int
    site: str = ""

    def due(self, after: datetime) -> Iterator[datetime]:
        """Yield the due times later than `after`, in the schedule's time zone."""
        found = self._cron.after(after)
        return takewhile(lambda due: self.until is None or due.date() <= self.until, found)

    def latest(self, now: datetime) -> datetime | None:
        """Return the last due time after `since` and up to `now`, or None."""
        since = datetime.fromtimestamp(self.since, UTC)
        if self.until is not None:
            zone = ZoneInfo(self.tz)
            end = datetime(self.until.year, self.until.month, self.until.day, 23, 59, 59)
            now = min(now, end.replace(tzinfo=zone, fold=1))
        return self._cron.latest(since, now)

    @property
    def _cron(self) -> Cron:
        return Cron(self.cron, ZoneInfo(self.tz))


@dataclass(frozen=True)
class Firing:
    """A due time that was claimed.

    Attributes:
        schedule: the schedule's id.
        due: the due time in seconds since the epoch.
        key: identifies the run if a submission was interrupted.
        attempts: how many submissions were started.
        begun: whether the outcome of an attempt is unknown: it is running, or was interrupted.
        retry: when to submit again, if not fired by then; seconds since the epoch.
        run: the id of the new run; empty: none yet.
        told: the reason for the state, for users.
        changed: time of the last claim, attempt or outcome, in seconds since the epoch.
    """

    id: int
    schedule: int
    due: int
    state: FiringState
    key: str
    attempts: int
    begun: bool
    retry: float
    run: str
    told: str
    changed: float
