"""What the catalog of stored outputs writes to the journal, and removes."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.engine.compare import Looks
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.place import make_retry
from snakemake_executor_plugin_mantik.journal import (
    FileLedger,
    FileRecord,
    Journal,
    StoredOutput,
    read_stored,
)
from snakemake_executor_plugin_mantik.storage.access import Access
from snakemake_executor_plugin_mantik.storage.catalog import Catalog
from tests.support.simulated import SimulatedSite, World
from tests.support.world import EPOCH_S


@pytest.mark.parametrize("runs", [False, True])
def test_a_loss_is_written_by_a_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    file = FileRecord("results/model", 1, "0" * 64, modified=EPOCH_S)
    output = StoredOutput(file.path, "place", False, EPOCH_S, "job", (file,))
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
    with closing(Catalog(tmp_path, {}, print)) as catalog:
        assert catalog.find("results/model") is None
        assert catalog.is_lost("results/model")
        if runs:
            catalog.attach(cast(Engine, SimpleNamespace(write_files=write)))

    assert bool(read_stored(tmp_path / STATE).outputs) is not runs


FILE = FileRecord("d/a", 1, "a" * 64, modified=1.0, mode=0o644)
OUTPUT = StoredOutput("d", "place", True, 1.0, "make", (FILE,))


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    paths: list[str] = []
    monkeypatch.setattr(Access, "remove", lambda self, place, path: paths.append(path))
    return paths


@pytest.mark.parametrize("used", ["d", "d/a", "d/b", "."])
def test_what_an_open_try_uses_is_no_output_any_more_but_stays(
    tmp_path: Path, removed: list[str], used: str
) -> None:
    with closing(Journal(tmp_path / STATE)) as journal:
        journal.set_site("sim", "url", "/ws", "place")
        record = journal.new_try(site="sim", job="j", rule="j", name="count", fingerprint="")
        journal.uses.begin(record.id, "place", [used])
        journal.submitting(record.id, "batch")
        journal.files.set_remote_files("place", [FILE])
        journal.files.set_stored([OUTPUT])
        said: list[str] = []
        engine = SimpleNamespace(write_files=lambda change: change(journal.files))
        with closing(Catalog(tmp_path, {}, said.append)) as catalog:
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
