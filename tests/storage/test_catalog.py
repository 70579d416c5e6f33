"""What the catalog of remote outputs writes to the journal, and removes."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.engine.compare import Looks, Sight
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.place import make_retry
from snakemake_executor_plugin_mantik.journal import (
    FileLedger,
    FileRecord,
    Journal,
    RemoteOutput,
    read_stored,
)
from snakemake_executor_plugin_mantik.sites.base import Entry
from snakemake_executor_plugin_mantik.storage.access import Access
from snakemake_executor_plugin_mantik.storage.catalog import Catalog
from tests.support.simulated import SimulatedSite, World
from tests.support.world import EPOCH_S


@pytest.mark.parametrize("runs", [False, True])
def test_a_loss_is_written_by_a_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    file = FileRecord("results/model", 1, "0" * 64, modified=EPOCH_S)
    output = RemoteOutput(file.path, "place", False, EPOCH_S, "job", (file,))
    with closing(Journal(tmp_path / STATE)) as journal:
        journal.files.set_remote_files("place", [file])
        journal.files.set_stored([output])
    site = SimulatedSite(World())

    async def reach(access: Access, place: str) -> Looks:
        return Looks(site, place, make_retry(site, print))

    def write(change: Callable[[FileLedger], None]) -> None:
        with closing(Journal(tmp_path / STATE)) as journal:
            change(journal.files)

    monkeypatch.setattr(Access, "_reach", reach)
    with closing(Catalog(tmp_path, print)) as catalog:
        assert catalog.find("results/model") is None
        assert catalog.is_lost("results/model")
        if runs:
            catalog.attach(cast(Engine, SimpleNamespace(write_files=write)))

    assert bool(read_stored(tmp_path / STATE).outputs) is not runs


MODEL = FileRecord("out/model", 4, "a" * 64, modified=1000.0, mode=0o644)
TRAINED = RemoteOutput("out/model", "place", False, 1000.0, "train", (MODEL,))


@pytest.fixture
def found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Entry], RemoteOutput | None]:
    """What `TRAINED` is when its directory shows one entry."""

    def find(entry: Entry) -> RemoteOutput | None:
        sight = Sight({entry.name: entry}, frozenset({MODEL.path} - {f"out/{entry.name}"}))
        monkeypatch.setattr(Access, "look", lambda *_: sight)
        with closing(Journal(tmp_path / STATE)) as journal:
            journal.files.set_remote_files("place", [MODEL])
            journal.files.set_stored([TRAINED])
        with closing(Catalog(tmp_path, print)) as catalog:
            return catalog.find(TRAINED.path)

    return find


@pytest.mark.parametrize("seconds", [0.0, 1.5, 3600.0, -3600.5])
def test_an_output_as_it_was_made_stays(
    found: Callable[[Entry], RemoteOutput | None], seconds: float
) -> None:
    """Clocks are rounded, and local times are off by an hour after a change to summer time."""
    assert found(Entry("model", MODEL.size, False, MODEL.modified + seconds)) == TRAINED


@pytest.mark.parametrize(("longer", "later"), [(0, 10), (0, -10), (0, 7200), (1, 0)])
def test_one_that_was_changed_has_another_content_and_is_new(
    found: Callable[[Entry], RemoteOutput | None], longer: int, later: float
) -> None:
    entry = Entry("model", MODEL.size + longer, False, MODEL.modified + later)
    now = found(entry)
    assert now is not None
    [file] = now.files
    assert (file.size, file.modified) == (entry.size, entry.modified)
    assert file.sha256 != MODEL.sha256
    assert now.made > TRAINED.made
    assert replace(now, made=TRAINED.made, files=TRAINED.files) == TRAINED


def test_one_that_is_gone_does_not_exist(found: Callable[[Entry], RemoteOutput | None]) -> None:
    assert found(Entry("other", MODEL.size, False, MODEL.modified)) is None


FILE = FileRecord("d/a", 1, "a" * 64, modified=1.0, mode=0o644)
OUTPUT = RemoteOutput("d", "place", True, 1.0, "make", (FILE,))


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    paths: list[str] = []
    monkeypatch.setattr(Access, "remove", lambda self, place, path: paths.append(path))
    return paths


@pytest.mark.parametrize("used", ["d", "d/a", "d/b", "."])
def test_what_an_open_attempt_uses_is_no_output_any_more_but_stays(
    tmp_path: Path, removed: list[str], used: str
) -> None:
    with closing(Journal(tmp_path / STATE)) as journal:
        journal.set_site("sim", "url", "/ws", "place")
        record = journal.new_attempt(site="sim", job="j", rule="j", name="count", fingerprint="")
        journal.uses.begin(record.id, "place", [used])
        journal.submitting(record.id, "batch")
        journal.files.set_remote_files("place", [FILE])
        journal.files.set_stored([OUTPUT])
        said: list[str] = []
        engine = SimpleNamespace(write_files=lambda change: change(journal.files))
        with closing(Catalog(tmp_path, said.append)) as catalog:
            catalog.attach(cast(Engine, engine))
            catalog.remove("d")
            assert removed == []
            assert catalog.find("d") is None
            assert said == ["d stays at sim until a run after the end of count, which uses it."]
            [left] = journal.files.remote_files("place")
            assert (left.path, left.stored) == ("d/a", False), "a later run removes it"

            journal.abandoned(record.id, "cancelled")
            journal.files.set_remote_files("place", [FILE])
            journal.files.set_stored([OUTPUT])
            catalog.add([OUTPUT])
            catalog.remove("d")
            assert removed == ["d"]
            assert journal.files.remote_files("place") == []
