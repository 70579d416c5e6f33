"""What stands in `shell:`, evaluated in each job."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.utils import QuotedFormatter

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.script import PART_BYTES
from snakemake_executor_plugin_mantik.rules.kinds.shell_command import (
    NODE_TMPDIR,
    _declared,
    use_node_tmpdir,
)


def shell(command: str, **_: object) -> None:
    raise AssertionError(f"this ran: {command}")


def job(run: Any) -> Any:
    return SimpleNamespace(rule=SimpleNamespace(run_func=run, name="a"))


def test_an_expression_sees_the_things_of_the_job_and_runs_nothing() -> None:
    word = "closed over"

    def run(output: list[str], threads: int, conda_env: object, marker: bool = True) -> None:
        shell(f"cat {output[0]} {threads} {conda_env} {word} {{input}}", bench_record=None)

    found = _declared(job(run), {"output": ["x"], "threads": 3, "input": ["y"]})
    assert found == "cat x 3 None closed over {input}"


def test_an_expression_that_fails_names_the_rule() -> None:
    def run(output: list[str]) -> None:
        shell(f"touch {output[1]}")

    with pytest.raises(UserError, match=r"rule a: .*shell: cannot be evaluated: IndexError"):
        _declared(job(run), {"output": ["x"]})


@pytest.mark.parametrize(
    ("text", "shell"),
    [
        ("printf %s {tmpdir:q}", "bash"),
        ("printf %s {tmpdir:q} '$X'; true", "sh"),
        ("bash -c 'printf %s \"$0\"' {tmpdir:q}", "dash"),
        ("printf %s '{tmpdir}'", "bash"),
        ("awk 'BEGIN {{ printf \"{tmpdir}\" }}'", "sh"),
        ("cat <<'EOF'\n{tmpdir}\nEOF", "bash"),
        ("print('{tmpdir}', end='')", "python3"),
        ('print("{tmpdir}", end="")', "python3"),
    ],
)
def test_the_nodes_directory_is_in_the_text_wherever_it_stands(
    text: str, shell: str, tmp_path: Path
) -> None:
    tmpdir = f"{tmp_path}/a & b  c"
    command, started = use_node_tmpdir(QuotedFormatter().format(text, tmpdir=NODE_TMPDIR), shell)
    said = subprocess.run(
        [started, "-c", command], env={"TMPDIR": tmpdir, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.removesuffix("\n").removesuffix("$X") == tmpdir


def test_the_nodes_directory_in_plain_and_in_long_texts_is_a_variable() -> None:
    assert use_node_tmpdir(f"ls {NODE_TMPDIR}/x", "bash") == ("ls $TMPDIR/x", "bash")
    assert use_node_tmpdir(f"ls '{NODE_TMPDIR}'", "bash") == ('ls "$TMPDIR"', "bash")
    assert use_node_tmpdir("ls 'x'", "zsh") == ("ls 'x'", "zsh")
    long = "#" * PART_BYTES
    assert use_node_tmpdir(f"ls '' {NODE_TMPDIR} {long}", "sh") == (f"ls '' $TMPDIR {long}", "sh")
