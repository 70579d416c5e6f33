"""How long a job waited and ran, whatever the clocks show and whenever somebody looks."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.engine.attempt import Attempt
from snakemake_executor_plugin_mantik.engine.evidence import ClaimOwner, Evidence, Finding
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import (
    AttemptRecord,
    AttemptState,
    Times,
    read_history,
)
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase
from snakemake_executor_plugin_mantik.views.usage import usage_by_rule
from snakemake_executor_plugin_mantik.views.workflow import overview_jobs
from tests.support.controller import Controller, killed_when, request, simulate
from tests.support.simulated import Fate, Habits, World

RECORD = AttemptRecord(
    id="attempt", site="sim", bucket=0, job="j", rule="r", name="r", fingerprint="f",
    state=AttemptState.SUBMITTED,
)  # fmt: skip
DAY_S = 86400.0


@pytest.mark.parametrize("off", [0.0, -5 * 3600.0, 9 * 3600.0])
@pytest.mark.parametrize("away", [0.0, 60.0, 3 * DAY_S])
def test_the_sites_clock_tells_how_long_a_job_waited(off: float, away: float) -> None:
    """However late the end is noticed, and however far the site's clock is off."""
    now = time.time()
    submitted = now - 20.0 - 8.0 - away
    attempt = Attempt(RECORD, [], submitted, 1, submitted + off)
    started = submitted + 20.0 + off
    times = attempt.times(Marker(0, started=started, ended=started + 8.0))
    assert (times.waited, times.ran, times.told_by) == (20.0, 8.0, "")
    assert times.ended == pytest.approx(submitted + 28.0)


@pytest.mark.parametrize("differs", [-1.0, -30.0])
def test_a_node_that_is_a_little_behind_did_not_wait(differs: float) -> None:
    now = time.time()
    marker = Marker(0, started=now - 10 + differs, ended=now + differs)
    times = Attempt(RECORD, [], now - 10, 1, now - 10).times(marker)
    assert (times.waited, times.ran) == (0.0, 10.0)


def test_a_server_that_tells_an_old_second_makes_no_wait_longer() -> None:
    now = time.time()
    marker = Marker(0, started=now - 8, ended=now)
    times = Attempt(RECORD, [], now - 10, 1, now - 11.5).times(marker)
    assert times.waited is not None
    assert times.waited + 8.0 <= time.time() - (now - 10)
    assert times.ended == pytest.approx(now - 10 + times.waited + 8.0)


@pytest.mark.parametrize("differs", [-7 * 3600.0, -120.0, 120.0, 7 * 3600.0])
def test_a_node_with_another_clock_tells_nothing(differs: float) -> None:
    now = time.time()
    marker = Marker(0, started=now - 10 + differs, ended=now + differs)
    assert Attempt(RECORD, [], now - 10, 1, now - 10).times(marker) == Times(ran=10.0)


def test_what_nobody_acknowledged_is_not_known() -> None:
    now = time.time()
    marker = Marker(0, started=now, ended=now + 1)
    assert Attempt(RECORD, [], now - 10, 1).times(marker) == Times(ran=1.0)
    assert Attempt(RECORD, [], now - 10, 1, now - 10).times(Marker(0, bare=True)) == Times()


def ended(**end: Any) -> Times:
    """The times of a job that was submitted two days ago, waited for 20 s, and reported nothing."""
    submitted = time.time() - 2 * DAY_S
    attempt = Attempt(RECORD, [], submitted, 1, submitted + 3600.0)
    state, began = JobState(Phase.ENDED, Reason.OUT_OF_MEMORY, **end), submitted + 3620.0
    attempt.end = Evidence(
        Finding.ENDED, state=state, owner=ClaimOwner("", "7", began), beat=began + 13.0
    )
    found = attempt.times(None)
    assert found.ended is None or found.ended == pytest.approx(
        submitted + (found.waited or 0.0) + (found.ran or 0.0)
    )
    return replace(found, ended=None, waited=found.waited and round(found.waited, 3))


def test_a_job_without_a_report_ran_until_its_last_heartbeat() -> None:
    assert ended() == Times(20.0, 13.0, told_by="heartbeat")


