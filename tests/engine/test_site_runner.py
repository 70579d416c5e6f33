"""The life of a job at a simulated site: purges, refusals, full disks and queues."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import MantikError, SiteRejected
from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import AttemptState, read_history
from tests.support.controller import Controller, request, run_one, simulate, states
from tests.support.simulated import Fate, Fault, World


async def test_each_reason_why_a_job_cannot_start_is_told_once(
    controller: Controller, world: World
) -> None:
    """Some come and go with each round of the scheduler; an explanation comes with them."""
    world.fate = lambda spec: Fate(starts=(5000.0,))
    for at, reason in enumerate(["ReqNodeNotAvail", "", "ReqNodeNotAvail", "PartitionDown"]):

        def change(reason: str = reason) -> None:
            [job] = world.jobs.values()
            job.fate = replace(job.fate, waits=(reason, False))

        world.after(300 + 1000 * at, change)
    assert (await controller.job(request(1))).succeeded
    said = [line for line in controller.said if "cannot start" in line]
    found = [re.sub(r".*cannot start: (\w+) \(.*", r"\1", line) for line in said]
    assert found == ["ReqNodeNotAvail", "PartitionDown"]
    assert "nodes that it needs are down, or reserved" in said[0]


def test_purged_again_and_again_is_told(tmp_path: Path) -> None:
    world = World(lambda spec: Fate(starts=(1000.0,)))

    def purge() -> None:
        world.purge()
        world.after(700, purge)

    world.after(500, purge)
    with pytest.raises(Exception, match="keep disappearing"):
        run_one(tmp_path, world)


def test_what_an_unknown_controller_has_sent_last_is_replaced_in_the_end(tmp_path: Path) -> None:
    """A number lies there that is greater than any that the journal knows, which has no lease."""
    (tmp_path / "data").write_text("mine")
    world = World()
    world.write("data", b"theirs")
    world.write(".mantik/newer/data.n", b"29000000000000007")  # its term was the time
    assert run_one(tmp_path, world, inputs=("data",)).succeeded
    assert world.files["data"] == b"mine"


def test_command_that_replaces_its_own_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("old!")
    world = World()

    def duration(_: JobSpec) -> float:
        world.after(50.0, lambda: world.write("data", b"mine"))
        return 100.0

    world.duration = duration
    with pytest.raises(MantikError, match="whether the command changes its own inputs"):
        run_one(tmp_path, world, inputs=("data",))
    assert len(world.runs) == 3


async def test_refused_submission_fails_at_once(controller: Controller, tmp_path: Path) -> None:
    controller.site.fault = lambda method, about: "rejected" if method == "submit" else ""
    with pytest.raises(SiteRejected):
        await controller.job(request(1))
    assert states(tmp_path) == [AttemptState.ABANDONED]


@pytest.mark.parametrize("runs_after_all", [True, False])
def test_repeated_submission_is_refused(tmp_path: Path, runs_after_all: bool) -> None:
    """The first one's answer was lost; the account is out of budget when it is sent again."""
    # It starts between the last look for it and the refusal.
    world = World(lambda spec: Fate(starts=(121.0,) if runs_after_all else (), denied=True))

    async def play(controller: Controller) -> Outcome:
        def fault(method: str, about: str) -> Fault:
            if method != "submit":
                return ""
            if controller.site.calls["submit"] == 1:
                return "lost"
            world.advance(world.now + 100)
            return "rejected"

        controller.site.fault = fault
        return await controller.job(request(1))

    if runs_after_all:
        assert simulate(tmp_path, world, play).succeeded
    else:
        with pytest.raises(SiteRejected):
            simulate(tmp_path, world, play)
        (record,) = read_history(tmp_path / ".snakemake/mantik")
        assert world.files[record.paths.claim] is None, "it is revoked"
    assert len(world.runs) == int(runs_after_all)


