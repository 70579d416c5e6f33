"""What a run says: its job's output, and its controller's."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.runs import controller
from snakemake_executor_plugin_mantik.runs.known import Here

LOOK_S: Final = 0.5
"""Seconds between two looks at a log that grows."""

_PIECE: Final = 1 << 16


def printed(run: Here, *, follow: bool, of_controller: bool) -> Iterator[str]:
    """The text of a run's log, in pieces.

    Args:
        run: the run.
        follow: whether to wait for what comes, until the run is over.
        of_controller: what Snakemake says, and not the job's output.
    """
    if (follow and run.alive) or of_controller or _job_log(run) is None:
        yield from _grown(run, follow=follow)
    if not of_controller and (log := _job_log(run)) is not None:
        yield from _all(log)


def _job_log(run: Here) -> Path | None:
    """The output of the last job that has ended."""
    for record in reversed(run.tries):
        path = run.workdir / record.log
        if record.log and path.is_file():
            return path
    return None


def _grown(run: Here, *, follow: bool) -> Iterator[str]:
    with run.directory.log.open(errors="replace") as file:
        while True:
            # Asked before it is read: what is written after that is read once more.
            alive = follow and controller.is_alive(run.directory)
            while text := file.read(_PIECE):
                yield text
            if not alive:
                return
            time.sleep(LOOK_S)


def _all(path: Path) -> Iterator[str]:
    with path.open(errors="replace") as file:
        while text := file.read(_PIECE):
            yield text
