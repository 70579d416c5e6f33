"""Shadow directories, where a workflow that succeeds does not show them."""

import os
import shlex
import signal
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.rules.make_request import wrap_shadow
from tests.support.trial import NASTY, Trial, wait_until

PLACE = ".mantik/shadow/0123"


def text(command: str, depth: str = "minimal", **files: Any) -> str:
    files = {"inputs": ("in",), "outputs": ("out",), "logs": ("log",), **files}
    return wrap_shadow(PLACE, depth, shlex.join(["bash", "-c", command]), rule="it's", **files)


@pytest.mark.parametrize("signalled", ["the job", "its command"])
def test_a_signal_leaves_the_log_and_nothing_else(trial: Trial, signalled: str) -> None:
    trial.write("in")
    command = (
        "echo told > log; echo half > out; echo $$ > pid.tmp; mv pid.tmp pid; sleep 60; exit 1"
    )
    spec = trial.spec(text(command), outputs=(OutputFile("out"), OutputFile("log", "log")))
    process = trial.start(spec)
    pid = trial.workspace / PLACE / "pid"
    wait_until(pid.exists)
    if signalled == "the job":
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    ended = trial.end(spec, process)
    assert ended.sure.exit_code == (143 if signalled == "the job" else 137), ended.log
    assert (trial.workspace / "log").read_text() == "told\n"
    assert not (trial.workspace / "out").exists()
    assert not list((trial.workspace / PLACE).parent.iterdir())


def test_what_a_killed_job_left_is_not_found(trial: Trial) -> None:
    trial.write("in")
    trial.write(f"{PLACE}/old")
    ended = trial.run(trial.spec(text("ls -A > out"), outputs=(OutputFile("out"),)))
    assert ended.sure.exit_code == 0, ended.log
    assert (trial.workspace / "out").read_text() == ".mantik\nin\nout\n"


@pytest.mark.parametrize("depth", ["shallow", "full"])
def test_any_names_and_many_of_them(trial: Trial, depth: str) -> None:
    for number in range(1100):
        trial.write(f"many/{number} {NASTY}")
    trial.write(f"{NASTY} dir/{NASTY}", "nasty")
    trial.write("-n")
    trial.write("linked/to/file", "file")
    (trial.workspace / "link").symlink_to("linked")
    (trial.workspace / "dangling").symlink_to("nowhere")
    (trial.workspace / "empty").mkdir()
    outputs = ("out", f"{NASTY}.out")
    command = (
        f"ls many | wc -l > out; cat {shlex.quote(f'{NASTY} dir/{NASTY}')} link/to/file >> out;"
        f" ls -d empty ./-n >> out; cp out {shlex.quote(f'{NASTY}.out')}"
    )
    ended = trial.run(
        trial.spec(text(command, depth, inputs=(), outputs=outputs), outputs=(OutputFile("out"),))
    )
    assert ended.sure.exit_code == 0, ended.log
    lines = str(1100 * (1 + NASTY.count("\n")))
    assert (trial.workspace / "out").read_text() == f"{lines}\nnastyfile./-n\nempty\n"
    assert (trial.workspace / f"{NASTY}.out").exists()
    assert not list((trial.workspace / PLACE).parent.iterdir())


def test_what_cannot_be_made_is_told(trial: Trial) -> None:
    copied = text("echo ran", "copy-minimal")
    ended = trial.run(trial.spec(copied, outputs=(OutputFile("out"),)))
    assert ended.sure.exit_code == 1
    assert "rule it's: the shadow directory: it could not be made" in ended.log
    assert "ran" not in ended.log


def test_what_lies_with_our_own_files_is_found(trial: Trial) -> None:
    trial.write("in")
    trial.write(".mantik/files/1/command", 'echo "$0 $MANTIK_WORKSPACE" > out')
    start = wrap_shadow(
        PLACE, "minimal", "bash .mantik/files/1/command", rule="x", inputs=["in"], outputs=["out"]
    )
    ended = trial.run(trial.spec(start, outputs=(OutputFile("out"),)))
    assert ended.sure.exit_code == 0, ended.log
    assert (trial.workspace / "out").read_text() == f".mantik/files/1/command {trial.workspace}\n"
