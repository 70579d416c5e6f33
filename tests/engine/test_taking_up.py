"""A job that an earlier run left at a simulated site: taken up, told of, or made again."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import AttemptState, Journal, read_history
from snakemake_executor_plugin_mantik.staging.local import LocalFile
from tests.support.controller import (
    Controller,
    Killed,
    killed_when,
    request,
    run_one,
    simulate,
    states,
)
from tests.support.simulated import World

"""Bytes that fit into no script."""


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


@pytest.mark.parametrize(
    ("changed", "runs"), [(None, 1), ("by somebody", 2), ("", 2)], ids=["not", "edited", "gone"]
)
def test_what_was_updated_is_updated_again_only_if_somebody_else_has_changed_it(
    tmp_path: Path, changed: str | None, runs: int
) -> None:
    """Killed when the new content was here, and before Snakemake could take it."""
    world = World()
    path = tmp_path / "out/1"
    path.parent.mkdir()
    path.write_text("before")
    simulate(tmp_path, world, lambda controller: controller.work.run(UPDATES))
    assert path.read_text() != "before"
    if changed is not None:
        path.unlink()
    if changed:
        path.write_text(changed)

    assert simulate(tmp_path, world, lambda controller: controller.job(UPDATES)).succeeded

    assert len(world.runs) == runs
    assert states(tmp_path) == [*[AttemptState.ABANDONED] * (runs - 1), AttemptState.DONE]


def with_project_files(project_files: dict[str, str], **values: Any) -> Play:
    """A run of one job in a working directory with these sources."""

    async def play(controller: Controller) -> Outcome:
        controller.place.stager.project_files = {
            path: replace(
                LocalFile.holding(path, text.encode()),
                key=(path, 1, 0, time.time_ns() if text == "new" else 0, 0),
            )
            for path, text in project_files.items()
        }
        return await controller.job(replace(request(1, "data/x"), **values))

    return play


BEFORE = {"scripts/train.py": "a", "lib.py": "b", "README": "c"}
COMMAND = "python scripts/train.py"


@pytest.mark.parametrize(
    ("values", "project_files", "told"),
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
    tmp_path: Path, values: dict[str, Any], project_files: dict[str, str], told: str
) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")
    left_running(tmp_path, world, with_project_files(BEFORE, command=COMMAND))
    (tmp_path / "data/x").write_text(project_files.pop("data/x", "1"))

    async def play(controller: Controller) -> list[str]:
        again = with_project_files(BEFORE | project_files, **{"command": COMMAND, **values})
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
    left_running(tmp_path, world, with_project_files(BEFORE, resources={"mem_mb": 1000}))
    (sent,) = read_history(tmp_path / ".snakemake/mantik")

    async def play(controller: Controller) -> list[str]:
        play = with_project_files(
            BEFORE | {"lib.py": "new"}, resources={"mem_mb": 2000, "runtime": 5}
        )
        assert (await play(controller)).succeeded
        return controller.said

    said = "\n".join(simulate(tmp_path, world, play))

    assert "memory per node in MiB" in said
    assert "walltime in s none instead of 300" in said
    assert f"smk-mantik cancel {sent.id}" in said
    assert "changed since an earlier run submitted jobs (lib.py). Jobs whose" in said
    assert [r.how for r in world.runs] == ["exit 0"], "it was taken up"


@pytest.mark.parametrize("other", ["2", "1"])
async def test_input_that_changes_while_the_job_runs_is_told(
    controller: Controller, world: World, tmp_path: Path, other: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")
    job = asyncio.create_task(controller.job(request(1, "data/x")))
    while not world.runs:
        await asyncio.sleep(1)
    (tmp_path / "data/x").write_text(other)
    os.utime(tmp_path / "data/x", (1, 1))
    assert (await job).succeeded
    said = controller.said
    assert ["data/x changed while the job ran" in line for line in said] == [True] * (other != "1")


async def test_what_a_job_updates_has_not_changed_beside_it(
    controller: Controller, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/1").write_text("before")
    assert (await controller.job(UPDATES)).succeeded
    assert (tmp_path / "out/1").read_text() != "before"
    assert controller.said == []


def test_left_behind_and_come_back_to(tmp_path: Path) -> None:
    """Its site was not among those of a run in between, or had another workspace in it."""
    world = World(duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    with closing(Journal(tmp_path / ".snakemake/mantik")) as journal:
        open_attempts = journal.all_open_attempts()
        assert len(journal.set_site("sim", "url", "/another", "else")) == 1
        journal.set_site("sim", "url", "/ws", open_attempts[0].place)

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
