"""Crontab lines against dates that are known."""

import sys
from datetime import datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

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
    for weekend in ("5-7", "0,5,6", "sun,fri-sat"):
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


def test_rare_days_and_nicknames() -> None:
    leap = ["Tue 2028-02-29 00:00 UTC", "Sun 2032-02-29 00:00 UTC", "Fri 2036-02-29 00:00 UTC"]
    assert due("0 0 29 feb *", "2026-01-01", 3, "UTC") == leap
    assert due("0 0 29 2 *", "2096-03-01", 1, "UTC") == ["Fri 2104-02-29 00:00 UTC"]
    assert due("@hourly", "2026-01-01 10:30", 1, "UTC") == ["Thu 2026-01-01 11:00 UTC"]


def test_a_time_that_is_skipped_is_due_right_after_the_change() -> None:
    # On 2026-03-29 clocks go from 02:00 to 03:00.
    assert due("30 2 * * *", "2026-03-28 00:00") == [
        "Sat 2026-03-28 02:30 CET", "Sun 2026-03-29 03:00 CEST", "Mon 2026-03-30 02:30 CEST",
    ]  # fmt: skip
    assert due("0 * * * *", "2026-03-29 00:30", 3) == [
        "Sun 2026-03-29 01:00 CET", "Sun 2026-03-29 03:00 CEST", "Sun 2026-03-29 04:00 CEST",
    ]  # fmt: skip
    # Half an hour on Lord Howe Island: several times that are skipped are one.
    lord_howe = "Australia/Lord_Howe"
    assert due("5,20,40 2 * * *", "2026-10-04 00:00", 3, lord_howe) == [
        "Sun 2026-10-04 02:30 +11", "Sun 2026-10-04 02:40 +11", "Mon 2026-10-05 02:05 +11",
    ]  # fmt: skip
    skipped = datetime(2026, 10, 4, 2, 35, tzinfo=ZoneInfo(lord_howe))
    line = Cron("5,20,40 2 * * *", ZoneInfo(lord_howe))
    assert line.latest(skipped - timedelta(days=1), skipped) == skipped.replace(minute=30)


def test_a_time_that_comes_twice_is_due_once_and_each_hour_is_due() -> None:
    # On 2026-10-25 clocks go from 03:00 to 02:00.
    assert due("30 2 * * *", "2026-10-24 12:00", 2) == [
        "Sun 2026-10-25 02:30 CEST", "Mon 2026-10-26 02:30 CET",
    ]  # fmt: skip
    assert due("30 * * * *", "2026-10-25 02:00", 3) == [
        "Sun 2026-10-25 02:30 CEST", "Sun 2026-10-25 02:30 CET", "Sun 2026-10-25 03:30 CET",
    ]  # fmt: skip
    first = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)
    daily = Cron("30 2 * * *", BERLIN)
    for moment in (first, first.replace(fold=1), first.replace(minute=10, fold=1)):
        assert next(daily.after(moment)) == datetime(2026, 10, 26, 2, 30, tzinfo=BERLIN), moment
    assert daily.latest(first - timedelta(hours=1), first.replace(fold=1)) == first
    assert daily.latest(first, first.replace(fold=1)) is None
    again = first.replace(minute=10, fold=1)
    assert daily.latest(first - timedelta(days=2), again) == first


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("61 * * * *", "bad minute"),
        ("* 24 * * *", "bad hour"),
        ("* * 0 * *", "bad day-of-month"),
        ("0 0 31 2 *", "bad day-of-month"),
        ("* * * 13 *", "bad month"),
        ("* * * * fri-mon", "bad day-of-week"),
        ("*/0 * * * *", "bad minute"),
        ("0 0 6 * * 1", "it has 6 fields"),
        ("", "it has 0 fields"),
        ("٣ * * * *", "bad minute"),
    ],
)
def test_what_is_no_crontab_line_is_told_by_field(line: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        Cron(line, BERLIN)
    assert told in str(raised.value)
    assert "minute (0-59), hour (0-23), day of the month (1-31), month" in str(raised.value)


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(UserError, match=r"cronsim is not installed.*\[schedule\]"):
        Cron("@daily", BERLIN)
