"""Sees to it that MLflow knows how a run ended, also where no job of it was ever sent."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.runs.directories import RunDirectory
from snakemake_executor_plugin_mantik.runs.request import RunRequest
from snakemake_executor_plugin_mantik.tracking.controller.messenger import WORKER
from snakemake_executor_plugin_mantik.tracking.outbox import Outbox
from snakemake_executor_plugin_mantik.tracking.store import DIRECTORY
from snakemake_executor_plugin_mantik.tracking.worker.process import OUTBOX

_REASON: Final = "it ended before a job was sent; see smk-mantik runs logs"


def run_status(directory: RunDirectory) -> str:
    """How a run that is over ended, in MLflow's words."""
    end = directory.read_end()
    if end is not None and end["exit_code"] == 0:
        return "FINISHED"
    return "KILLED" if directory.cancelled.exists() else "FAILED"


def settle_run(directory: RunDirectory, request: RunRequest) -> None:
    """See to it that MLflow knows how a run ended that is over. Imports mlflow if it does not.

    What is still in the workflow's outbox goes first, by a process of its own.

    Raises:
        MantikError: MLflow cannot be asked.
    """
    if directory.told.exists():
        return
    pending, told = _outbox(directory, request)
    if pending:
        _tell_rest(directory.path / request.folder)
        return
    if not told:
        from snakemake_executor_plugin_mantik.runs.store import RunStore

        RunStore(request.tracking_uri).end(request.run_id, run_status(directory), _REASON)
    directory.told.touch()


def _outbox(directory: RunDirectory, request: RunRequest) -> tuple[bool, bool]:
    """Whether the tracking of jobs has something left to tell, and whether it has told the end."""
    path = directory.path / request.folder / DIRECTORY / OUTBOX
    if not path.exists():
        return False, False
    try:
        with closing(Outbox(path)) as outbox:
            try_id = outbox.adopted(request.run_id)
            return outbox.pending() > 0, bool(try_id) and outbox.settled(try_id)
    except sqlite3.Error:
        return False, False


def _tell_rest(workdir: Path) -> None:
    with (workdir / DIRECTORY / "worker.log").open("ab") as log:
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-P", "-m", WORKER],
            cwd=workdir, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            start_new_session=True, check=False,
        )  # fmt: skip
