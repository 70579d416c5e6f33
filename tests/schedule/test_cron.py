"""Crontab lines against dates that are known, and against a search minute by minute."""

import sys
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.runs.schedules import Cron

BERLIN = ZoneInfo("Europe/Berlin")


def due(line: str, after: str, number: int = 3, zone: str = "Europe/Berlin") -> list[str]:
    there = ZoneInfo(zone)
    found = Cron(line, there).after(datetime.fromisoformat(after).replace(tzinfo=there))
    return [f"{moment:%a %Y-%m-%d %H:%M %Z}" for moment in islice(found, number)]


def test_days_of_the_week_are_those_of_a_crontab() -> None:
    # 2026-03-01 was a Sunday.
    mondays = ["Mon 2026-03-02 06:00 CET", "Mon 2026-03-09 06:00 CET"]
    assert due("0 6 * * 1", "2026-03-01 12:00", 2) == mondays
    assert due("0 6 * * mon", "2026-03-01 12:00", 2) == mondays
    for sunday in ("0", "7", "SUN"):
        assert due(f"0 6 * * {sunday}", "2026-03-01", 1) == ["Sun 2026-03-01 06:00 CET"]
    for weekend in ("5-7", "fri-sun", "0,5,6", "sun,fri-sat"):
        days = [text[:3] for text in due(f"0 6 * * {weekend}", "2026-03-01", 4)]
        assert days == ["Sun", "Fri", "Sat", "Sun"]
    assert [t[:3] for t in due("0 6 * * */2", "2026-03-02", 4)] == ["Tue", "Thu", "Sat", "Sun"]


def test_one_of_two_days_is_enough() -> None:
    # crontab(5): the 13th and every Friday; * and */2 restrict nothing by themselves.
    assert due("0 0 13 * 5", "2026-06-06", 4, "UTC") == [
        "Fri 2026-06-12 00:00 UTC", "Sat 2026-06-13 00:00 UTC",
        "Fri 2026-06-19 00:00 UTC", "Fri 2026-06-26 00:00 UTC",
    ]  # fmt: skip
    assert due("0 0 */2 * 5", "2026-06-06", 2, "UTC") == [
        "Fri 2026-06-19 00:00 UTC", "Fri 2026-07-03 00:00 UTC",
    ]  # fmt: skip
    # What else such a list holds is there as well: Sundays, Fridays and Saturdays from the 20th on.
    assert due("0 0 20-31 * */7,fri-sat", "2026-06-06", 4, "UTC") == [
        "Sat 2026-06-20 00:00 UTC", "Sun 2026-06-21 00:00 UTC",
        "Fri 2026-06-26 00:00 UTC", "Sat 2026-06-27 00:00 UTC",
    ]  # fmt: skip
    assert due("0 0 20-31 * */7,fri-sun", "2026-06-28", 1, "UTC") == ["Fri 2026-07-24 00:00 UTC"]


def test_rare_days_and_nicknames() -> None:
    leap = ["Tue 2028-02-29 00:00 UTC", "Sun 2032-02-29 00:00 UTC", "Fri 2036-02-29 00:00 UTC"]
    assert due("0 0 29 feb *", "2026-01-01", 3, "UTC") == leap
    assert due("0 0 29 2 *", "2096-03-01", 1, "UTC") == ["Fri 2104-02-29 00:00 UTC"]
    assert due("0 0 31 2 *", "2026-01-01") == []
    assert due("@hourly", "2026-01-01 10:30", 1, "UTC") == ["Thu 2026-01-01 11:00 UTC"]


def test_a_time_that_is_skipped_is_due_as_long_after_the_change() -> None:
    # On 2026-03-29 clocks go from 02:00 to 03:00.
    assert due("30 2 * * *", "2026-03-28 00:00") == [
        "Sat 2026-03-28 02:30 CET", "Sun 2026-03-29 03:30 CEST", "Mon 2026-03-30 02:30 CEST",
    ]  # fmt: skip
    assert due("0 * * * *", "2026-03-29 00:30", 3) == [
        "Sun 2026-03-29 01:00 CET", "Sun 2026-03-29 03:00 CEST", "Sun 2026-03-29 04:00 CEST",
    ]  # fmt: skip
    assert due("30 2 * * *", "2026-03-29 03:10", 1) == ["Sun 2026-03-29 03:30 CEST"]
    # In Nuuk clocks go from 23:00 to midnight, to the same times as those of the next day.
    assert due("30 0,23 * * *", "2026-03-28 00:00", 5, "America/Nuuk") == [
        "Sat 2026-03-28 00:30 -02", "Sun 2026-03-29 00:30 -01", "Sun 2026-03-29 23:30 -01",
        "Mon 2026-03-30 00:30 -01", "Mon 2026-03-30 23:30 -01",
    ]  # fmt: skip
    # Half an hour on Lord Howe Island: what is skipped and what is not come in their order.
    assert due("5,20,40 2 * * *", "2026-10-04 00:00", 4, "Australia/Lord_Howe") == [
        "Sun 2026-10-04 02:35 +11", "Sun 2026-10-04 02:40 +11", "Sun 2026-10-04 02:50 +11",
        "Mon 2026-10-05 02:05 +11",
    ]  # fmt: skip


