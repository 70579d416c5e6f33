"""`smk-mantik call`: a function as a job, through the real command."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import smk_mantik
from tests.support.workflows import UNTRACKED, WAIT_S, Project, Ran, tells, until

TRAIN = """
    import os, time
    import helper

    def main(lr, names=()):
        print("epoch 1 of 1", flush=True)
        with open(os.environ["STARTED"], "a") as file:
            file.write("x")
        while os.path.exists(os.environ["HELD"]):
            time.sleep(0.02)
        if lr > 1:
            raise ValueError(f"lr {lr} diverges")
        return {"score": lr * helper.FACTOR, "names": names}
"""


@pytest.fixture
def project(project: Project, tmp_path: Path) -> Project:
    project.write("train.py", TRAIN)
    project.write("helper.py", "FACTOR = 2\n")
    # Jobs of a sandbox have its environment, so these stand in the config.
    variables = {name.upper(): str(tmp_path / name) for name in ("started", "held")}
    lines = "".join(f"    {name}: {json.dumps(value)}\n" for name, value in variables.items())
    project.config.write_text(f"{project.place.config}Environment:\n  Variables:\n{lines}")
    project.extra |= UNTRACKED
    return project


def start(project: Project, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "snakemake_executor_plugin_mantik", "call"]
    return subprocess.Popen(
        [*command, "--site", f"hpc1={project.config}", *words],
        cwd=project.directory, env=project.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]") -> tuple[Ran, str]:
    """Return how it ended, with what it wrote as an error, and its standard output."""
    out, said = process.communicate(timeout=WAIT_S)
    return Ran(process.returncode, said), out


def test_an_interrupted_call_goes_on_and_runs_once(project: Project, tmp_path: Path) -> None:
    words = ("train:main", "-a", "lr=0.5", "-a", 'names=["{a}", "ü"]')
    started, held = tmp_path / "started", tmp_path / "held"
    held.touch()
    first = start(project, *words)
    until(started.exists, "it runs")
    first.send_signal(signal.SIGTERM)
    ended, _ = end(first)
    assert ended.code != 0, ended.output
    held.unlink()

    ended, out = end(start(project, *words))
    assert json.loads(out) == {"score": 1.0, "names": ["{a}", "ü"]}, ended.output
    tells(ended.ok().output, "train:main(lr=0.5, names=['{a}', 'ü']) is in calls/train.main-")
    assert started.read_text() == "x"

    assert len(project.attempts) == 1


def test_an_exception_comes_back(project: Project) -> None:
    failed, out = end(start(project, "train:main", "-a", "lr=5"))
    assert (failed.code, out) == (1, "")
    tells(failed.output, "ValueError: lr 5 diverges", r"All of its output: .snakemake/mantik/logs/")


def test_it_runs_on_this_machine(project: Project, tmp_path: Path) -> None:
    project.extra |= {name.upper(): str(tmp_path / name) for name in ("started", "held")}
    words = ("train:main", "-a", "lr=0.5", "--result", "out.json")
    ended, out = end(start(project, *words, "--", "--executor", "local", "--cores", "1"))
    tells(ended.ok().output, "train:main(lr=0.5) is in out.json.")
    assert json.loads(out)["score"] == 1.0
    assert project.read("out.json") == out


def test_mistakes_are_reported_together(project: Project) -> None:
    words = ("call", "train:main", "--site", f"hpc1={project.config}")
    done = smk_mantik(project, *words, "-a", "lr", "--pickle", "--input", "gone")
    assert done.code == 2
    tells(done.output, "3 mistakes", "--arg: has to be NAME=VALUE", "--pickle: needs --result")
    done = smk_mantik(project, *words, "-a", "lr=1", "--result", "train.py")
    assert done.code == 2
    tells(done.output, "is an input, too: 'train.py'")
    assert not project.exists(".snakemake")
