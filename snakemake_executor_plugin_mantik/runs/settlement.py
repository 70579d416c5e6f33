"""Report the end of a run to MLflow, even if no job of it was submitted."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.tracking.controller.worker_client import WORKER
from snakemake_executor_plugin_mantik.tracking.outbox import Outbox
from snakemake_executor_plugin_mantik.tracking.store import DIRECTORY
from snakemake_executor_plugin_mantik.tracking.worker.process import OUTBOX

from .directories import RunDirectory
from .request import RunRequest

_REASON: Final = "it ended before a job was submitted; see smk-mantik runs logs"


def run_status(directory: RunDirectory) -> str:
    """Return MLflow's status for a run that is over."""
    end = directory.read_end()
    if end is not None and end["exit_code"] == 0:
        return "FINISHED"
    return "KILLED" if directory.cancelled.exists() else "FAILED"


def settle_run(directory: RunDirectory, request: RunRequest) -> None:
    """Report the end of a run that is over to MLflow; import mlflow only if needed.

    If events are left in the workflow's outbox, only start a worker that publishes them.

    Raises:
        MantikError: a request to MLflow fails.
    """
    if directory.reported.exists():
        return
    pending, published = _outbox(directory, request)
    if pending:
        _start_worker(directory.path / request.folder)
        return
    if not published:
        from .store import RunStore

        RunStore(request.tracking_uri).end(request.run_id, run_status(directory), _REASON)
    directory.reported.touch()


def _outbox(directory: RunDirectory, request: RunRequest) -> tuple[bool, bool]:
    """Return whether the outbox holds unpublished events, and whether it has published the end."""
    path = directory.path / request.folder / DIRECTORY / OUTBOX
    if not path.exists():
        return False, False
    try:
        with closing(Outbox(path)) as outbox:
            try_id = outbox.adopted(request.run_id)
            return outbox.pending() > 0, bool(try_id) and outbox.is_over(try_id)
    except sqlite3.Error:
        return False, False


def _start_worker(workdir: Path) -> None:
    with (workdir / DIRECTORY / "worker.log").open("ab") as log:
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-P", "-m", WORKER],
            cwd=workdir, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            start_new_session=True, check=False,
        )  # fmt: skip
