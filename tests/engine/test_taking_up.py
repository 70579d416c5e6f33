"""A job that an earlier run left at a simulated site: taken up, told of, or made again."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, OutputFile
from snakemake_executor_plugin_mantik.journal import Journal, TryState, read_history
from tests.support.controller import (
    Controller,
    Killed,
    killed_when,
    request,
    run_one,
    simulate,
    states,
)
from tests.support.simulated import Fate, World

LARGE = 3_000_000
"""Bytes that fit into no script."""
DEATHS: dict[TryState, Callable[[Controller], bool]] = {
    TryState.PLANNED: lambda c: bool(c.journal.all_open_tries()),
    TryState.SUBMITTING: lambda c: bool(c.world.jobs),
    TryState.SUBMITTED: lambda c: bool(c.world.runs),
    TryState.ENDED: lambda c: any(r.state is TryState.ENDED for r in c.journal.all_open_tries()),
}


@pytest.mark.parametrize("state", [*DEATHS])
def test_taken_up_in_every_state(tmp_path: Path, state: TryState) -> None:
    world = World()
    if state is TryState.ENDED:
        # The first call of the site after its end is that of another job.
        other = asyncio.Event()

        async def play(controller: Controller) -> None:
            await controller.work.run(request(1))
            other.set()

        simulate(tmp_path, world, play)
        (tmp_path / "out/1").unlink()
    else:
        killed_when(tmp_path, world, DEATHS[state]).forget()
    assert states(tmp_path) == [state]

    assert run_one(tmp_path, world).succeeded

    assert [r.how for r in world.runs] == ["exit 0"]
    assert states(tmp_path) == [TryState.DONE]
    assert (tmp_path / "out/1").exists()


Play = Callable[[Controller], Coroutine[Any, Any, Outcome]]


def left_running(workdir: Path, world: World, play: Play) -> None:
    """Run a job until it runs at the site, then die."""

    async def opened() -> Outcome:
        await controller.open()
        return await play(controller)

    controller = Controller(world, workdir)
    controller.site.called = lambda: controller.kill() if world.runs else None
    with pytest.raises(Killed):
        controller.run(opened())
    controller.bury()
    controller.forget()


UPDATES = replace(request(1), outputs=(OutputFile("out/1", keep=True),))


def test_what_was_updated_is_not_updated_again(tmp_path: Path) -> None:
    """Killed when the new content was here, and before Snakemake could take it."""
    world = World()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/1").write_text("before")
    simulate(tmp_path, world, lambda controller: controller.work.run(UPDATES))
    assert (tmp_path / "out/1").read_text() != "before"

    assert simulate(tmp_path, world, lambda controller: controller.job(UPDATES)).succeeded

    assert len(world.runs) == 1
    assert states(tmp_path) == [TryState.DONE]


@pytest.mark.parametrize("changed", ["by somebody", None])
def test_what_somebody_else_has_changed_is_updated_anew(
    tmp_path: Path, changed: str | None
) -> None:
    world = World()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/1").write_text("before")
    simulate(tmp_path, world, lambda controller: controller.work.run(UPDATES))
    (tmp_path / "out/1").unlink()
    if changed is not None:
        (tmp_path / "out/1").write_text(changed)

    assert simulate(tmp_path, world, lambda controller: controller.job(UPDATES)).succeeded

    assert len(world.runs) == 2


def test_where_an_update_began_tells_one_try_from_another(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/1").write_text("before")

    left_running(tmp_path, world, lambda controller: controller.job(UPDATES))
    (tmp_path / "out/1").write_text("by somebody")

    assert simulate(tmp_path, world, lambda controller: controller.job(UPDATES)).succeeded

    assert [r.how for r in world.runs] == ["exit 143", "exit 0"]


def with_sources(sources: dict[str, str], **values: Any) -> Play:
    """A run of one job in a working directory with these sources."""

    async def play(controller: Controller) -> Outcome:
        controller.place.sources = sources
        return await controller.job(replace(request(1, "data/x"), **values))

    return play


BEFORE = {"scripts/train.py": "a", "lib.py": "b", "README": "c"}
COMMAND = "python scripts/train.py"


@pytest.mark.parametrize(
    ("values", "sources", "told"),
    [
        ({"command": f"{COMMAND} --fast"}, {}, "its command"),
        ({"parameters": "alpha=2"}, {}, "its parameters"),
        ({"variables": {"A": "2"}}, {}, "its environment variables"),
        ({"outputs": (OutputFile("out/1"), OutputFile("out/2"))}, {}, "what it makes"),
        ({}, {"scripts/train.py": "new"}, "scripts/train.py"),
        ({}, {"data/x": "another content"}, "data/x"),
    ],
)
def test_what_changed_is_told_and_nothing_old_is_used(
    tmp_path: Path, values: dict[str, Any], sources: dict[str, str], told: str
) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")
    left_running(tmp_path, world, with_sources(BEFORE, command=COMMAND))
    (tmp_path / "data/x").write_text(sources.pop("data/x", "1"))

    async def play(controller: Controller) -> list[str]:
        again = with_sources(BEFORE | sources, **{"command": COMMAND, **values})
        assert (await again(controller)).succeeded
        return controller.said

    said = simulate(tmp_path, world, play)

    [line] = [line for line in said if "earlier run" in line]
    assert f"its outputs are not used, since these changed: {told}." in line
    assert [r.how for r in world.runs] == ["exit 143", "exit 0"]


def test_other_resources_and_unnamed_sources_are_told(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")
    left_running(tmp_path, world, with_sources(BEFORE, resources={"mem_mb": 1000}))
    (sent,) = read_history(tmp_path / ".snakemake/mantik")

    async def play(controller: Controller) -> list[str]:
        play = with_sources(BEFORE | {"lib.py": "new"}, resources={"mem_mb": 2000, "runtime": 5})
        assert (await play(controller)).succeeded
        return controller.said

    said = "\n".join(simulate(tmp_path, world, play))

    assert "memory per node in MiB" in said
    assert "walltime in s none instead of 300" in said
    assert f"smk-mantik cancel {sent.id}" in said
    assert "files of the working directory changed since" in said
    assert [r.how for r in world.runs] == ["exit 0"], "it was taken up"


def test_unchanged_job_is_taken_up_without_a_word(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")
    left_running(tmp_path, world, with_sources(BEFORE, command=COMMAND))

    async def play(controller: Controller) -> list[str]:
        assert (await with_sources(dict(BEFORE), command=COMMAND)(controller)).succeeded
        return controller.said

    assert simulate(tmp_path, world, play) == []
    assert [r.how for r in world.runs] == ["exit 0"]


@pytest.mark.parametrize("other", ["2", "1"])
def test_input_that_changes_while_the_job_runs_is_told(tmp_path: Path, other: str) -> None:
    world = World()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")

    async def play(controller: Controller) -> list[str]:
        job = asyncio.create_task(controller.job(request(1, "data/x")))
        while not world.runs:
            await asyncio.sleep(1)
        (tmp_path / "data/x").write_text(other)
        os.utime(tmp_path / "data/x", (1, 1))
        assert (await job).succeeded
        return controller.said

    said = simulate(tmp_path, world, play)

    assert ["data/x changed while the job ran" in line for line in said] == [True] * (other != "1")


def test_left_behind_and_come_back_to(tmp_path: Path) -> None:
    """Its site was not among those of a run in between, or had another workspace in it."""
    world = World(duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    with closing(Journal(tmp_path / ".snakemake/mantik")) as journal:
        open_tries = journal.all_open_tries()
        assert len(journal.set_site("sim", "url", "/another", "else")) == 1
        journal.set_site("sim", "url", "/ws", open_tries[0].place)

    assert run_one(tmp_path, world).succeeded

    first, second = world.runs
    assert [r.how for r in world.runs] == ["exit 143", "exit 0"]
    assert (first.ended or 0.0) <= second.begun, "the two never ran at the same time"
    assert not any(record.may_run for record in read_history(tmp_path / ".snakemake/mantik"))


def test_leftover_of_a_claim_is_no_end(tmp_path: Path) -> None:
    """A start that was killed between making and removing its own file beside the claim."""
    world = World(duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    (record,) = read_history(tmp_path / ".snakemake/mantik")
    world.write(f"{record.paths.claim}.by-node-17", b"owner=x\n")

    assert run_one(tmp_path, world, command="another").succeeded

    first, second = world.runs
    assert first.ended is not None
    assert first.ended <= second.begun


def test_failed_try_of_a_killed_run_is_not_waited_for(tmp_path: Path) -> None:
    """Its end was written down, then the controller died; the site knows nothing of it now."""
    world = World(lambda spec: fates.pop(0))
    fates = [Fate(killed_after=5.0), Fate()]

    async def play(controller: Controller) -> None:
        assert not (await controller.work.run(request(1))).succeeded

    simulate(tmp_path, world, play)
    for job_id in list(world.jobs):
        world.forget(job_id)
    begun = world.now

    assert run_one(tmp_path, world).succeeded
    assert world.now < begun + 200


def test_results_that_are_gone_are_made_again(tmp_path: Path) -> None:
    world = World()

    async def play(controller: Controller) -> None:
        assert (await controller.work.run(request(1))).succeeded

    simulate(tmp_path, world, play)
    assert states(tmp_path) == [TryState.ENDED]
    world.purge()

    assert run_one(tmp_path, world).succeeded
    assert [r.how for r in world.runs] == ["exit 0", "exit 0"]


def test_revoked_but_not_written_down(tmp_path: Path) -> None:
    """A second Ctrl-C in the middle of the first: nobody wants the revoked try any more."""
    world = World(lambda spec: Fate(starts=(5000.0,)))
    killed_when(tmp_path, world, lambda c: c.site.calls["list"] > 3).forget()
    (record,) = read_history(tmp_path / ".snakemake/mantik")
    world.make_directory(record.paths.claim)

    assert run_one(tmp_path, world).succeeded
    assert len(world.runs) == 1


def test_uploads_that_an_earlier_run_lost_cost_one_more_try(tmp_path: Path) -> None:
    """What the script of a try that is taken up names is not known: all that is on its way goes."""
    (tmp_path / "large").write_bytes(os.urandom(600_000))
    (tmp_path / "larger").write_bytes(os.urandom(700_000))
    world = World()

    def job(controller: Controller) -> Coroutine[Any, Any, Outcome]:
        return controller.job(request(1, "large", "larger"))

    async def play() -> Outcome:
        await controller.open()
        controller.site.fault = lambda method, _: "damaged" if method == "put" else ""
        return await job(controller)

    controller = Controller(world, tmp_path)
    controller.site.called = lambda: controller.kill() if controller.world.jobs else None
    with pytest.raises(Killed):
        controller.run(play())
    controller.bury()
    controller.forget()

    assert simulate(tmp_path, world, job).succeeded
    assert len(read_history(tmp_path / ".snakemake/mantik")) == 2


STAYS = replace(request(1), outputs=(OutputFile("out/1", stored=True),))


@pytest.mark.parametrize("how", ["removed", "changed", "left alone"])
def test_what_was_to_stay_is_made_again_if_it_is_lost(tmp_path: Path, how: str) -> None:
    """Its job ended long before anybody looked."""
    world = World()
    killed_when(tmp_path, world, lambda c: bool(c.world.runs), STAYS).forget()
    world.advance(world.now + 5000.0)
    if how == "removed":
        world.remove("out/1")
    elif how == "changed":
        world.write("out/1", b"another")

    outcome = simulate(tmp_path, world, lambda controller: controller.job(STAYS))

    assert outcome.succeeded
    assert len(world.runs) == (1 if how == "left alone" else 2)
    assert world.files["out/1"] == world.runs[-1].made["out/1"]


def test_an_earlier_submission_that_lacks_its_bundle_is_no_failure(tmp_path: Path) -> None:
    """It starts late, when an edit of what another job needs has had the bundle replaced."""

    def fate(spec: JobSpec) -> Fate:
        starts = 1.0 if spec.name == "job-1" and len(world.jobs) >= len(jobs) else 400.0
        return Fate(starts=(starts,), denied=spec.name == "job-2")

    world = World(fate, duration=lambda spec: 1.0)
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large").write_bytes(os.urandom(LARGE))
    jobs = (request(1, "small", "large"), request(2, "small"))

    async def play(controller: Controller) -> list[Outcome]:
        return await asyncio.gather(*map(controller.job, jobs))

    async def opened() -> None:
        await controller.open()
        await play(controller)

    controller = Controller(world, tmp_path)
    controller.site.called = lambda: controller.kill() if len(world.jobs) == len(jobs) else None
    with pytest.raises(Killed):
        controller.run(opened())
    controller.bury()
    controller.forget()
    (tmp_path / "large").write_bytes(os.urandom(LARGE))

    outcomes = simulate(tmp_path, world, play)

    assert [outcome.message for outcome in outcomes if not outcome.succeeded] == []