def test_what_the_scheduler_counts_is_what_a_site_bills() -> None:
    assert ended(ran=17.0) == Times(20.0, 17.0, told_by="scheduler")
    assert ended(ran=17.0, starts_after=19.0) == Times(19.0, 17.0, told_by="scheduler")


# How long a job ran that could not report it: never until somebody came to look.


NIGHT_S = 12 * 3600.0
BEAT_S = 10.0


def left_alone(tmp_path: Path, world: World) -> Controller:
    """The controller dies when the job runs, and nobody comes for a night."""
    dead = killed_when(tmp_path, world, lambda controller: bool(world.runs))
    world.advance(world.now + NIGHT_S)
    return dead


def only_attempt(tmp_path: Path) -> AttemptRecord:
    [record] = read_history(tmp_path / ".snakemake/mantik")
    return record


@pytest.mark.parametrize("ending", ["killed", "cancelled"])
def test_absence_costs_no_core_hours(tmp_path: Path, ending: str) -> None:
    """A job that was killed for its memory, or by `scancel`, before it could write its marker."""
    reason = Reason.OUT_OF_MEMORY if ending == "killed" else Reason.CANCELLED
    world = World(lambda spec: Fate(killed_after=100.0, reason=reason))
    dead = left_alone(tmp_path, world)

    async def come_back(controller: Controller) -> None:
        if ending == "killed":
            assert not (await controller.job(request(1))).succeeded
        else:
            records = controller.journal.all_open_attempts()
            assert await controller.work.canceller.cancel(records) == []

    simulate(tmp_path, world, come_back)
    dead.forget()

    record = only_attempt(tmp_path)
    assert record.ran == pytest.approx(100.0, abs=BEAT_S)
    assert record.times.told_by == "heartbeat"
    [usage] = usage_by_rule(
        overview_jobs(read_history(tmp_path / ".snakemake/mantik"), controlled=False), 1e9
    )
    assert (usage.estimated, usage.untimed) == (1, 0)


def test_a_job_that_is_cancelled_ran_until_then(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 10_000.0)

    async def play(controller: Controller) -> None:
        job = asyncio.create_task(controller.job(request(1)))
        await asyncio.sleep(500.0)
        job.cancel()
        await controller.work.canceller.cancel(controller.journal.all_open_attempts())

    simulate(tmp_path, world, play)
    assert only_attempt(tmp_path).ran == pytest.approx(497.0, abs=2 * BEAT_S)


def test_the_start_that_the_scheduler_expects_is_told(tmp_path: Path) -> None:
    """By the site's clock, which may differ: firecREST gives it as a time."""
    world = World(lambda spec: Fate(starts=(5000.0,)), habits=Habits(clock=-7200.0))

    async def play(controller: Controller) -> None:
        states = controller.site.states

        async def told(ids: Sequence[str]) -> dict[str, JobState]:
            found = await states(ids)
            return {i: replace(s, started=world.clock + 3600.0) for i, s in found.items()}

        controller.site.states = told  # type: ignore[method-assign]
        job = asyncio.create_task(controller.job(request(1)))
        await asyncio.sleep(60.0)
        expected = only_attempt(tmp_path).expected
        assert expected is not None
        assert expected - time.time() == pytest.approx(3600.0, abs=60.0)
        job.cancel()

    simulate(tmp_path, world, play)


def test_a_segment_waited_in_the_queue_only_after_the_one_before() -> None:
    """It was submitted while that one ran."""
    record = AttemptRecord(
        id="2", site="sim", bucket=0, job="j", rule="r", name="r", fingerprint="f",
        state=AttemptState.SUBMITTED, segment=1, segments=3, follows="1",
    )  # fmt: skip
    now = time.time()
    attempt = Attempt(record, [], now - 1000.0, 1, now - 1000.0, turn=now - 100.0)
    times = attempt.times(Marker(0, started=now - 60.0, ended=now - 10.0))
    assert (round(times.behind or 0), round(times.waited or 0), times.ran) == (900, 40, 50.0)
