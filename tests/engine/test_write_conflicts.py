"""A job of an earlier run must not put an old file in the place of a new one, however late."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.engine.site_runner import SiteRunner
from snakemake_executor_plugin_mantik.journal import AttemptState
from snakemake_executor_plugin_mantik.staging.local import LocalFile
from tests.support.controller import Controller, killed_when, request, simulate, states
from tests.support.simulated import Fate, World, result

LATE_S = 1000.0
OLD, NEW = b"old!", b"new!"
"""Of the same size: a job that checks its inputs does not see which it is."""


def write(workdir: Path, content: bytes) -> None:
    (workdir / "data").mkdir(exist_ok=True)
    (workdir / "data/x").write_bytes(content)


def late(**starts: float) -> Callable[..., Fate]:
    """A queue in which jobs wait as long as is said, others hardly."""
    return lambda spec: Fate(starts=(starts.get(spec.name.replace("-", "_"), 1.0),))


def left_waiting(workdir: Path, world: World, job: JobRequest) -> None:
    def sent(controller: Controller) -> bool:
        open_attempts = controller.journal.all_open_attempts()
        return any(record.state is AttemptState.SUBMITTED for record in open_attempts)

    killed_when(workdir, world, sent, job).forget()
    assert states(workdir)[-1] is AttemptState.SUBMITTED


def contents(world: World) -> dict[str, bytes]:
    """What each job found when it ran, by its name."""
    return {run.job: run.found for run in world.runs}


def found(job: JobRequest, **inputs: bytes) -> bytes:
    return result(job.command, "", {path.replace("_", "/"): c for path, c in inputs.items()})


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(("old", "new"), [("out/1", "out/1"), ("out", "out/1"), ("out/1", "out")])
def test_two_rules_do_not_make_the_same_file_at_once(
    tmp_path: Path, old: str, new: str, runs: bool
) -> None:
    """A rule got another name: the job of the old one is another job to Snakemake."""
    world = World(late(job_1=LATE_S), duration=lambda spec: 2 * LATE_S)
    left_waiting(tmp_path, world, request(1, outputs=[old]))
    if runs:
        world.advance(world.now + 1.5 * LATE_S)

    async def play(controller: Controller) -> list[str]:
        await controller.work.run(request(2, outputs=[new]))
        return controller.said

    said = simulate(tmp_path, world, play)

    first, second = world.runs if runs else [None, *world.runs]
    assert second is not None
    assert (second.job, second.how) == ("job-2", "exit 0")
    if first is not None:
        assert first.how == "exit 143"
        assert first.ended is not None
        assert first.ended <= second.begun
    assert said == [
        "job-1: the job that an earlier run submitted to sim is ended and its outputs are not used,"
        f" since another job of this run uses {new}."
    ]


@pytest.mark.parametrize("ended", [True, False])
def test_what_has_made_a_remote_output_is_not_given_up_for_a_job_that_reads_it(
    tmp_path: Path, ended: bool
) -> None:
    """An older journal knows it as open; one that runs would replace the output."""
    world = World()
    left_waiting(tmp_path, world, request(1))
    world.advance(world.now + (2 * LATE_S if ended else 3.0))

    async def play(controller: Controller) -> list[str]:
        at = controller.place
        made = LocalFile("out/1", tmp_path / "out/1", 1, sha256="0" * 64, stored=at.id)
        return await at.in_use.make_way([made], [])

    assert bool(simulate(tmp_path, world, play)) is not ended
    assert simulate(tmp_path, world, lambda controller: controller.job(request(1))).succeeded
    assert len(world.runs) == (1 if ended else 2)


@pytest.mark.parametrize("taken_up", [False, True])
def test_jobs_of_one_run_do_not_end_each_other(tmp_path: Path, taken_up: bool) -> None:
    """The user changes a file while a job that was sent with it waits, and both are wanted."""
    world = World(late(job_1=LATE_S, job_3=2 * LATE_S))
    write(tmp_path, OLD)
    if taken_up:
        left_waiting(tmp_path, world, request(1, "data/x"))

    async def play(controller: Controller) -> None:
        first = asyncio.ensure_future(controller.job(request(1, "data/x")))
        await asyncio.sleep(60)
        write(tmp_path, NEW)
        assert (await controller.job(request(2, "data/x"))).succeeded
        last = asyncio.ensure_future(controller.job(request(3, "data/x")))
        assert (await first).succeeded
        assert world.files["data/x"] == NEW, "what came late has left it"
        assert (await last).succeeded
        assert (await controller.job(request(4, "data/x"))).succeeded
        assert [line for line in controller.said if "submitted again" in line] == [
            "job-1: its inputs changed while it waited or ran (data/x), or the site has lost them;"
            " it is submitted again with their present contents."
        ]

    simulate(tmp_path, world, play)

    assert contents(world) == {f"job-{n}": found(request(n), data_x=NEW) for n in (1, 2, 3, 4)}, (
        "all with what is there, and that one by a second attempt"
    )
    assert len(world.runs) == 4


def test_many_rivals_are_ended_once(tmp_path: Path) -> None:
    """However many jobs find them in their way."""
    numbers = range(30)
    world = World(late(**{f"job_{n}": LATE_S for n in numbers}))
    write(tmp_path, OLD)

    async def leave(controller: Controller) -> None:
        jobs = [asyncio.ensure_future(_run(controller.work, n)) for n in numbers]
        await asyncio.sleep(60)
        for job in jobs:
            job.cancel()

    async def come_back(controller: Controller) -> int:
        jobs = [controller.job(request(100 + n, "data/x")) for n in numbers]
        assert all(o.succeeded for o in await asyncio.gather(*jobs))
        assert len(controller.said) == len(numbers)
        return controller.site.calls["cancel"]

    simulate(tmp_path, world, leave)
    assert states(tmp_path) == [AttemptState.SUBMITTED] * 30
    write(tmp_path, NEW)
    assert simulate(tmp_path, world, come_back) == len(numbers)
    assert {run.job for run in world.runs} == {f"job-{100 + n}" for n in numbers}


async def _run(work: SiteRunner, number: int) -> None:
    await work.run(request(number, "data/x"))
