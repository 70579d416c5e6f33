"""A job at a simulated site that nobody wants any more: it ends, or never runs."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.engine.cancel import ENDED_AT_ONCE
from snakemake_executor_plugin_mantik.engine.evidence import LOOK
from snakemake_executor_plugin_mantik.jobs.paths import parse_marker_name
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState
from snakemake_executor_plugin_mantik.sites.base import Entry
from tests.support.controller import Controller, killed_when, request, run_one, simulate
from tests.support.simulated import Fate, Fault, World


def test_given_up_though_the_site_only_says_that_it_has_ended_it(tmp_path: Path) -> None:
    """A UNICORE server that runs jobs itself says so at once, and lets them run."""
    world = World(lambda spec: Fate(deaf=True), duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    asked = []

    async def play(controller: Controller) -> list[str]:
        assert (await controller.job(replace(request(1), command="another"))).succeeded
        asked.append(controller.site.calls["cancel"])
        return controller.said

    said = "\n".join(simulate(tmp_path, world, play))
    first, second = world.runs
    assert first.how == "exit 0"
    assert first.ended is not None
    assert first.ended <= second.begun
    assert "reports that the job id-1000 has ended, but it still runs; cancelling it again" in said
    assert asked[0] > 2, "and it was"


def test_given_up_when_the_site_says_so_and_it_is_silent(tmp_path: Path) -> None:
    """Its node was killed with it: nobody waits for a marker, nor as long as for a lost job."""
    fates = [Fate(killed_after=30.0), Fate()]
    world = World(lambda spec: fates.pop(0), duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    world.advance(world.now + 60.0)
    begun = world.now

    assert run_one(tmp_path, world, command="another").succeeded
    assert world.runs[1].begun - begun < 200.0


async def test_a_marker_that_is_seen_only_after_a_write_counts_when_a_job_is_cancelled(
    controller: Controller, world: World
) -> None:
    """An NFS client shows an old directory until it has written to it: the job had succeeded."""
    world.duration = lambda spec: 10.0
    job = asyncio.ensure_future(controller.job(request(1)))
    while not controller.world.runs:
        await asyncio.sleep(1.0)
    job.cancel()
    shown, [record] = controller.site.list, controller.journal.all_open_attempts()

    async def old(path: str) -> dict[str, Entry]:
        entries = await shown(path)
        written = f"{record.paths.attempts}/{LOOK}" in controller.world.files
        return {n: e for n, e in entries.items() if written or parse_marker_name(n) is None}

    controller.site.list = old  # type: ignore[method-assign]
    await asyncio.sleep(30.0)
    assert await controller.work.canceller.cancel([record]) == []
    [record] = controller.journal.attempts([record.id])
    assert (record.outcome, record.state) == ("", AttemptState.SUBMITTED), "the next run fetches it"


def secrets_at(world: World) -> list[str]:
    return [path for path, content in world.files.items() if content and b"VALUE-987" in content]


SECRET = replace(request(1), secrets={"MYSECRET": "VALUE-987"})


async def test_secrets_lie_in_a_closed_directory_that_is_made_once(
    controller: Controller, world: World
) -> None:
    jobs = [replace(request(n), secrets=SECRET.secrets) for n in range(3)]
    made = []
    for some in (jobs[:1], jobs[1:]):
        before = controller.site.calls["make_directory"]
        outcomes = await asyncio.gather(*map(controller.job, some))
        assert all(outcome.succeeded for outcome in outcomes)
        made.append(controller.site.calls["make_directory"] - before)
    assert made == [2, 0]  # beside the one for the claims
    assert world.exposed == []


def test_secrets_of_a_cancelled_job_are_removed(tmp_path: Path) -> None:
    """It waits in the queue; the process that submitted it has gone."""
    world = World(lambda spec: Fate(starts=(5000.0,)))
    killed_when(tmp_path, world, lambda c: c.site.calls["list"] > 9, SECRET).forget()
    assert secrets_at(world)

    async def play(controller: Controller) -> list[str]:
        await controller.work.canceller.cancel(controller.journal.all_open_attempts())
        return secrets_at(world)

    assert simulate(tmp_path, world, play) == []


@pytest.mark.parametrize("method", ["submit", "put"])
def test_secrets_of_a_submission_that_was_never_answered_are_removed(
    tmp_path: Path, method: str
) -> None:
    """The process died when the values had gone up: at the site nobody heard of the job."""
    world = World(lambda spec: Fate(starts=(), denied=True))
    killed_when(
        tmp_path, world, lambda c: c.site.calls[method] > 2 * (method == "put"), SECRET
    ).forget()  # the place's lease and the library are put before
    world.advance(world.now + 100.0)
    assert secrets_at(world)

    async def play(controller: Controller) -> list[str]:
        await controller.work.canceller.give_up(controller.journal.all_open_attempts())
        return secrets_at(world)

    assert simulate(tmp_path, world, play) == []


async def test_secrets_of_a_rejected_submission_are_removed(
    controller: Controller, world: World
) -> None:
    controller.site.fault = lambda method, about: "rejected" if method == "submit" else ""
    with pytest.raises(SiteRejected):
        await controller.job(SECRET)
    assert secrets_at(world) == []


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.OUT_OF_MEMORY])
async def test_secrets_of_a_job_that_left_no_marker_are_removed(
    controller: Controller, world: World, reason: Reason
) -> None:
    world.fate = lambda spec: Fate(killed_after=0.0, reason=reason, warned=False)
    assert not (await controller.job(SECRET)).succeeded
    assert secrets_at(world) == []


def test_secrets_that_the_site_does_not_remove_now_are_removed_later(tmp_path: Path) -> None:
    world = World(lambda spec: Fate(starts=(5000.0,)))
    killed_when(tmp_path, world, lambda c: c.site.calls["list"] > 9, SECRET).forget()

    async def play(controller: Controller) -> list[str]:
        controller.site.fault = lambda method, about: "unreachable" if method == "remove" else ""
        await controller.work.canceller.cancel(controller.journal.all_open_attempts())
        assert secrets_at(world)
        controller.site.fault = lambda method, about: "" if "secrets" in about else "unreachable"
        await controller.work.canceller.settle()
        return secrets_at(world)

    assert simulate(tmp_path, world, play) == []


def sent_and_unsent(controller: Controller, sent: int, unsent: int) -> list[AttemptRecord]:
    """Attempts as a run leaves them that was interrupted while it submitted."""
    journal = controller.journal
    for number in range(sent + unsent):
        record = journal.new_attempt(
            site="sim", job=f"j{number}", rule="r", name="n", fingerprint="f"
        )
        if number < sent:
            journal.submitting(record.id, "batch")
            journal.submitted(record.id, f"id-{number}")
    return journal.all_open_attempts()


async def test_many_are_cancelled_with_two_requests_each(controller: Controller) -> None:
    """Those that wait in the queue; of those that were never sent the site is told nothing."""
    records = sent_and_unsent(controller, 600, 700)
    before = controller.site.calls.copy()
    left = await controller.work.canceller.cancel(records)
    calls = controller.site.calls - before
    assert left == []
    assert (calls["make_directory"], calls["cancel"]) == (600, 600)
    assert calls["list"] <= 3, "one for each bucket"
    assert calls.total() <= 2 * 600 + 3


async def test_what_was_never_sent_is_over_though_the_site_does_not_answer(
    controller: Controller,
) -> None:
    records = sent_and_unsent(controller, 3, 50)
    controller.site.fault = lambda method, about: "unreachable"
    left = await controller.work.canceller.cancel(records)
    assert {r.id for r in left} == {r.id for r in records if r.site_jobs}
    assert len(left) == 3


async def test_when_the_time_is_over_as_many_as_possible_are_known_to_have_ended(
    controller: Controller,
) -> None:
    """The site takes 600 requests and then no more: about 300 jobs are over, not none."""
    records = sent_and_unsent(controller, 500, 0)
    left = 600

    def fault(method: str, about: str) -> Fault:
        nonlocal left
        left -= 1
        return "" if left > 0 else "unreachable"

    controller.site.fault = fault
    assert len(await controller.work.canceller.cancel(records)) <= 500 - 300 + ENDED_AT_ONCE


async def test_the_time_to_cancel_grows_with_the_number(controller: Controller) -> None:
    """A site that takes a second for each: more are cancelled than in the time for one."""
    records = sent_and_unsent(controller, 500, 0)
    lock = asyncio.Lock()
    make = controller.site.make_directory

    async def slow(path: str, *, private: bool = False) -> None:
        async with lock:
            await asyncio.sleep(0.5)
        await make(path, private=private)

    controller.site.make_directory = slow  # type: ignore[method-assign]
    assert await controller.work.canceller.cancel(records) == []


async def test_jobs_that_run_are_looked_for_together(controller: Controller, world: World) -> None:
    """One listing a second and bucket, however many are waited for."""
    world.duration = lambda spec: 1000.0
    jobs = [asyncio.ensure_future(controller.job(request(n))) for n in range(40)]
    while len(controller.world.runs) < 40:
        await asyncio.sleep(1.0)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    records = controller.journal.all_open_attempts()
    loop, before = asyncio.get_running_loop(), controller.site.calls["list"]
    begun = loop.time()
    assert await controller.work.canceller.cancel(records) == []
    took, listed = loop.time() - begun, controller.site.calls["list"] - before
    assert listed <= took + 3
