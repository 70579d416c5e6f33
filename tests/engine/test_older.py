"""Workflows that an older version has begun: its journal, its files at the site, its open tries."""

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.jobs.paths import BUNDLES, PLACE, bundle_path
from snakemake_executor_plugin_mantik.journal import TryState, read_history
from tests.support.controller import Controller, killed_when, request, simulate
from tests.support.older import UNDO
from tests.support.simulated import Fate, World, result

LARGE = 3_000_000


def grown_old(workdir: Path, world: World, versions: int) -> None:
    """Make of a killed run what one of so many versions ago has left.

    Such a one knew no places, numbered no contents, and named its bundles without a bucket.
    """
    journal = workdir / ".state" / "journal.sqlite"
    with closing(sqlite3.connect(journal)) as db:
        [(bundle, bucket)] = db.execute("SELECT id, substr(id, 1, instr(id, '/')) FROM bundles"
                                        " WHERE state = 'uploaded'").fetchall()  # fmt: skip
        old = bundle.removeprefix(bucket)
        for table, column in (("bundles", "id"), ("bundle_files", "bundle")):
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (old, bundle))
        db.commit()
        db.executescript("".join(UNDO[:versions]).replace("hpc1", "sim"))
    (workdir / ".state" / "journal.spare").unlink()
    world.remove(PLACE)
    content = world.files.pop(bundle_path(bundle))
    assert content is not None
    world.remove(f"{BUNDLES}/{bucket.removesuffix('/')}")
    world.write(bundle_path(old), content)
    for job in world.jobs.values():
        job.spec = replace(job.spec, bundles=(old,), numbers={}, term=0)


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("starts", [1.0, 5000.0])
def test_open_try_is_taken_up_and_its_bundle_found(
    tmp_path: Path, starts: float, versions: int
) -> None:
    """It waits, or runs already; another job needs what its bundle brings."""
    content = os.urandom(LARGE)
    (tmp_path / "large").write_bytes(content)
    world = World(
        lambda spec: Fate(starts=(starts,)), duration=lambda spec: 3000.0, place=lambda _: "alone"
    )
    job = request(1, "large")
    controller = killed_when(tmp_path, world, lambda c: bool(states(tmp_path)), job)
    grown_old(tmp_path, world, versions)
    world.advance(world.now + 100.0)
    [before] = read_history(tmp_path / ".state")

    async def play(controller: Controller) -> tuple[Outcome, Outcome]:
        first = await controller.job(job)
        second = await controller.job(request(2, "large"))
        await controller.place.tidy()
        return first, second

    first, second = simulate(tmp_path, world, play)

    assert first.succeeded
    assert second.succeeded
    assert (first.try_id, [run.job for run in world.runs]) == (before.id, ["job-1", "job-2"])
    for number, run in enumerate(world.runs, 1):
        assert run.found == result(f"make {number}", "", {"large": content})
    assert not [path for path in world.files if path.startswith(f"{BUNDLES}/")], "nothing stays"
    controller.forget()


def states(workdir: Path) -> list[TryState]:
    """The tries that the site has taken."""
    return [r.state for r in read_history(workdir / ".state") if r.state is TryState.SUBMITTED]
