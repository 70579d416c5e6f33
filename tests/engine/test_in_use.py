"""Nothing is removed or replaced at a site under a job that uses it, also one of an earlier run."""

import asyncio
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.journal import Journal
from tests.support.controller import Controller, killed_when, request, simulate
from tests.support.simulated import Fate, World

LONG_S = 5000.0


def world(**seconds: float) -> World:
    """Jobs take as long as is said, others a moment."""
    return World(
        lambda spec: Fate(starts=(1.0,)),
        duration=lambda spec: seconds.get(spec.name.replace("-", "_"), 10.0),
    )


def write(workdir: Path, *paths: str) -> None:
    for path in paths:
        (workdir / path).parent.mkdir(parents=True, exist_ok=True)
        (workdir / path).write_text(path)


def left_running(workdir: Path, world: World, job: JobRequest) -> None:
    """Submit a job, see it run, and die."""
    killed_when(workdir, world, lambda _: any(r.job == job.name for r in world.runs), job).forget()


async def job_and_tidy(controller: Controller, job: JobRequest, *temporary: str) -> list[str]:
    """Run a job, remove what is temporary as Snakemake does, and end; what was said."""
    assert (await controller.job(job)).succeeded
    for path in temporary:
        shutil.rmtree(controller.workdir / path, ignore_errors=True)
    await controller.place.tidy()
    return controller.said


def test_what_a_job_of_an_earlier_run_reads_goes_after_its_end(tmp_path: Path) -> None:
    sim = world(job_1=LONG_S)
    write(tmp_path, "d/a", "d/b")
    left_running(tmp_path, sim, request(1, "d"))

    simulate(tmp_path, sim, lambda c: job_and_tidy(c, request(2, "d"), "d"))
    assert {"d/a", "d/b"} <= sim.files.keys()

    sim.advance(sim.now + LONG_S)  # nobody watches it
    simulate(tmp_path, sim, lambda c: job_and_tidy(c, request(3)))
    assert not [path for path in sim.files if path.startswith("d")]

    write(tmp_path, "d/a", "d/b")
    simulate(tmp_path, sim, lambda c: job_and_tidy(c, request(1, "d")))
    assert [r.how for r in sim.runs if r.job == "job-1"] == ["exit 0"], "and it is taken up"
    assert sim.taken == []


@pytest.mark.parametrize("remade", ["d/a", "d"])
def test_what_a_job_of_an_earlier_run_reads_is_not_made_again_under_it(
    tmp_path: Path, remade: str
) -> None:
    sim = world(job_1=LONG_S)
    write(tmp_path, "d/a", "d/b")
    left_running(tmp_path, sim, request(1, "d/a", "d/b"))

    async def play(controller: Controller) -> list[str]:
        assert (await controller.work.run(request(2, outputs=[remade]))).succeeded
        return controller.said

    said = simulate(tmp_path, sim, play)
    assert sim.taken == []
    assert said == [
        "job-1: the job that an earlier run submitted to sim is ended and its outputs are not used,"
        f" since a job of this run changes {remade}, which it uses."
    ]


def test_a_source_that_a_running_job_names_stays(tmp_path: Path) -> None:
    sim = world(job_1=LONG_S)
    write(tmp_path, "lib.py", "other.py")
    job = replace(request(1), command="python lib.py")

    async def begin(controller: Controller) -> None:
        await controller.place.send_sources(["lib.py", "other.py"])
        assert (await controller.job(request(0))).succeeded
        asyncio.ensure_future(controller.work.run(job))  # noqa: RUF006 - it is left
        while len(sim.runs) < 2:
            await asyncio.sleep(1)

    async def again(controller: Controller) -> list[str]:
        controller.place.sources.clear()
        await controller.place.send_sources(["new.py"])
        return controller.said

    simulate(tmp_path, sim, begin)
    for path in ("lib.py", "other.py"):
        (tmp_path / path).unlink()
    write(tmp_path, "new.py")
    said = simulate(tmp_path, sim, again)
    assert "lib.py" in sim.files
    assert "other.py" not in sim.files
    assert [line for line in said if "lib.py is gone here, but stays at sim" in line]
    simulate(tmp_path, sim, lambda controller: controller.job(job))
    simulate(tmp_path, sim, again)
    assert "lib.py" not in sim.files


def new_try(journal: Journal, follows: str = "", job: str = "train") -> str:
    return journal.new_try(
        site="sim", job=job, rule=job, name=job, fingerprint="", follows=follows, segments=3
    ).id


def test_a_restored_journal_knows_what_is_used(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.set_site("sim", "url", "/ws", "place")
        sent = new_try(journal)
        journal.uses.begin(sent, "place", ["d"], elsewhere=[("other", "e")])
        journal.submitting(sent, "batch")
    (tmp_path / "journal.sqlite").write_bytes(b"no database" * 1000)
    with closing(Journal(tmp_path)) as journal:
        assert journal.remark
        assert [r.id for r in journal.uses.of("place", "d/a")] == [sent]
        assert [r.id for r in journal.uses.of("other", "e")] == [sent]
        assert journal.uses.of("place", "other") == []
        journal.left_behind(sent, "/ws")
        assert journal.uses.of("place", "d"), "it may still run"
        journal.abandoned(sent, "cancelled")
        assert journal.uses.of("place", "d") == []