@pytest.mark.parametrize("fault", ["busy", "unauthorized", "not found"])
async def test_submission_waits_and_says_why(
    controller: Controller, world: World, fault: Fault
) -> None:
    def trouble(method: str, about: str) -> Fault:
        return fault if method == "submit" and controller.world.now < 3000 else ""

    controller.site.fault = trouble
    # Another one runs, so that the site does answer meanwhile.
    running = asyncio.ensure_future(controller.job(request(2)))
    outcome = await controller.job(request(1))
    await running
    told = "has (failed a request|not answered|not accepted the credentials) for"
    assert any(re.search(told, line) for line in controller.said)
    assert len(controller.said) < 40, "no chatter"
    assert outcome.succeeded


async def test_marker_that_stays_damaged_fails_the_attempt_and_not_the_next_one(
    controller: Controller, world: World
) -> None:
    def damage() -> None:
        for path in [p for p in world.files if p.endswith(".0") and "attempts" in p]:
            world.files[path] = b"damaged"

    controller.site.called = damage
    first = await controller.job(request(1))
    assert not first.succeeded
    assert "exit code 0" in first.message
    controller.site.called = None
    assert (await controller.job(request(1))).succeeded


async def test_marker_of_a_failed_job_is_asked_for_as_long_as_outputs_are(
    controller: Controller, world: World
) -> None:
    """It may say that the inputs had changed, which is no failure of the job's."""
    world.code = lambda spec: 3

    def fault(method: str, about: str) -> Fault:
        return "rejected" if method == "get" and ".3" in about and world.now < 300 else ""

    controller.site.fault = fault
    outcome = await controller.job(request(1))
    assert outcome.reason is Reason.EXIT_CODE
    assert world.now >= 300


async def test_failed_job_stays_failed_whatever_becomes_of_its_log(
    controller: Controller, world: World
) -> None:
    world.code = lambda spec: 3
    controller.site.fault = lambda m, about: "rejected" if about.endswith("/log") else ""
    outcome = await controller.job(request(1))
    assert "exit code 3" in outcome.message


async def test_full_queue_is_waited_for(
    controller: Controller, world: World, tmp_path: Path
) -> None:
    """UNICORE takes every job; the scheduler behind it refuses what is one too many."""
    world.fate = lambda spec: Fate(refused=world.now < 5000, full=True)
    outcome = await controller.job(request(1))
    told = [line for line in controller.said if "no more jobs just now" in line]
    assert len(told) == 1, "once"
    assert "AssocMaxSubmitJobLimit" in told[0]
    assert controller.site.calls["submit"] < 20, "ever more seldom"
    assert outcome.succeeded
    assert len(world.runs) == 1
    assert [record.state for record in read_history(tmp_path / ".snakemake/mantik")][
        -1
    ] is AttemptState.DONE


def test_refusal_that_stays_is_told(tmp_path: Path) -> None:
    """An account out of budget: no waiting helps."""
    world = World(lambda spec: Fate(refused=True))
    outcome = simulate(tmp_path, world, lambda controller: controller.job(request(1)))
    assert not outcome.succeeded
    assert outcome.reason is Reason.REJECTED
    assert "Invalid account" in outcome.message


def test_full_local_disk_keeps_the_results_at_the_site(tmp_path: Path) -> None:
    world = World()
    (tmp_path / "out").write_text("a file where the directory of outputs should be")

    outcome = simulate(tmp_path, world, lambda controller: controller.work.run(request(1)))

    assert not outcome.succeeded
    assert "still at the site" in outcome.message
    (tmp_path / "out").unlink()
    assert run_one(tmp_path, world).succeeded
    assert len(world.runs) == 1


def test_cost_of_a_job_does_not_grow_with_their_number(tmp_path: Path) -> None:
    def requests(count: int) -> float:
        world = World(lambda spec: Fate(starts=(1.0,)), lambda spec: 10.0)

        async def play(controller: Controller) -> float:
            await asyncio.gather(*(controller.job(request(n)) for n in range(count)))
            calls = controller.site.calls
            return (sum(calls.values()) - calls["list"]) / count

        return simulate(tmp_path / str(count), world, play)

    for count in (5, 90):
        (tmp_path / str(count)).mkdir()
    assert requests(90) <= requests(5) <= 4, "submit, marker, forget"
