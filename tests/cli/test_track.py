"""`smk-mantik track` with an outbox that earlier runs left."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.cli.track import track
from snakemake_executor_plugin_mantik.errors import UserError
from snakemake_executor_plugin_mantik.tracking.outbox import Kind, Outbox
from snakemake_executor_plugin_mantik.tracking.store import DIRECTORY
from snakemake_executor_plugin_mantik.tracking.worker import LOCK, OUTBOX

END = {"status": "FINISHED", "time": 2000.0, "words": "", "exit_code": 0, "log": ""}
NOWHERE = "http://127.0.0.1:9"


def leave(directory: Path, **runs: str) -> None:
    """Leave runs that have ended untold, by name where they go."""
    (directory / DIRECTORY).mkdir(parents=True, exist_ok=True)
    outbox = Outbox(directory / DIRECTORY / OUTBOX)
    for name, uri in runs.items():
        data = {
            "name": name, "tags": {}, "params": {}, "experiment_id": "", "experiment": "",
            "config": "none",
        }  # fmt: skip
        outbox.add_run(name, uri, data)
        outbox.add(name, Kind.END, END)
    outbox.close()


def called(directory: Path) -> "subprocess.CompletedProcess[str]":
    command = "from snakemake_executor_plugin_mantik.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", command, "track", "-d", str(directory)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_what_is_told_and_what_is_left(tmp_path: Path) -> None:
    leave(tmp_path, gone=NOWHERE, here=f"sqlite:///{tmp_path}/mlflow.db")
    done = called(tmp_path)
    assert done.returncode == 1, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("1 run told, 1 left: ")
    assert "127.0.0.1" in line


def test_all_is_told(tmp_path: Path) -> None:
    leave(tmp_path, a=f"sqlite:///{tmp_path}/mlflow.db", b=f"sqlite:///{tmp_path}/mlflow.db")
    done = called(tmp_path)
    assert (done.returncode, done.stdout) == (0, "2 runs told, 0 left.\n"), done.stderr
    done = called(tmp_path)
    assert (done.returncode, done.stdout) == (0, "0 runs told, 0 left.\n"), done.stderr


def test_another_process_is_not_waited_for(tmp_path: Path) -> None:
    leave(tmp_path, gone=NOWHERE)
    with (tmp_path / DIRECTORY / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = called(tmp_path)
    assert done.returncode == 1
    assert "0 runs told, 1 left: another process is telling" in done.stdout


def test_a_directory_without_runs_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run has been tracked"):
        track(tmp_path)
