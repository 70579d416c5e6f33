"""Copies on this machine of what is stored at a place."""

import hashlib
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.journal import FileRecord, RemoteOutput
from snakemake_executor_plugin_mantik.storage.copies import is_here

CONTENT = b"made"
FILES = (
    FileRecord("out/a", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), modified=1.0),
    FileRecord("out/empty", 0, "", modified=1.0),
)
OUTPUT = RemoteOutput("out", "place", True, 1.0, "make", FILES)


@pytest.mark.parametrize(
    ("content", "empty", "here"),
    [
        (CONTENT, True, True),
        (CONTENT, False, False),
        (b"mine", True, False),
        (b"longer", True, False),
        (None, True, False),
    ],
)
def test_an_output_is_here_only_with_the_same_content(
    tmp_path: Path, content: bytes | None, empty: bool, here: bool
) -> None:
    """`smk-mantik clean` removes what is: a file of the same size may be another one."""
    (tmp_path / ("out/empty" if empty else "out")).mkdir(parents=True)
    if content is not None:
        (tmp_path / "out/a").write_bytes(content)
    assert is_here(OUTPUT, tmp_path) is here
