"""A job that is asked to end says so, and leaves nothing running."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs.spec import Environment, OutputFile
from tests.support.trial import QUICK, Ended, Trial, session, signal_session, wait_until

AFTER = Environment(after_on_compute=("echo cleaned > after",))
GRACE_S = 2
"""For who does not use it."""


def session_of(process: "subprocess.Popen[str]") -> list[int]:
    """What still runs in the session that the script was started in."""
    found = []
    for member in session(process.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            found += [] if fields[0] == "Z" else [member]
    return found


def ended_by(trial: Trial, command: str, number: int, environment: Environment) -> Ended:
    """Ask a job to end that would wait for its command longer than the test does."""
    limits = replace(QUICK, grace_s=10_000)
    spec = trial.spec(command, environment=environment, limits=limits)
    process = trial.running(spec)
    os.kill(process.pid, number)
    ended = trial.end(spec, process)
    wait_until(lambda: session_of(process) == [])
    return ended


@pytest.mark.parametrize(
    ("number", "name", "own", "code"),
    [
        (signal.SIGTERM, "TERM", 0, 143),
        (signal.SIGINT, "INT", 0, 130),
        (signal.SIGTERM, "TERM", 7, 7),
    ],
)
def test_a_signal_reaches_the_command_and_the_marker(
    trial: Trial, number: int, name: str, own: int, code: int
) -> None:
    """The command's own code stays if it is one."""
    command = f'trap "echo got it; exit {own}" TERM; : > running; while :; do sleep 0.05; done'
    ended = ended_by(trial, command, number, AFTER)
    assert ended.returned == ended.sure.exit_code == code
    assert ended.sure.signal == name
    assert ended.sure.failed_step == ""
    assert "got it" in ended.log
    assert (trial.workspace / "after").read_text() == "cleaned\n"


def test_a_stubborn_command_is_killed_after_the_grace(trial: Trial) -> None:
    command = 'trap "" TERM; : > running; while :; do sleep 0.05; done'
    spec = replace(trial.spec(command), limits=replace(QUICK, grace_s=GRACE_S))
    process = trial.running(spec)
    asked = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    ended = trial.end(spec, process)
    assert time.monotonic() - asked >= GRACE_S
    wait_until(lambda: session_of(process) == [])
    assert ended.sure.exit_code == 143
    assert ended.sure.signal == "TERM"


def test_a_signal_to_every_process_as_slurm_sends_it(trial: Trial) -> None:
    spec = trial.spec("touch running; sleep 600", environment=AFTER)
    process = trial.running(spec)
    signal_session(process.pid, signal.SIGCONT, signal.SIGTERM)
    ended = trial.end(spec, process)
    assert ended.sure.exit_code == 143
    assert ended.sure.signal == "TERM"
    assert (trial.workspace / "after").read_text() == "cleaned\n"


def test_a_signal_in_a_step_before_the_command(trial: Trial) -> None:
    environment = Environment(
        before_on_compute=("touch running; sleep 600; touch later",),
        after_on_compute=AFTER.after_on_compute,
    )
    spec = trial.spec("echo not reached", environment=environment)
    ended = trial.signalled(spec, signal.SIGTERM)
    assert ended.sure.exit_code == 143
    assert ended.sure.failed_step == "before"
    assert "not reached" not in ended.log
    assert not (trial.workspace / "later").exists()
    assert (trial.workspace / "after").exists()


