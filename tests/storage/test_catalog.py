"""What the catalog of stored outputs writes to the journal."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.state_directory import STATE
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

    async def at(access: Access, place: str) -> SimulatedSite:
        return site

    def write(change: Callable[[FileLedger], None]) -> None:
        with closing(Journal(tmp_path / STATE)) as journal:
            change(journal.files)

    monkeypatch.setattr(Access, "_at", at)
    with closing(Catalog(tmp_path, {}, print)) as catalog:
        assert catalog.find("results/model") is None
        assert catalog.is_lost("results/model")
        if runs:
            catalog.attach(write)

    assert bool(read_stored(tmp_path / STATE).outputs) is not runs
