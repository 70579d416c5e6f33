"""What the user makes while smk-mantik get brings files is never removed."""

import io
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from snakemake_executor_plugin_mantik.cli import shared
from snakemake_executor_plugin_mantik.cli.get import bring_undeclared, ls
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal, RemoteOutput


@pytest.mark.parametrize("force", [True, False])
def test_files_and_directories_made_meanwhile(tmp_path: Path, force: bool) -> None:
    def fetch(file: RemoteOutput, target: Path) -> None:
        target.write_text("theirs")
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder/mine").write_text("mine")
        (tmp_path / "file").write_text("mine")

    files = [RemoteOutput(path, "place", False, 0.0, "", ()) for path in ("file", "folder", "free")]
    catalog = cast(Any, SimpleNamespace(changed_files=lambda _: [], site=lambda _: "sim"))

    with pytest.raises(UserError, match=r"other local files or directories now.*folder"):
        bring_undeclared(catalog, tmp_path, files, fetch, force=force)

    assert (tmp_path / "folder/mine").read_text() == "mine"
    assert (tmp_path / "file").read_text() == ("theirs" if force else "mine")
    assert (tmp_path / "free").read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder", "free"}


@pytest.mark.parametrize("width", [80, 140])
def test_in_a_terminal_long_paths_can_be_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    with closing(Journal(tmp_path / ".snakemake" / "mantik")) as journal:
        for n in range(5):
            path = f"results/experiments/transformer/lr0.1/seed{n}/checkpoints/model.bin"
            files = (FileRecord(path, 1, "sha", modified=2.5, mode=0o644),)
            journal.files.set_remote_files("place", files)
            job = f"train_transformer_model lr=0.1, seed={n}"
            journal.files.set_stored([RemoteOutput(path, "place", False, 2.5, job, files)])
    terminal = Console(width=width, record=True, file=io.StringIO())
    monkeypatch.setattr(shared, "make_console", lambda: terminal)
    ls(cast(Any, None), directory=tmp_path)
    lines = terminal.export_text().splitlines()[1:]
    shown = "…/seed{}/…/model.bin"
    if width == 140:
        shown = "results/experiments/transformer/lr0.1/seed{}/checkpoints/model.bin"
    assert [line.split()[0] for line in lines] == [shown.format(n) for n in range(5)]
    assert all("train_transformer_model" in line for line in lines)
