"""Due times become runs: each once, and what does not is told."""

import random
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.runs import schedule_store, scheduler
from snakemake_executor_plugin_mantik.runs.schedule_store import CAUGHT_UP, NEVER_BEGUN
from snakemake_executor_plugin_mantik.runs.scheduler import (
    INTERRUPTED,
    LATE_S,
    LOOK_S,
    lock_schedule,
    submit_firing,
)
from snakemake_executor_plugin_mantik.runs.schedules import (
    FiringState,
    MissedPolicy,
    ScheduleRequest,
)
from tests.schedule.conftest import Killed, Machine


@pytest.mark.parametrize(
    ("cron", "tz", "until", "off", "fired"),
    [
        ("0 6 * * 1", "Europe/Berlin", "2026-03-30", "2026-03-01 12:00",
         ["2026-03-02T06:00:00+01:00", "2026-03-09T06:00:00+01:00", "2026-03-16T06:00:00+01:00",
          "2026-03-23T06:00:00+01:00", "2026-03-30T06:00:00+02:00"]),
        # The last day is one of the schedule's time zone.
        ("30 23 * * *", "America/New_York", "2026-03-02", "2026-03-01 12:00",
         ["2026-03-01T23:30:00-05:00", "2026-03-02T23:30:00-05:00"]),
        # What is made up for later was due before the end.
        ("0 6 * * *", "Europe/Berlin", "2026-03-03", "2026-03-10", ["2026-03-03T06:00:00+01:00"]),
    ],
)  # fmt: skip
def test_each_due_time_is_a_run_until_the_last_day(
    machine: Machine, cron: str, tz: str, until: str, off: str, fired: list[str]
) -> None:
    machine.add(cron, tz, until, MissedPolicy.ONCE)
    machine.pass_by(off)
    machine.go_on("2026-06-01", machine.scheduler())
    assert machine.fired == fired


def test_what_is_long_over_is_forgotten_and_nothing_else(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_store, "KEPT", 3)
    machine.add("0 * * * *")
    machine.runs.trouble = "after"
    with pytest.raises(Killed):
        machine.go_on("2026-03-01 14:00", machine.scheduler())
    (interrupted,) = machine.store.open()
    machine.runs.trouble = ""
    with monkeypatch.context() as busy:
        busy.setattr(scheduler, "is_under_way", lambda *_: True)
        for hour in range(14, 20):
            machine.pass_by(f"2026-03-01 {hour}:00")
            machine.scheduler()()
            for firing in machine.store.open():
                if firing.id != interrupted.id:
                    machine.store.fired(firing, "r", machine.clock())
    states = [state for _, state, _ in machine.history()]
    assert states == [FiringState.FIRING, *[FiringState.FIRED] * 3]


@pytest.mark.parametrize(
    ("missed", "made"), [(MissedPolicy.SKIP, []), (MissedPolicy.ONCE, ["03-04 05:00"])]
)
def test_what_was_missed_is_skipped_or_caught_up_once(
    machine: Machine, missed: MissedPolicy, made: list[str]
) -> None:
    machine.add("0 6 * * *", missed=missed)
    machine.pass_by("2026-03-04 20:00")
    machine.go_on("2026-03-05 04:00", machine.scheduler())
    assert [text for text, state, _ in machine.history() if state is FiringState.FIRED] == made
    last = "Tue 2026-03-03 06:00 CET" if made else "Wed 2026-03-04 06:00 CET"
    missing = f"no scheduler was running from then to {last}"
    assert machine.history()[0] == ("03-02 05:00", FiringState.MISSED, missing)
    machine.go_on("2026-03-06 00:00", machine.scheduler())
    assert machine.history()[-1] == ("03-05 05:00", FiringState.FIRED, "")


def test_a_little_late_is_not_missed(machine: Machine) -> None:
    machine.add("0 6 * * *")
    machine.now = datetime(2026, 3, 2, 5, 0, tzinfo=UTC) + timedelta(seconds=LATE_S)
    machine.scheduler()()
    machine.now += timedelta(days=1, seconds=1)
    machine.scheduler()()
    assert [state for _, state, _ in machine.history()] == [FiringState.FIRED, FiringState.MISSED]


