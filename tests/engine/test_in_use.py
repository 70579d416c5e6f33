"""Nothing is removed or replaced at a site under a job that uses it, also one of an earlier run."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.journal import Journal
from tests.support.controller import Controller, request, simulate
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
        controller.place.stager.sources.clear()
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


def test_sources_that_a_site_has_refused_come_with_the_next_job(tmp_path: Path) -> None:
    sim = world()
    write(tmp_path, "lib.py")

    async def act(controller: Controller) -> None:
        controller.site.fault = lambda method, about: "rejected" if method == "put" else ""
        with pytest.raises(SiteRejected):
            await controller.place.send_sources(["lib.py"])
        controller.site.fault = lambda method, about: ""
        await controller.place.send_sources(["lib.py"])
        assert (await controller.job(request(0))).succeeded

    simulate(tmp_path, sim, act)
    assert "lib.py" in sim.files


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
