"""Check a requested schedule, to report every mistake before it costs a due time."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from re import ASCII, fullmatch
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.humanize import humanize_count
from snakemake_executor_plugin_mantik.common.installing import install_command
from snakemake_executor_plugin_mantik.jobs.resources import is_single_word
from snakemake_executor_plugin_mantik.runs.configs import config_of_file

from .schedules import Cron, MissedPolicy, Schedule
from .submit import format_moment

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
    if not fullmatch(r"\w[\w.-]{0,59}", name):
        mistakes.append(
            UserError(
                f"{name!r} is not a valid schedule name",
                do="Use up to 60 letters, digits, . _ and -",
            )
        )
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
        raise mistakes[0] if len(mistakes) == 1 else _all(mistakes)
    made = replace(schedule, **changes)
    _check_due(made, now)
    return made


def _all(mistakes: list[UserError]) -> UserError:
    lines = "".join(f"\n  {mistake}" for mistake in mistakes)
    return UserError(
        f"{humanize_count(len(mistakes), 'mistake')}:{lines}", do="Nothing was changed"
    )


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
    try:
        from tzlocal import get_localzone_name

        return str(get_localzone_name() or "UTC")
    except (ImportError, LookupError, ValueError, OSError):
        return "UTC"


def _day(text: str, today: date) -> date | None:
    if text == FOR_EVER:
        return None
    try:
        if not fullmatch(r"\d{4}-\d\d-\d\d", text, ASCII):
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


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)
