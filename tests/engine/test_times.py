"""How long a job ran that could not report it: never until somebody came to look."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine.attempt import Attempt
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import (
    TryRecord,
    TryState,
    read_history,
)
from snakemake_executor_plugin_mantik.sites.base import JobState
from snakemake_executor_plugin_mantik.views.usage import usage_by_rule
from snakemake_executor_plugin_mantik.views.workflow import overview_jobs
from tests.support.controller import Controller, killed_when, request, simulate
from tests.support.simulated import Fate, Habits, World

NIGHT_S = 12 * 3600.0
BEAT_S = 10.0


def left_alone(tmp_path: Path, world: World) -> Controller:
    """The controller dies when the job runs, and nobody comes for a night."""
    dead = killed_when(tmp_path, world, lambda controller: bool(world.runs))
    world.advance(world.now + NIGHT_S)
    return dead


def only_try(tmp_path: Path) -> TryRecord:
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
            records = controller.journal.all_open_tries()
            assert await controller.work.canceller.cancel(records) == []

    simulate(tmp_path, world, come_back)
    dead.forget()

    record = only_try(tmp_path)
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
        await controller.work.canceller.cancel(controller.journal.all_open_tries())

    simulate(tmp_path, world, play)
    assert only_try(tmp_path).ran == pytest.approx(497.0, abs=2 * BEAT_S)


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
        expected = only_try(tmp_path).expected
        assert expected is not None
        assert expected - time.time() == pytest.approx(3600.0, abs=60.0)
        job.cancel()

    simulate(tmp_path, world, play)


def test_a_segment_waited_in_the_queue_only_after_the_one_before() -> None:
    """It was submitted while that one ran."""
    record = TryRecord(
        id="2", site="sim", bucket=0, job="j", rule="r", name="r", fingerprint="f",
        state=TryState.SUBMITTED, segment=1, segments=3, follows="1",
    )  # fmt: skip
    now = time.time()
    attempt = Attempt(record, [], now - 1000.0, 1, now - 1000.0, turn=now - 100.0)
    times = attempt.times(Marker(0, started=now - 60.0, ended=now - 10.0))
    assert (round(times.behind or 0), round(times.waited or 0), times.ran) == (900, 40, 50.0)
