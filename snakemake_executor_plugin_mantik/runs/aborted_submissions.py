"""Runs that were being submitted when their process was killed: ended in MLflow. Needs mlflow.

What is submitted is in a directory of its own, which is renamed once its run is made in MLflow, and
whose lock its process holds. Before the run is asked for, the directory has the request, and a tag
that only this submission's run has. What a process that is no more has left tells so which run, if
any, nobody will ever go on with.
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
from snakemake_executor_plugin_mantik.runs.directories import NEW_PREFIX, RunDirectory, runs_home
from snakemake_executor_plugin_mantik.runs.request import read_request
from snakemake_executor_plugin_mantik.runs.store import (
    SUBMISSION,
    RunStore,
    quote_filter,
    store_exists,
)

NEVER: Final = "it was never submitted"
_STALE_S: Final = 86400.0
"""Seconds after which what is left is removed where no run was asked for yet."""
ARRIVES_S: Final = 300.0
"""Seconds after which a server has made the run that it was asked for, or never will."""
GIVE_UP_S: Final = 30 * 86400.0
"""Seconds after which it is removed where MLflow could not be asked in all that time."""


@contextmanager
def mark_unfinished(stage: RunDirectory) -> Iterator[None]:
    """Let others see that the run of a directory is being submitted.

    Raises:
        OSError: its lock cannot be taken.
    """
    with open_private(stage.making, "ab") as lock:
        take_lock(lock)
        yield


def submission_tag(stage: RunDirectory) -> dict[str, str]:
    """The tag of the run that a directory is to become."""
    return {SUBMISSION: stage.path.name.removeprefix(NEW_PREFIX)}


def end_aborted(store: RunStore, stage: RunDirectory) -> None:
    """End the run of a submission in MLflow, if it has one that never got its directory.

    Raises:
        MantikError: MLflow cannot be asked.
    """
    for tag, value in submission_tag(stage).items():
        for run in store.search(f"tags.`{tag}` = {quote_filter(value)}"):
            run_id = str(run.info.run_id)
            if not RunDirectory(runs_home() / run_id).request.exists():
                store.end(run_id, "KILLED", NEVER)


def remove_aborted() -> list[MantikError]:
    """End the runs whose submission was killed, and remove what is left of it.

    Returns:
        Why some could not be ended, for each store; they stay for the next time.
    """
    failed: dict[str, MantikError] = {}
    for path in runs_home().glob(f"{NEW_PREFIX}*"):
        try:
            _clear(path, failed)
        except OSError:  # it has just been renamed or removed, or is none of ours
            continue
    return list(failed.values())


def _clear(path: Path, failed: dict[str, MantikError]) -> None:
    """Clear up one directory; a store that does not answer joins the `failed`, asked no more."""
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
    """Whether there is no run of a submission at a store any more that has not ended."""
    if uri in failed or not store_exists(uri):
        return False
    try:
        end_aborted(RunStore(uri), stage)
    except MantikError as error:
        failed[uri] = error
        return False
    return True


def _store(stage: RunDirectory) -> str:
    """The store that was asked for the run; empty: none was yet."""
    try:
        return read_request(stage).tracking_uri
    except MantikError:
        return ""
