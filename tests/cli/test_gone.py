"""Commands that are typed in a directory which is no more, or taken back as soon as typed."""

import subprocess
import sys
from pathlib import Path

import pytest

HEARS = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from snakemake_executor_plugin_mantik import cli
cli._app = lambda: os.kill(os.getpid(), signal.SIGINT)  # while it is about to be imported
cli.main()
"""
TYPED = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'


@pytest.mark.parametrize("words", [("runs", "submit", "x", "--site", "a.yaml"), ("check", "x")])
def test_the_working_directory_is_gone(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = subprocess.run(
        ["sh", "-c", TYPED, "sh", sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik",
         *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert ended.returncode == 2
    assert ended.stderr == (
        "smk-mantik: the directory that you are in was removed."
        " Change into an existing one, and run the command again.\n"
    )


def test_ctrl_c_before_anything_is_begun() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HEARS], capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stderr) == (130, "")
