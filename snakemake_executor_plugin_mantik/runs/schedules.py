"""Schedules, the outcomes of their due times, and checks of what users request of them."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from itertools import takewhile
from types import ModuleType
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from ..common.errors import UserError, install_command
from ..common.humanize import humanize_count
from ..jobs.resources import is_single_word
from .directories import config_of_file

_NICKNAMES: Final[Mapping[str, str]] = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class Cron:
    """A crontab line in a time zone; when clocks change, Debian's cron is the model of cronsim."""

    def __init__(self, text: str, zone: ZoneInfo) -> None:
        """Parse the line, or raise UserError with the first wrong field."""
        self.text, self.zone = text, zone
        fields = _NICKNAMES.get(text.strip().lower(), text).split()
        why = f"it has {humanize_count(len(fields), 'field')}" if len(fields) != 5 else ""
        self._line = " ".join(fields)
        try:
            self._walk(datetime(2000, 1, 1, tzinfo=UTC))
        except _cronsim().CronSimError as error:
            why = why or str(error).lower()
        if why:
            raise UserError(
                why,
                where=f"the crontab line {text!r}",
                do="Write five fields: minute (0-59), hour (0-23), day of the month (1-31), month"
                " (1-12), day of the week (0-7); as in '0 6 * * 1', Mondays at six",
            )

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the due times later than `moment`, in order, in the line's time zone.

        The iterator ends if the line is not due within fifty years.
        """
        last = moment.astimezone(UTC)
        for due in self._walk(moment):
            # Several times that the clocks skip may become one.
            if due.astimezone(UTC) > last:
                last = due.astimezone(UTC)
                yield due

    def latest(self, after: datetime, upto: datetime) -> datetime | None:
        """Return the last due time later than `after` and not later than `upto`, or None."""
        # Compare in UTC: Python compares datetimes of one zone by wall clock time.
        after, upto = after.astimezone(UTC), upto.astimezone(UTC)
        # Backwards, cronsim sees other times around a clock change: those forwards count.
        for due in self._walk(upto + timedelta(minutes=1), back=True):
            start = max(after, due.astimezone(UTC) - timedelta(seconds=1))
            *_, found = None, *takewhile(lambda due: due.astimezone(UTC) <= upto, self.after(start))
            if found is not None or start == after:
                return found
        return None

    def _walk(self, start: datetime, *, back: bool = False) -> Iterator[datetime]:
        walk: Iterator[datetime] = _cronsim().CronSim(
            self._line, start.astimezone(self.zone), reverse=back
        )
        return walk


def _cronsim() -> ModuleType:
    try:
        import cronsim
    except ImportError:
        raise UserError(
            "cronsim is not installed here", do=f"Install it with: {install_command('schedule')}"
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


FOR_EVER: Final = "never"
"""The value of `--until` that removes the end of a schedule."""


@dataclass(frozen=True)
class ScheduleRequest:
    """The values that a user requests for a schedule; None keeps the old value or the default.

    Attributes:
        run: names the run in any form that `find` accepts.
        cron: a crontab line.
        until: a day, as in 2027-03-31, or `FOR_EVER`.
        account: the compute budget account.
        site: a backend config, as `[NAME=]FILE`; empty: the run's.
    """

    run: str | None = None
    cron: str | None = None
    tz: str | None = None
    until: str | None = None
    account: str | None = None
    missed: MissedPolicy | None = None
    site: str | None = None


def make_schedule(
    name: str, wish: ScheduleRequest, now: datetime, find: Callable[[str], str]
) -> Schedule:
    """Return a new schedule, due after `now` only.

    `wish` must contain `run` and `cron`. `find` returns the id of a run, and raises UserError if
    the run does not exist. Raise UserError with all mistakes.
    """
    bare = Schedule(
        id=0, name=name, run="", cron="", tz=_local_zone(), until=None, account="",
        missed=MissedPolicy.SKIP, since=now.timestamp(), revision=0,
    )  # fmt: skip
    mistakes = []
    if not re.fullmatch(r"\w[\w.-]{0,59}", name):
        do = "Use up to 60 letters, digits, . _ and -"
        mistakes.append(UserError(f"{name!r} is not a valid schedule name", do=do))
    return _changed(bare, wish, now, find, mistakes)


def edit_schedule(
    schedule: Schedule, wish: ScheduleRequest, now: datetime, find: Callable[[str], str]
) -> Schedule:
    """Return a changed schedule without unclaimed due times up to now.

    Raise UserError with all mistakes.
    """
    return replace(_changed(schedule, wish, now, find, []), since=now.timestamp())


def _changed(
    schedule: Schedule,
    wish: ScheduleRequest,
    now: datetime,
    find: Callable[[str], str],
    mistakes: list[UserError],
) -> Schedule:
    changes: dict[str, Any] = {}

    def check(field: str, wanted: str | None, read: Callable[[str], object]) -> None:
        if wanted is not None:
            try:
                changes[field] = read(wanted)
            except UserError as error:
                mistakes.append(error)

    check("run", wish.run, find)
    check("tz", schedule.tz if wish.tz is None else wish.tz, lambda name: _find_zone(name).key)
    zone = ZoneInfo(changes.get("tz", "UTC"))
    line = schedule.cron if wish.cron is None else wish.cron
    check("cron", line, lambda text: Cron(text, zone).text)
    check("until", wish.until, lambda text: _day(text, now.astimezone(zone).date()))
    check("account", wish.account, _account)
    check("site", wish.site, _site)
    if wish.missed is not None:
        changes["missed"] = wish.missed
    if mistakes:
        lines = "".join(f"\n  {mistake}" for mistake in mistakes)
        several = f"{humanize_count(len(mistakes), 'mistake')}:{lines}"
        raise mistakes[0] if len(mistakes) == 1 else UserError(several, do="Nothing was changed")
    made = replace(schedule, **changes)
    _check_due(made, now)
    return made


def _check_due(schedule: Schedule, now: datetime) -> None:
    if next(schedule.due(now), None) is not None:
        return
    first = next(replace(schedule, until=None).due(now), None)
    if first is None:
        raise UserError(
            f"{schedule.cron!r} is never due", do="Use a day that exists in one of the months"
        )
    raise UserError(
        f"it would never be due: first on {format_moment(first)}, and until {schedule.until} only",
        do="Set a later day with --until",
    )


def _find_zone(name: str) -> ZoneInfo:
    """Return a time zone of the IANA database, or raise UserError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        known = sorted(available_timezones())
    if not known:
        raise UserError(
            "this machine has no time zone data",
            do=f"Install them with: {install_command('schedule')}",
        ) from None
    wanted = name.lower().replace(" ", "_")
    # Users know their city, and rarely the continent that it is listed under.
    by_word = {zone.lower(): zone for zone in known}
    by_word |= {zone.lower().rpartition("/")[2]: zone for zone in known if "/" in zone}
    close = difflib.get_close_matches(wanted, by_word, n=3, cutoff=0.7)
    likely = list(dict.fromkeys(by_word[word] for word in close))
    raise UserError(
        f"there is no time zone {name!r}",
        do=f"Use {', '.join([*likely, 'or UTC' if likely else 'UTC'])}, or another one of the"
        " IANA data base",
    ) from None


def _local_zone() -> str:
    """Return the machine's time zone, or UTC if it cannot be determined."""
    with suppress(ImportError, LookupError, ValueError, OSError):
        from tzlocal import get_localzone_name

        return str(get_localzone_name() or "UTC")
    return "UTC"


def _day(text: str, today: date) -> date | None:
    if text == FOR_EVER:
        return None
    try:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            raise ValueError(text)
        day = date.fromisoformat(text)
    except ValueError:
        raise UserError(
            f"--until: {text!r} is not a date", do=f"Use a date like 2027-03-31, or {FOR_EVER}"
        ) from None
    if day < today:
        raise UserError(f"--until: {text} is in the past", do="Set today or a later day")
    return day


def _account(name: str) -> str:
    if name and not is_single_word(name):
        raise UserError(
            f"--account: {name!r} is not a valid account name",
            do="Use no blanks, quotes, backslashes, # or control characters",
        )
    return name


def _site(spec: str) -> str:
    if not spec:
        return ""
    chosen = config_of_file(spec, {})
    return f"{chosen.site}={chosen.source}"


def format_moment(moment: datetime) -> str:
    """Format a moment for users, with the time zone."""
    return f"{moment:%a %Y-%m-%d %H:%M %Z}"
