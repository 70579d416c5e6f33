"""`smk-mantik track` with what earlier runs left."""

import fcntl
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.cli.track import track
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.tracking.process import WORKER_LOCK
from snakemake_executor_plugin_mantik.tracking.store import DIRECTORY
from tests.tracking.written import Written

NOWHERE = "http://127.0.0.1:9"


def leave(directory: Path, **runs: str) -> None:
    """Leave runs that have ended untold, by name where they go."""
    written = Written(directory, "")
    for name, uri in runs.items():
        written.end(written.job(name, uri=uri))
    written.journal.close()
    (directory / DIRECTORY).mkdir(parents=True, exist_ok=True)


def called(directory: Path) -> "subprocess.CompletedProcess[str]":
    command = "from snakemake_executor_plugin_mantik.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", command, "track", "-d", str(directory)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.software("MLflow in a file")
def test_what_is_told_and_what_is_left(tmp_path: Path) -> None:
    leave(tmp_path, gone=NOWHERE, here=f"sqlite:///{tmp_path}/mlflow.db")
    done = called(tmp_path)
    assert done.returncode == 1, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("1 run published, 1 left: ")
    assert "127.0.0.1" in line


@pytest.mark.software("MLflow in a file")
def test_all_is_told(tmp_path: Path) -> None:
    leave(tmp_path, a=f"sqlite:///{tmp_path}/mlflow.db", b=f"sqlite:///{tmp_path}/mlflow.db")
    done = called(tmp_path)
    assert (done.returncode, done.stdout) == (0, "2 runs published, 0 left.\n"), done.stderr
    done = called(tmp_path)
    assert (done.returncode, done.stdout) == (0, "0 runs published, 0 left.\n"), done.stderr


@pytest.mark.software("MLflow in a file")
@pytest.mark.nightly
def test_a_workflow_that_nobody_goes_on_with_was_killed(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    written = Written(tmp_path, uri)
    for key, name in (("one", "a"), ("two", "b")):
        written.key = written.journal.tracked.begin(f"identity of {key}")
        written.journal.tracked.describe(written.key, written.data(key))
        record = written.job(name)
        if name == "a":
            written.journal.submitting(record.id, "batch")
    written.journal.close()
    (tmp_path / DIRECTORY).mkdir(parents=True)

    with closing(Journal(tmp_path / STATE)):  # a Snakemake that runs looks after them itself
        called(tmp_path)
        assert states(uri) == {
            "one": "RUNNING",
            "two": "RUNNING",
            "a": "SCHEDULED",
            "b": "SCHEDULED",
        }
    done = called(tmp_path)

    assert done.returncode == 0, done.stderr
    # A job of the one may still run; nobody has sent the other's.
    assert states(uri) == {"one": "RUNNING", "two": "KILLED", "a": "SCHEDULED", "b": "KILLED"}


def states(uri: str) -> dict[str, str]:
    runs = MlflowClient(tracking_uri=uri).search_runs(["0"])
    return {run.info.run_name: run.info.status for run in runs}


def test_another_process_is_not_waited_for(tmp_path: Path) -> None:
    leave(tmp_path, gone=NOWHERE)
    with (tmp_path / DIRECTORY / WORKER_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = called(tmp_path)
    assert done.returncode == 1
    assert "0 runs published, 1 left: another process is publishing" in done.stdout


def test_a_directory_without_runs_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run has been tracked"):
        track(tmp_path)
