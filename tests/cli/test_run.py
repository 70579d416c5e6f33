"""`smk-mantik run`: all mistakes of a command line at once, before Snakemake starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import smk_mantik_in

MLPROJECT = """\
nmae: churn
entry_points:
  train:
    parameters:
      data: path
      alpha: {type: float, default: 0.5}
      out: {default: model.txt}
    command: "cat {data} > {out}; echo {alpha} >> {out}"
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "churn").mkdir()
    (tmp_path / "churn/MLproject").write_text(MLPROJECT)
    (tmp_path / "d.csv").write_text("1,2\n")
    return tmp_path


def run(here: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "snakemake_executor_plugin_mantik", "run", "churn", *words],
        cwd=here, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def refused(here: Path, *words: str) -> str:
    ran = smk_mantik_in(here, "run", "churn", *words)
    said = ran.output
    assert ran.code == 2, said
    assert "Traceback" not in said
    assert not (here / ".snakemake").exists()
    return said


def test_an_unknown_entry_point_hides_no_other_mistake(here: Path) -> None:
    said = refused(
        here, "-e", "trian", "-P", "foo", "-P", "b=1", "--extra", "=x", "--input", "gone",
        "--site", "/tmp/nofile.yaml",
    )  # fmt: skip
    for told in (
        "5 mistakes",
        "-P: has to be NAME=VALUE, found 'foo'",
        "--extra: has to be NAME=VALUE, found '=x'",
        "--input: there is no file 'gone'",
        "/tmp/nofile.yaml: there is no such file",
        "there is no entry point 'trian' (did you mean train?)",
    ):
        assert told in said


def test_all_mistakes_of_parameters_at_once(here: Path) -> None:
    said = refused(
        here, "-e", "train", "-P", "foo", "-P", "b=1", "-P", "alpha=x", "-P", "out={output.b}",
        "--extra", "data=x", "--extra", "c={input[3]}", "--output", "a=x", "--output", "a=y",
        "--site", "/tmp/nofile.yaml",
    )  # fmt: skip
    for told in (
        "8 mistakes",
        "-P: has to be NAME=VALUE, found 'foo'",
        "train.b: is not a parameter of train (there are data, alpha, out): correct the name, or"
        " use --extra to append it to the command",
        "train.alpha: has to be a number, found 'x'",
        "-P: out: the job has no output.b (did you mean output.a?)",
        "--extra: data: is a parameter of the entry point: pass it with -P",
        "--extra: c: the job has no input[3]",
        "--output: a: is given twice",
        "/tmp/nofile.yaml: there is no such file",
    ):
        assert told in said
    assert "mapping after" not in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-P", "data=d.csv", "-P", "out={output.b}", "--output", "a=x"), "no output.b"),
        (("-P", "data=d.csv", "-P", "out={output[1]}", "--output", "a=x"), "no output[1]"),
        (
            ("-P", "data=d.csv", "-P", "out={output.keys}", "--output", "a=x"),
            "not a file of the job",
        ),
        (("-P", "data={input.d}", "--input", "d.csv"), "no input.d"),
        (("-P", "data=x{input}", "--input", "d.csv", "--input", "churn"), "names 2 files"),
        (("-P", "data=gone.csv"), "there is no file 'gone.csv' in the working directory"),
    ],
)
def test_files_that_the_job_does_not_have(here: Path, words: tuple[str, ...], told: str) -> None:
    assert told in refused(here, "-e", "train", *words)


def test_warnings_are_told_once(here: Path) -> None:
    code, said = run(
        here, "-e", "train", "-P", "data={input.d}", "-P", "out={output.a}", "--input", "d=d.csv",
        "--output", "a=x/m", "--", "--executor", "local", "--cores", "1",
    )  # fmt: skip
    assert code == 0, said
    assert (here / "x/m").read_text() == "1,2\n0.5\n"
    assert said.count("did you mean name?") == 1