def test_a_failure_is_repeated_ever_more_rarely_and_given_up_when_the_next_is_due(
    machine: Machine,
) -> None:
    machine.add("0 6 * * *")
    machine.runs.trouble = "away"
    scheduler = machine.scheduler()
    machine.go_on("2026-03-02 12:00", scheduler)
    (firing,) = machine.store.open()
    assert (firing.told, firing.begun) == ("MLflow: no answer.", False)
    # 1, 2, 4, 8, 16, 32 minutes, then one hour each.
    assert firing.attempts == 1 + 6 + 5
    machine.go_on("2026-03-03 05:00", scheduler)
    machine.runs.trouble = ""
    machine.go_on("2026-03-03 08:00", scheduler)
    assert machine.history() == [
        ("03-02 05:00", FiringState.FAILED, "MLflow: no answer."),
        ("03-03 05:00", FiringState.FIRED, ""),
    ]  # fmt: skip


def test_what_nothing_comes_after_is_given_up_after_a_week(machine: Machine) -> None:
    machine.add("0 6 2 3 *", until="2026-03-02")
    machine.runs.trouble = "away"
    machine.go_on("2026-03-02 06:00", machine.scheduler())
    machine.pass_by("2026-03-09 05:01")
    machine.scheduler()()
    assert machine.history() == [("03-02 05:00", FiringState.FAILED, "MLflow: no answer.")]


def test_that_an_attempt_was_interrupted_is_told_as_long_as_it_is_not_known(
    machine: Machine,
) -> None:
    machine.add("0 6 * * *")
    machine.runs.trouble = "before"
    with pytest.raises(Killed):
        machine.go_on("2026-03-03 04:00", machine.scheduler())
    machine.runs.trouble = "away"
    machine.go_on("2026-03-02 08:00", machine.scheduler())
    (firing,) = machine.store.open()
    assert firing.told == f"MLflow: no answer. {INTERRUPTED}"


@pytest.mark.parametrize("reason", ["", CAUGHT_UP])
def test_what_was_claimed_and_never_begun_is_told_when_the_next_is_due(
    machine: Machine, reason: str
) -> None:
    machine.add("0 6 * * *")
    machine.pass_by("2026-03-02 05:00")
    schedule = machine.store.get("weekly")
    assert schedule is not None
    now = int(machine.clock())
    assert machine.store.claim(schedule, now, [(now, FiringState.FIRING, reason)], now)
    machine.pass_by("2026-03-03 05:00")
    machine.go_on("2026-03-03 06:00", machine.scheduler())
    assert machine.history()[0] == ("03-02 05:00", FiringState.FAILED, NEVER_BEGUN)
    assert len(machine.fired) == 1


def test_nobody_else_submits_while_one_does(machine: Machine) -> None:
    machine.add("0 6 * * *")
    machine.pass_by("2026-03-02 05:00")
    schedule = machine.store.get("weekly")
    assert schedule is not None
    with lock_schedule(machine.directory, schedule.id) as ours:
        assert ours
        machine.scheduler()()
        (firing,) = machine.store.open()
        assert not submit_firing(machine.store, firing.id, machine.runs.again, machine.clock)
        assert not machine.runs.asked
    assert "submitted as run run-0" in submit_firing(
        machine.store, firing.id, machine.runs.again, machine.clock
    )
    assert not submit_firing(machine.store, firing.id, machine.runs.again, machine.clock)


def test_an_edit_is_picked_up_and_is_not_retroactive(machine: Machine) -> None:
    machine.add("0 6 * * *")
    scheduler = machine.scheduler()
    machine.go_on("2026-03-02 12:00", scheduler)
    site = machine.directory / "alps.yaml"
    site.write_text("UnicoreApiUrl: https://example.org/rest/core\nResources: {Queue: batch}\n")
    machine.edit(ScheduleRequest(cron="0 */3 * * *", account="other", site=str(site)))
    machine.go_on("2026-03-02 18:00", scheduler)
    assert [due[5:16] for due in machine.fired] == ["03-02T06:00", "03-02T15:00", "03-02T18:00"]
    assert [account for _, _, account in machine.runs.asked] == ["", "other", "other"]
    assert machine.runs.sites == ["", f"alps={site}", f"alps={site}"]
    assert [state for _, state, _ in machine.history()] == [FiringState.FIRED] * 3
    machine.add("0 0 * * *", name="another")
    machine.store.remove(machine.store.all()[1].id)
    machine.go_on("2026-03-04 12:00", scheduler)
    assert [name for name, _, _ in machine.runs.asked[3:]] == ["another"] * 2


