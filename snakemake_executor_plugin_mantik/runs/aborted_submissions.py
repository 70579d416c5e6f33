"""End the MLflow runs of submissions whose process was killed. Needs mlflow.

A submission prepares a directory of its own, and its process holds a lock in it. The directory is
renamed once the run exists in MLflow. Before the submission creates the run, it writes the request
there, with a tag that only this submission's run has. So the directory of a dead process identifies
the run, if any, that no process will continue.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.common.locks import take_lock
from snakemake_executor_plugin_mantik.common.state_directory import open_private

from .directories import NEW_PREFIX, RunDirectory, runs_home
from .request import read_request
from .store import SUBMISSION, RunStore, quote_filter, store_exists

NEVER: Final = "it was never submitted"
_STALE_S: Final = 86400.0
"""Seconds after which a directory is removed that has no lock file yet."""
ARRIVES_S: Final = 300.0
"""Seconds after which a server has created a requested run, or never will."""
GIVE_UP_S: Final = 30 * 86400.0
"""Seconds after which a directory is removed although MLflow never answered."""


@contextmanager
def mark_unfinished(stage: RunDirectory) -> Iterator[None]:
    """Mark a directory as being submitted from, by a lock on its file `making`.

    Raises:
        OSError: the lock file cannot be opened, or the file system has no locks.
    """
    with open_private(stage.making, "ab") as lock:
        take_lock(lock)
        yield


def submission_tag(stage: RunDirectory) -> dict[str, str]:
    """Return the tag that identifies the run of a submission."""
    return {SUBMISSION: stage.path.name.removeprefix(NEW_PREFIX)}


def end_aborted(store: RunStore, stage: RunDirectory) -> None:
    """End the MLflow run of a submission, if one exists that has no run directory.

    Raises:
        MantikError: a request to MLflow fails.
    """
    for tag, value in submission_tag(stage).items():
        for run in store.search(f"tags.`{tag}` = {quote_filter(value)}"):
            run_id = str(run.info.run_id)
            if not RunDirectory(runs_home() / run_id).request.exists():
                store.end(run_id, "KILLED", NEVER)


def remove_aborted() -> dict[str, MantikError]:
    """End the runs whose submission was killed, and remove their directories.

    Returns:
        By store, why it failed. The directories of its runs stay for the next call, up to
        `GIVE_UP_S`.
    """
    failed: dict[str, MantikError] = {}
    for path in runs_home().glob(f"{NEW_PREFIX}*"):
        try:
            _clear(path, failed)
        except OSError:  # just renamed or removed, or another user's
            continue
    return failed


def _clear(path: Path, failed: dict[str, MantikError]) -> None:
    """Clear up one directory; add a store that does not answer to `failed`, and skip it then."""
    stage, age = RunDirectory(path), time.time() - path.stat().st_mtime
    if not stage.making.exists():
        if age > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)
        return
    with stage.making.open("rb") as lock:
        if not take_lock(lock):
            return
        uri = _store(stage)
        if uri and not _ended(uri, stage, failed) and age < GIVE_UP_S:
            return
        if not uri or age > ARRIVES_S:
            shutil.rmtree(path, ignore_errors=True)


def _ended(uri: str, stage: RunDirectory, failed: dict[str, MantikError]) -> bool:
    """Make sure that no run of a submission is open at a store; return whether that succeeded."""
    if uri in failed or not store_exists(uri):
        return False
    try:
        end_aborted(RunStore(uri), stage)
    except MantikError as error:
        failed[uri] = error
        return False
    return True


def _store(stage: RunDirectory) -> str:
    """Return the store that the run was requested from; empty: none that is known."""
    try:
        return read_request(stage).tracking_uri
    except MantikError:
        return ""
