"""The life of a job at a simulated site: purges, refusals, full disks and queues."""

import asyncio
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import MantikError, SiteRejected
from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import TryState, read_history
from snakemake_executor_plugin_mantik.staging import bundle
from snakemake_executor_plugin_mantik.staging.local import LocalFile
from tests.support.controller import (
    Controller,
    killed_when,
    request,
    run_one,
    simulate,
    states,
)
from tests.support.simulated import Fate, Fault, World, result

DAY_S = 86400.0


def test_workspace_purged_while_jobs_wait(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x" * 10)
    world = World(lambda spec: Fate(starts=(1000.0,)))

    async def play(controller: Controller) -> Outcome:
        world.after(500, world.purge)
        outcome = await controller.job(request(1, "data"))
        assert any("lost files" in line for line in controller.said)
        return outcome

    assert simulate(tmp_path, world, play).succeeded
    assert [r.how for r in world.runs] == ["exit 0"]


def test_each_reason_why_a_job_cannot_start_is_told_once(tmp_path: Path) -> None:
    """Some come and go with each round of the scheduler; an explanation comes with them."""
    world = World(lambda spec: Fate(starts=(5000.0,)))

    async def play(controller: Controller) -> Outcome:
        for at, reason in enumerate(["ReqNodeNotAvail", "", "ReqNodeNotAvail", "PartitionDown"]):

            def change(reason: str = reason) -> None:
                [job] = world.jobs.values()
                job.fate = replace(job.fate, waits=(reason, False))

            world.after(300 + 1000 * at, change)
        return await controller.job(request(1))

    said: list[str] = []

    async def heard(controller: Controller) -> None:
        assert (await play(controller)).succeeded
        said.extend(line for line in controller.said if "cannot start" in line)

    simulate(tmp_path, world, heard)
    assert [re.sub(r".*cannot start: (\w+) \(.*", r"\1", line) for line in said] == [
        "ReqNodeNotAvail",
        "PartitionDown",
    ]
    assert "nodes that it needs are down, or reserved" in said[0]


def test_purged_again_and_again_is_told(tmp_path: Path) -> None:
    world = World(lambda spec: Fate(starts=(1000.0,)))

    def purge() -> None:
        world.purge()
        world.after(700, purge)

    world.after(500, purge)
    with pytest.raises(Exception, match="keep disappearing"):
        run_one(tmp_path, world)


@pytest.mark.parametrize("first", [None, Fate((), denied=True), Fate((DAY_S,), denied=True)])
def test_input_that_is_edited_while_it_is_being_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Fate | None
) -> None:
    """Between the look at it and the end of its packing.

    The first time, or after a submission that the site denies: it may come late all the same, and
    must not run any more then.
    """
    (tmp_path / "data").write_text("old!")
    fates = [first] if first is not None else []
    world = World(lambda spec: fates.pop() if fates else Fate())
    packed, edited = bundle.pack, 1 + len(fates)
    calls = itertools.count(1)

    def pack(files: Sequence[LocalFile]) -> bytes:
        if next(calls) == edited:
            (tmp_path / "new").write_text("new!")
            (tmp_path / "new").replace(tmp_path / "data")
        return packed(files)

    monkeypatch.setattr("snakemake_executor_plugin_mantik.engine.stage.pack", pack)
    job = request(1, "data")

    assert run_one(tmp_path, world, inputs=job.inputs).succeeded
    world.advance(world.now + 2 * DAY_S)

    [run] = world.runs
    assert run.found == result(job.command, "", {"data": b"new!"})
    assert [s for s in states(tmp_path) if s is not TryState.ABANDONED] == [TryState.DONE]


