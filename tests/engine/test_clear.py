"""Clearing a workspace: what is told of it, and that nothing goes that is somebody else's."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine import clear
from snakemake_executor_plugin_mantik.engine.clear import WORKFLOW_FILES, Clearer
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal
from tests.support import virtualtime
from tests.support.simulated import SimulatedSite, World

TREE = {
    "data/x": 10,
    "out/deep/y": 20,
    ".mantik/attempts/0/a": 1,
    ".mantik/work/0/a/log": 2,
    ".mantik/conda/one/bin/python": 300,
    ".mantik/conda/two/lib": 400,
    ".mantik/images/i.sif": 5000,
}


@pytest.fixture
def world() -> World:
    world = World()
    for path, size in TREE.items():
        world.write(path, b"x" * size)
    return world


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path)) as journal:
        journal.set_site("sim", "url", "/ws", "p")
        journal.set_site("other", "url", "/ws", "p")
        journal.files.set_remote_files("p", [FileRecord("out/deep/y", 20, "b")])
        record = journal.new_attempt(site="sim", job="j", rule="r", name="j", fingerprint="f")
        journal.done(record.id)
        yield journal


def clearer(world: World, journal: Journal, *, shared: bool = False) -> Clearer:
    return Clearer(SimulatedSite(world), "p", journal, shared=shared)


def told(world: World, journal: Journal, *, shared: bool = False) -> dict[str, tuple[int, int]]:
    found = virtualtime.run(clearer(world, journal, shared=shared).measure())
    assert not any(part.more for part in found.values())
    return {name: (part.files, part.size) for name, part in found.items()}


def test_tells_what_lies_there(world: World, journal: Journal) -> None:
    ours = {
        "attempts, logs and archives": (2, 3),
        "conda environments": (2, 700),
        "container images": (1, 5000),
    }
    assert told(world, journal) == {WORKFLOW_FILES: (2, 30), **ours}
    assert told(world, journal, shared=True) == {WORKFLOW_FILES: (1, 20), **ours}
    world.files.clear()
    assert told(world, journal) == {}


def test_of_too_many_directories_the_least_is_told(
    world: World, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clear, "MOST_LISTINGS", 12)
    for number in range(20):
        world.write(f".mantik/conda/one/lib/{number}/f", b"x")
    site = SimulatedSite(world)
    found = virtualtime.run(Clearer(site, "p", journal, shared=False).measure())
    assert site.calls["list"] == 12
    assert found["conda environments"].more
    assert not found["container images"].more


def test_removes_all_of_its_own(world: World, journal: Journal) -> None:
    [bucket] = journal.retire_buckets("p")
    assert virtualtime.run(clearer(world, journal).remove()) == []
    assert world.files == {}
    assert journal.files.remote_files("p") == []
    late = journal.new_attempt(site="sim", job="j", rule="r", name="j", fingerprint="f")
    assert late.bucket != bucket, "a job that the site starts late finds no place for a claim"


def test_what_is_not_the_workflows_stays(world: World, journal: Journal) -> None:
    assert virtualtime.run(clearer(world, journal, shared=True).remove()) == []
    assert sorted(world.files) == ["data", "data/x"]


def test_what_cannot_be_removed_is_told(world: World, journal: Journal) -> None:
    site = SimulatedSite(world)
    site.fault = lambda method, about: "rejected" if (method, about) == ("remove", "data") else ""
    left = virtualtime.run(Clearer(site, "p", journal, shared=False).remove())
    assert left == ["data (no)"]
    assert sorted(world.files) == ["data", "data/x"]
