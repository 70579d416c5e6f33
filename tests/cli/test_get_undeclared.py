"""What the user makes while smk-mantik get brings files is never removed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snakemake_executor_plugin_mantik.cli.get import bring_undeclared
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.journal import StoredOutput


@pytest.mark.parametrize("force", [True, False])
def test_files_and_directories_made_meanwhile(tmp_path: Path, force: bool) -> None:
    def fetch(file: StoredOutput, target: Path) -> None:
        target.write_text("theirs")
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder/mine").write_text("mine")
        (tmp_path / "file").write_text("mine")

    files = [StoredOutput(path, "place", False, 0.0, "", ()) for path in ("file", "folder", "free")]
    catalog = cast(Any, SimpleNamespace(changed_files=lambda _: [], site=lambda _: "sim"))

    with pytest.raises(UserError, match=r"other files or directories here now.*folder"):
        bring_undeclared(catalog, tmp_path, files, fetch, force=force)

    assert (tmp_path / "folder/mine").read_text() == "mine"
    assert (tmp_path / "file").read_text() == ("theirs" if force else "mine")
    assert (tmp_path / "free").read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder", "free"}