@pytest.mark.parametrize("seconds", [0.5, 60.0, 1500.0, 2500.0])
def test_input_that_is_edited_while_a_job_waits_or_runs(tmp_path: Path, seconds: float) -> None:
    """And goes up with another job: whatever the moment, each has computed with what it says."""
    (tmp_path / "data").write_text("old!")
    world = World(
        lambda spec: Fate(starts=(1000.0 if spec.name == "job-1" else 1.0,)),
        duration=lambda spec: 1000.0 if spec.name == "job-1" else 1.0,
    )

    async def play(controller: Controller) -> None:
        first = asyncio.ensure_future(controller.job(request(1, "data")))
        await asyncio.sleep(seconds)
        (tmp_path / "data").write_text("new!")
        assert (await controller.job(request(2, "data"))).succeeded
        assert (await first).succeeded

    simulate(tmp_path, world, play)

    content = b"old!" if seconds > 2000.0 else b"new!"
    last = {run.job: run for run in world.runs if run.how == "exit 0"}
    assert last["job-1"].found == result("make 1", "", {"data": content})
    assert last["job-2"].found == result("make 2", "", {"data": b"new!"})
    assert (tmp_path / "out/1").read_bytes() == result("make 1", "out/1", {"data": content})


def test_half_of_a_result_that_was_lost_meanwhile_does_not_stay(tmp_path: Path) -> None:
    """The run that fetched it was killed, then the site lost it: another try makes it."""
    world = World(place=lambda path: "alone")
    controller = killed_when(tmp_path, world, lambda c: any((tmp_path / "out").glob(".*-part")))
    world.purge()
    assert run_one(tmp_path, world).succeeded
    assert not list(tmp_path.rglob("*.mantik-part"))
    assert len(world.runs) == 2
    controller.forget()


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


def test_refused_submission_fails_at_once(tmp_path: Path) -> None:
    async def play(controller: Controller) -> None:
        controller.site.fault = lambda method, about: "rejected" if method == "submit" else ""
        await controller.job(request(1))

    with pytest.raises(SiteRejected):
        simulate(tmp_path, World(), play)
    assert states(tmp_path) == [TryState.ABANDONED]


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
def test_submission_waits_and_says_why(tmp_path: Path, fault: Fault) -> None:
    async def play(controller: Controller) -> Outcome:
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
        return outcome

    assert simulate(tmp_path, World(), play).succeeded


def test_marker_that_stays_damaged_fails_the_try_and_not_the_next_one(tmp_path: Path) -> None:
    world = World()

    async def play(controller: Controller) -> None:
        def damage() -> None:
            for path in [p for p in world.files if p.endswith(".0") and "tries" in p]:
                world.files[path] = b"damaged"

        controller.site.called = damage
        first = await controller.job(request(1))
        assert not first.succeeded
        assert "exit code 0" in first.message
        controller.site.called = None
        assert (await controller.job(request(1))).succeeded

    simulate(tmp_path, world, play)


def test_marker_of_a_failed_job_is_asked_for_as_long_as_outputs_are(tmp_path: Path) -> None:
    """It may say that the inputs had changed, which is no failure of the job's."""
    world = World(code=lambda spec: 3)

    async def play(controller: Controller) -> Outcome:
        def fault(method: str, about: str) -> Fault:
            return "rejected" if method == "get" and ".3" in about and world.now < 300 else ""

        controller.site.fault = fault
        return await controller.job(request(1))

    outcome = simulate(tmp_path, world, play)
    assert outcome.reason is Reason.EXIT_CODE
    assert world.now >= 300


def test_failed_job_stays_failed_whatever_becomes_of_its_log(tmp_path: Path) -> None:
    world = World(code=lambda spec: 3)

    async def play(controller: Controller) -> Outcome:
        controller.site.fault = lambda m, about: "rejected" if about.endswith("/log") else ""
        return await controller.job(request(1))

    outcome = simulate(tmp_path, world, play)

    assert "exit code 3" in outcome.message


def test_full_queue_is_waited_for(tmp_path: Path) -> None:
    """UNICORE takes every job; the scheduler behind it refuses what is one too many."""
    world = World(lambda spec: Fate(refused=world.now < 5000, full=True))

    async def play(controller: Controller) -> Outcome:
        outcome = await controller.job(request(1))
        told = [line for line in controller.said if "no more jobs just now" in line]
        assert len(told) == 1, "once"
        assert "AssocMaxSubmitJobLimit" in told[0]
        assert controller.site.calls["submit"] < 20, "ever more seldom"
        return outcome

    assert simulate(tmp_path, world, play).succeeded
    assert len(world.runs) == 1
    assert [record.state for record in read_history(tmp_path / ".snakemake/mantik")][
        -1
    ] is TryState.DONE


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
