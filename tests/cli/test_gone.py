"""A command that is typed in a directory which somebody has removed meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

TYPED = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'


@pytest.mark.parametrize(
    "words",
    [("runs", "list"), ("runs", "submit", "x", "--site", "a.yaml"), ("run", "."), ("check", "x")],
)
def test_the_working_directory_is_gone(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = subprocess.run(
        ["sh", "-c", TYPED, "sh", sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik",
         *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert ended.returncode == 2
    assert ended.stderr == (
        "smk-mantik: the directory that you are in was removed."
        " Change into one that is there, and type it again.\n"
    )
