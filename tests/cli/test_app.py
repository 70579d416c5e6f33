"""Options of `smk-mantik` itself."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from snakemake_executor_plugin_mantik import cli
from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.cli.bootstrap import platforms


def test_the_version() -> None:
    done = CliRunner().invoke(_app(), ["--version"])
    assert (done.exit_code, done.stdout) == (
        0,
        f"smk-mantik {version('snakemake-executor-plugin-mantik')}\n",
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("", "Snakemake is not installed beside the mantik executor. Type: pip install"),
        ("8.30.0", "Snakemake 8.30.0 is too old for the mantik executor"),
    ],
)
@pytest.mark.parametrize("words", [["--version"], ["docs", "--schema"]])
def test_without_a_snakemake_every_command_says_what_to_install(
    tmp_path: Path, words: list[str], found: str, said: str
) -> None:
    for each in map(Path, sys.path):
        for path in each.iterdir() if each.name == "site-packages" else ():
            if path.name != "snakemake" and not path.name.startswith("snakemake-"):
                (tmp_path / path.name).symlink_to(path)
    if found:
        (tmp_path / "snakemake").mkdir()
        (tmp_path / "snakemake/__init__.py").touch()
        metadata = tmp_path / f"snakemake-{found}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: snakemake\nVersion: {found}\n")
    package = Path(cli.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-S", "-m", "snakemake_executor_plugin_mantik", *words],
        env={"PYTHONPATH": f"{tmp_path}:{package}"}, cwd=tmp_path, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert (done.returncode, done.stdout[: len(said) + 12]) == (2, f"smk-mantik: {said}")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("status", "smk-mantik jobs"), ("resume", "snakemake"), ("upload", "smk-mantik put")],
)
def test_a_word_of_another_tool_names_the_command_that_is_meant(word: str, meant: str) -> None:
    done = CliRunner().invoke(_app(), [word], env={"COLUMNS": "200"})
    assert (done.exit_code, f"'{word}'; use: {meant}" in done.output) == (2, True)


@pytest.mark.parametrize("words", [["-h"], ["check", "-h"], ["runs", "submit", "-h"]])
def test_help_has_a_short_option(words: list[str]) -> None:
    done = CliRunner().invoke(_app(), words)
    assert done.exit_code == 0, done.output
    assert "--help" in done.stdout


def test_a_flag_has_no_type_in_the_help() -> None:
    for words in (["--help"], ["plan", "--help"], ["get", "--help"], ["runs", "submit", "--help"]):
        assert "bool" not in CliRunner().invoke(_app(), words).stdout
    assert "<dir>" in CliRunner().invoke(_app(), ["get", "--help"]).stdout


def test_the_lines_of_the_help_are_as_long_as_the_terminal_is_wide() -> None:
    for width in (80, 140):
        shown = CliRunner().invoke(_app(), ["get", "--help"], env={"COLUMNS": str(width)}).stdout
        lines = [line.strip() for line in shown.partition("Arguments")[0].splitlines()]
        [first] = [number for number, line in enumerate(lines) if line.startswith("A PATH")]
        paragraph = lines[first : lines.index("", first)]
        assert all(len(line) > width - 20 for line in paragraph[:-1]), paragraph


def test_the_help_tells_commands_apart() -> None:
    shown = " ".join(CliRunner().invoke(_app(), ["--help"], env={"COLUMNS": "200"}).stdout.split())
    for command in ("run", "runs", "jobs", "track", "watch"):
        found = re.search(rf"│ {command} +([A-Z].*?\.) │", shown)
        assert found, command
        own = CliRunner().invoke(_app(), [command, "--help"], env={"COLUMNS": "200"}).stdout
        assert found[1] in " ".join(own.split()), command
    assert "as a job, and wait for it" in shown
    assert "jobs that snakemake submitted" in shown


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """As in a shell that has sourced what `--show-completion` prints."""
    asked = """
        eval "$(_SMK_MANTIK_COMPLETE=source_bash smk-mantik)"
        complete -p smk-mantik > /dev/null
        COMP_WORDS=(smk-mantik tra) COMP_CWORD=1
        _smk_mantik_completion smk-mantik; echo "${COMPREPLY[@]}"
        COMP_WORDS=(smk-mantik runs submit --check) COMP_CWORD=3
        _smk_mantik_completion smk-mantik; echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", asked], env={**os.environ, "PATH": path}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "track\n--checkpoint\n", "")


HEARS = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from snakemake_executor_plugin_mantik import cli
cli._app = lambda _: os.kill(os.getpid(), signal.SIGINT)  # while it is about to be imported
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


@pytest.mark.parametrize(
    ("libc", "newest"), [(["glibc", "2.28"], 28), (["glibc", "2.17"], 17), (["", ""], 17)]
)
def test_wheels_for_the_c_library_of_a_site(libc: list[str], newest: int) -> None:
    there: dict[str, Any] = {"machine": "aarch64", "libc": libc, "python": "3.12.1"}
    tags = platforms(there)
    assert tags[0] == f"manylinux_2_{newest}_aarch64"
    assert "manylinux_2_17_aarch64" in tags
    assert tags[-1] == "linux_aarch64"