def test_a_time_that_comes_twice_is_due_once() -> None:
    # On 2026-10-25 clocks go from 03:00 to 02:00.
    assert due("30 2 * * *", "2026-10-24 12:00", 2) == [
        "Sun 2026-10-25 02:30 CEST", "Mon 2026-10-26 02:30 CET",
    ]  # fmt: skip
    first = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)
    for moment in (first, first.replace(fold=1), first.replace(minute=10, fold=1)):
        found = next(Cron("30 2 * * *", BERLIN).after(moment))
        assert found == datetime(2026, 10, 26, 2, 30, tzinfo=BERLIN), moment


def test_the_latest_is_the_later_moment_though_its_clock_time_is_earlier() -> None:
    lord_howe = ZoneInfo("Australia/Lord_Howe")
    skipped = datetime(2026, 10, 4, 2, 55, tzinfo=lord_howe)
    found = Cron("5,20,40 2 * * *", lord_howe).latest(skipped - timedelta(days=1), skipped)
    assert found == datetime(2026, 10, 4, 2, 50, tzinfo=lord_howe)
    twice = datetime(2026, 10, 25, 2, 10, tzinfo=BERLIN, fold=1)
    found = Cron("30 2 * * *", BERLIN).latest(twice - timedelta(days=1), twice)
    assert found == datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("61 * * * *", "the minute: '61' is not 0 to 59"),
        ("* 24 * * *", "the hour: '24' is not 0 to 23"),
        ("* * 0 * *", "the day of the month: '0' is not 1 to 31"),
        ("* * * 13 *", "the month: '13' is not 1 to 12 or jan to dec"),
        ("* * * * 8", "the day of the week: '8' is not 0 to 7 or sun to sat"),
        ("* * * * monday", "the day of the week: 'monday' is not"),
        ("* * * * fri-mon", "the day of the week: 'fri-mon' goes backwards"),
        ("*/0 * * * *", "the minute: in '*/0' the step is 0"),
        ("* 5, * * *", "the hour: '' is not a valid crontab value"),
        ("* * L * *", "the day of the month: 'L' is not 1 to 31"),
        ("x 99 * * *", "the minute: 'x' is not 0 to 59; the hour: '99' is not 0 to 23"),
        ("0 0 6 * * 1", "it has 6 fields"),
        ("@reboot", "it has 1 field"),
        ("", "it has 0 fields"),
        ("٣ * * * *", "the minute"),
    ],
)
def test_what_is_no_crontab_line_is_told_by_field(line: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        Cron(line, BERLIN)
    assert told in str(raised.value)
    assert "minute, hour, day of the month, month, day of the week" in str(raised.value)


ITEM = st.sampled_from(["*", "0", "*/2", "1-3", "1,5", "2-6/2", "3/2"])
LINES = st.builds(
    lambda minute, hour, *rest: f"{minute} {hour} {' '.join(rest)}",
    st.sampled_from(["0", "30", "*/15", "7,50", "10-20/5"]),
    st.sampled_from(["*", "2", "1-3", "*/6"]),
    ITEM.filter(lambda text: text != "0"), ITEM.filter(lambda text: text != "0"), ITEM,
)  # fmt: skip


def values(line: str) -> list[set[int]]:
    """The values of each field."""
    found = []
    limits = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 6)]
    for text, (first, last) in zip(line.split(), limits, strict=True):
        numbers: set[int] = set()
        for item in text.split(","):
            base, _, step = item.partition("/")
            one, _, other = base.partition("-")
            low, high = (first, last) if base == "*" else (int(one), int(other or one))
            numbers |= set(range(low, (last if step and not other else high) + 1, int(step or 1)))
        found.append(numbers)
    return found


def matches(line: str, numbers: list[set[int]], wall: datetime) -> bool:
    """Whether a line fits a wall clock time, field by field."""
    minutes, hours, days, months, week = numbers
    if wall.minute not in minutes or wall.hour not in hours or wall.month not in months:
        return False
    day, weekday = wall.day in days, wall.isoweekday() % 7 in week
    either = not line.split()[2].startswith("*") and not line.split()[4].startswith("*")
    return day or weekday if either else day and weekday


@settings(max_examples=60, deadline=None)
@given(
    LINES,
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]),
    st.sampled_from(
        ["2026-03-28 20:00", "2026-10-24 20:00", "2026-01-31 12:00", "2026-03-07 22:00"]
    ),
)  # fmt: skip
def test_it_is_due_just_when_the_clock_on_the_wall_says_so(line: str, zone: str, day: str) -> None:
    there = ZoneInfo(zone)
    start = datetime.fromisoformat(day).replace(tzinfo=there).astimezone(UTC)
    end = start + timedelta(hours=14)
    expected, wall = set(), start.astimezone(there).replace(tzinfo=None) - timedelta(hours=4)
    numbers = values(line)
    for _ in range(24 * 60):
        if matches(line, numbers, wall):
            expected.add(wall.replace(tzinfo=there).astimezone(UTC))
        wall += timedelta(minutes=1)
    found, cron = [], Cron(line, there)
    for moment in cron.after(start):
        if moment > end:
            break
        found.append(moment.astimezone(UTC))
    assert found == sorted(each for each in expected if start < each <= end)
    assert cron.latest(start, end) == (found[-1] if found else None)


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(UserError, match=r"cronsim is not installed.*\[schedule\]"):
        next(Cron("@daily", BERLIN).after(datetime(2026, 1, 1, tzinfo=UTC)))