def test_a_claim_of_what_was_edited_meanwhile_is_none(machine: Machine) -> None:
    machine.add("0 6 * * *")
    seen = machine.store.get("weekly")
    assert seen is not None
    machine.edit(ScheduleRequest(cron="0 7 * * *"))
    now = int(machine.clock()) + 86400
    assert not machine.store.claim(seen, now, [(now, FiringState.FIRING, "")], now)
    assert machine.history() == []


def test_a_clock_that_jumps_doubles_nothing_and_stops_nothing(machine: Machine) -> None:
    machine.add("0 * * * *")
    scheduler = machine.scheduler()
    machine.go_on("2026-03-01 15:00", scheduler)
    machine.pass_by("2026-03-01 13:30")
    machine.go_on("2026-03-01 16:00", scheduler)
    assert len(machine.fired) == len(set(machine.fired)) == 4
    machine.pass_by("2031-01-01 00:30")
    scheduler()
    machine.pass_by("2026-03-01 16:30")
    machine.go_on("2026-03-01 20:00", scheduler)
    assert len(machine.fired) == len(set(machine.fired)) == 8


def test_a_retry_that_a_wrong_clock_put_far_away_is_not_waited_for(machine: Machine) -> None:
    machine.add("0 0 1 1 *")
    machine.runs.trouble = "away"
    machine.pass_by("2031-12-31 23:00")
    scheduler = machine.scheduler()
    scheduler()
    machine.runs.trouble = ""
    machine.pass_by("2026-03-01 16:30")
    scheduler()
    assert machine.fired == ["2032-01-01T00:00:00+01:00"]
    assert not machine.store.open()


def test_it_looks_again_when_the_next_is_due_and_often_enough(machine: Machine) -> None:
    scheduler = machine.scheduler()
    assert scheduler() == LOOK_S
    machine.add("0 6 * * *")
    assert scheduler() == LOOK_S
    machine.now = datetime(2026, 3, 2, 4, 59, 56, tzinfo=UTC)
    assert scheduler() == 4.0


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_due_time_is_one_run_or_told(seed: int, memory: Path) -> None:
    """Kills, failures, pauses, clocks set back, two schedulers, edits: drawn from a seed."""
    draw = random.Random(seed)
    start = datetime(2026, 3, 28, 18, tzinfo=UTC)  # clocks change in the night
    machine = Machine(memory, start)
    machine.add("*/10 * * * *", missed=draw.choice([MissedPolicy.SKIP, MissedPolicy.ONCE]))
    for _ in range(20):
        machine.runs.trouble = draw.choice(["", "", "", "away", "before", "after"])
        here = [machine.scheduler() for _ in range(draw.choice([1, 2]))]
        length = timedelta(minutes=draw.randint(1, 60))
        try:
            machine.go_on((machine.now + length).replace(tzinfo=None).isoformat(), *here)
        except Killed:
            machine.now += timedelta(seconds=draw.randint(0, 300))
        if draw.random() < 0.2:
            machine.now += timedelta(minutes=draw.randint(-45, 45))
        if draw.random() < 0.1:
            machine.edit(ScheduleRequest(cron=draw.choice(["*/10 * * * *", "*/15 * * * *"])))
    machine.runs.trouble = ""
    calm = machine.now + timedelta(hours=3)
    machine.go_on(calm.replace(tzinfo=None).isoformat(), machine.scheduler())
    assert len(machine.fired) == len(set(machine.fired)), "one due time, two runs"
    schedule = machine.store.get("weekly")
    assert schedule is not None
    history = {f.due: f for f in machine.store.history(schedule.id)}
    runs = {int(datetime.fromisoformat(due).timestamp()) for due in machine.fired}
    fired = {due for due, f in history.items() if f.state is FiringState.FIRED}
    assert runs == fired, "a run that nobody knows of, or none where one is told"
    assert all(
        f.told for f in history.values() if f.state in {FiringState.FAILED, FiringState.MISSED}
    )
    last_hours = takewhile(lambda due: due <= calm, schedule.due(calm - timedelta(hours=2)))
    assert {int(due.timestamp()) for due in last_hours} <= fired, "all was well, and it was lost"


def test_a_scheduler_outlives_the_directory_that_it_was_started_in(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    machine.add("* * * * *")
    machine.pass_by("2026-03-01T12:01:00")
    machine.scheduler()()
    (firing,) = machine.store.history(1)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    processes = scheduler.Processes()
    processes.submit(firing)

    (process,) = processes._running.values()
    assert Path(f"/proc/{process.pid}/cwd").readlink().exists()
    processes.wait()
    assert process.returncode == 0