def test_a_signal_before_the_command_ends_in_a_marker_too(trial: Trial) -> None:
    """It comes while the claim is made."""
    trial.program("ln", '#!/bin/sh\nkill -TERM $PPID\nsleep 0.1\nexec /bin/ln "$@"\n')
    spec = trial.spec("echo not reached", secrets=("TOKEN",))
    secrets = trial.write(spec.paths.secrets, "TOKEN=x\n")
    ended = trial.run(spec)
    assert not secrets.exists()
    assert ended.returned == ended.sure.exit_code == 143
    assert ended.sure.signal == "TERM"
    assert ended.sure.failed_step == "workspace"
    assert "not reached" not in ended.log


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02])
def test_a_signal_at_any_time_ends_in_a_marker_or_in_no_claim(trial: Trial, delay: float) -> None:
    spec = trial.spec("sleep 600")
    process = trial.start(spec)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGTERM)
    ended = trial.end(spec, process)
    assert (ended.marker is not None) == (spec.paths.attempt_id in ended.entries)
    if ended.marker is not None:
        assert ended.marker.exit_code == 143
    wait_until(lambda: session_of(process) == [])


def test_a_signal_that_comes_before_the_payload_can_catch_it(trial: Trial, tmp_path: Path) -> None:
    """It has come before the payload is waited for, which it kills before it has said anything."""
    (tmp_path / "env").write_text(
        "set -T\n"
        "trap 'case $BASH_COMMAND in"
        ' "set -m") kill -TERM $$ ;;'
        ' "umask \\"\\$_m_umask\\"") sleep 10 ;;'
        " esac' DEBUG\n"
    )
    ended = trial.run(trial.spec("sleep 600"), env={"BASH_ENV": str(tmp_path / "env")})
    assert ended.returned == ended.sure.exit_code == 143
    assert (ended.sure.signal, ended.sure.failed_step) == ("TERM", "workspace")


def test_a_late_signal_does_not_undo_a_success(trial: Trial) -> None:
    trial.program("find", '#!/bin/sh\nkill -TERM $PPID\nexec /usr/bin/find "$@"\n')
    spec = trial.spec("echo done > out", outputs=(OutputFile("out"),))
    ended = trial.run(spec)
    assert ended.returned == ended.sure.exit_code == 0
    assert ended.sure.signal == ""
    assert [entry.path for entry in ended.sure.files] == ["out"]


def test_a_late_signal_may_be_why_the_command_failed(trial: Trial) -> None:
    trial.program("tail", '#!/bin/sh\nkill -TERM $PPID\nexec /usr/bin/tail "$@"\n')
    ended = trial.run(trial.spec("echo said; exit 3"))
    assert ended.returned == ended.sure.exit_code == 3
    assert ended.sure.signal == "TERM"


def test_a_warning_is_passed_on_and_ends_nothing(trial: Trial) -> None:
    command = (
        'trap "touch warned" USR1; : > running; until [ -e warned ]; do sleep 0.05; done; exit 0'
    )
    spec = trial.spec(command)
    process = trial.running(spec)

    def warned() -> bool:
        """A first one may come before the script has noted whom it started."""
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return (trial.workspace / "warned").exists()

    wait_until(warned)
    ended = trial.end(spec, process)
    assert ended.sure.exit_code == 0
    assert ended.sure.signal == ""


def test_nothing_survives_a_killed_script_but_its_command(trial: Trial) -> None:
    spec = trial.spec("echo $$ > running; exec sleep 600")
    process = trial.start(spec)
    running = trial.workspace / "running"
    wait_until(lambda: running.exists() and running.read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # The command, and the shell that waits for it.
    wait_until(lambda: len(session_of(process)) == 2)
    size = (trial.workspace / spec.paths.claim).stat().st_size
    time.sleep(QUICK.heartbeat_s + 0.5)
    assert (trial.workspace / spec.paths.claim).stat().st_size == size
    os.killpg(os.getpgid(int(running.read_text())), signal.SIGKILL)
    wait_until(lambda: session_of(process) == [])
    assert trial.end(spec, process).marker is None


def test_what_a_command_leaves_running_ends_with_it(trial: Trial) -> None:
    spec = trial.spec("sleep 600 & trap '' TERM; (while :; do sleep 1; done) & echo started")
    process = trial.start(spec)
    ended = trial.end(spec, process)
    assert ended.sure.exit_code == 0
    wait_until(lambda: session_of(process) == [])
