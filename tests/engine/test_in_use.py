"""Nothing is removed or replaced at a site under a job that uses it, also one of an earlier run."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import PlaceTaken, SiteError, SiteRejected
from snakemake_executor_plugin_mantik.jobs.paths import ATTEMPTS, WORK
from snakemake_executor_plugin_mantik.jobs.segments import Continuation
from snakemake_executor_plugin_mantik.journal import Journal
from tests.support.controller import Controller, request, simulate
from tests.support.simulated import Fate, Fault, World
from tests.support.world import STEPS

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


def test_a_source_that_a_running_job_names_stays(tmp_path: Path) -> None:
    sim = world(job_1=LONG_S)
    write(tmp_path, "lib.py", "other.py")
    job = replace(request(1), command="python lib.py")

    async def begin(controller: Controller) -> None:
        await controller.place.stager.send_project_files(["lib.py", "other.py"])
        assert (await controller.job(request(0))).succeeded
        asyncio.ensure_future(controller.work.run(job))  # noqa: RUF006 - it is left
        while len(sim.runs) < 2:
            await asyncio.sleep(1)

    async def again(controller: Controller) -> list[str]:
        controller.place.stager.project_files.clear()
        await controller.place.stager.send_project_files(["new.py"])
        return controller.said

    simulate(tmp_path, sim, begin)
    for path in ("lib.py", "other.py"):
        (tmp_path / path).unlink()
    write(tmp_path, "new.py")
    said = simulate(tmp_path, sim, again)
    assert "lib.py" in sim.files
    assert "other.py" not in sim.files
    assert [line for line in said if "lib.py is gone on this machine, but stays at sim" in line]
    simulate(tmp_path, sim, lambda controller: controller.job(job))
    simulate(tmp_path, sim, again)
    assert "lib.py" not in sim.files


def test_what_is_removed_here_a_moment_later_is_removed_there(tmp_path: Path) -> None:
    """Snakemake removes a `temp()` output after it has committed its last reader."""
    sim = world()

    async def act(controller: Controller) -> None:
        assert (await controller.job(request(0))).succeeded
        await controller.place.in_use.follow()
        assert "out/0" in sim.files
        (tmp_path / "out/0").unlink()
        await controller.place.in_use.follow()
        assert "out/0" not in sim.files

    simulate(tmp_path, sim, act)


def test_outputs_stay_as_long_as_the_markers_that_name_them(tmp_path: Path) -> None:
    """An older copy of the journal would report the success as a failure."""
    sim = world()

    def at(folder: str) -> list[str]:
        return [path for path in sim.files if path.startswith(f"{folder}/")]

    async def act(controller: Controller) -> None:
        outcome = await controller.job(request(0))
        [record] = controller.journal.attempts([outcome.attempt_id])
        sim.write(record.paths.archive, b"outputs")

        def fault(method: str, about: str) -> Fault:
            return "unreachable" if method == "remove" and about.startswith(ATTEMPTS) else ""

        controller.site.fault = fault
        await controller.place.tidy()
        assert at(ATTEMPTS)
        assert at(WORK)
        controller.site.fault = lambda method, about: ""
        await controller.place.tidy()
        assert not at(ATTEMPTS)
        assert not at(WORK)

    simulate(tmp_path, sim, act)


def test_sources_that_a_site_has_refused_come_with_the_next_job(tmp_path: Path) -> None:
    sim = world()
    write(tmp_path, "lib.py")

    async def act(controller: Controller) -> None:
        controller.site.fault = lambda method, about: "rejected" if method == "put" else ""
        with pytest.raises(SiteRejected):
            await controller.place.stager.send_project_files(["lib.py"])
        controller.site.fault = lambda method, about: ""
        await controller.place.stager.send_project_files(["lib.py"])
        assert (await controller.job(request(0))).succeeded

    simulate(tmp_path, sim, act)
    assert "lib.py" in sim.files


def test_a_segment_is_submitted_again_whose_predecessor_the_journal_has_lost(
    tmp_path: Path,
) -> None:
    """A spare has only what was open."""
    sim, sent = world(), list[str]()

    async def act(controller: Controller) -> None:
        def lose(method: str, about: str) -> Fault:
            sent.extend([about] * (method == "submit"))
            if method == "submit" and len(sent) == 2:
                with controller.journal.write() as db:
                    db.execute("DELETE FROM attempts WHERE segment = 0")
                return "unreachable"
            return ""

        controller.site.fault = lose
        continuation = Continuation(STEPS + 2, ("ckpt",))
        job = replace(request(0), continuation=continuation, resources={"runtime": 1440})
        assert (await controller.job(job)).succeeded

    simulate(tmp_path, sim, act)
    assert len(sent) == STEPS + 1
    assert len(sim.runs) == STEPS


def test_a_job_does_not_adopt_what_another_one_is_ending(tmp_path: Path) -> None:
    """Its attempt would end, and be reported as a failure."""
    sim = world(job_1=LONG_S)
    write(tmp_path, "a")

    async def begin(controller: Controller) -> None:
        assert (await controller.job(request(0))).succeeded
        asyncio.ensure_future(controller.work.run(request(1, "a")))  # noqa: RUF006 - it is left
        while len(sim.runs) < 2:
            await asyncio.sleep(1)

    async def again(controller: Controller) -> None:
        [record] = controller.journal.all_open_attempts()
        # As if it was found by its claim: nobody knows what it reads.
        controller.journal.uses.begin(record.id, controller.place.id, ["."])
        cancelled = asyncio.Event()

        def fault(method: str, about: str) -> Fault:
            if method == "cancel":
                cancelled.set()
            return ""

        controller.site.fault = fault
        other = asyncio.ensure_future(controller.job(replace(request(0), command="make 0 anew")))
        await cancelled.wait()
        assert (await controller.job(request(1, "a"))).succeeded
        assert (await other).succeeded

    simulate(tmp_path, sim, begin)
    simulate(tmp_path, sim, again)
    assert [run.how for run in sim.runs] == ["exit 0", "exit 143", "exit 0", "exit 0"]


def test_who_is_superseded_waits_for_nothing(tmp_path: Path) -> None:
    """It may not end what another controller leads now."""

    async def act(controller: Controller) -> None:
        journal, place = controller.journal, controller.place
        user, maker = journal.attempts(
            [new_attempt(journal, job="reads"), new_attempt(journal, job="makes")]
        )
        journal.submitting(user.id, "batch")
        journal.uses.begin(user.id, place.id, ["out"])
        place.in_use.mine.add(user.id)
        waiting = asyncio.ensure_future(place.in_use.free(maker, ["out"]))
        await asyncio.sleep(LONG_S)
        assert not waiting.done()
        place.lead.deposed = PlaceTaken("another controller leads")
        with pytest.raises(PlaceTaken):
            await waiting

    simulate(tmp_path, world(), act)


def test_nobody_waits_for_a_job_that_could_not_be_submitted(tmp_path: Path) -> None:
    """Its use of a file is noted before."""
    sim = world()

    async def act(controller: Controller) -> None:
        assert (await controller.job(request(0, outputs=["d/x"]))).succeeded
        controller.site.fault = lambda method, about: "not found" if "secrets" in about else ""
        with pytest.raises(SiteError):
            await controller.job(replace(request(1, "d/x"), secrets={"TOKEN": "x"}))
        controller.site.fault = lambda method, about: ""
        (tmp_path / "d/x").unlink()
        async with asyncio.timeout(LONG_S):
            assert (await controller.job(request(2, "d"))).succeeded

    simulate(tmp_path, sim, act)


def new_attempt(journal: Journal, follows: str = "", job: str = "train") -> str:
    return journal.new_attempt(
        site="sim", job=job, rule=job, name=job, fingerprint="", follows=follows, segments=3
    ).id


def test_a_restored_journal_knows_what_is_used(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.set_site("sim", "url", "/ws", "place")
        sent = new_attempt(journal)
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
