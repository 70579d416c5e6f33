"""Find and read the runs submitted from this machine, from their directories alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.runs import controller
from snakemake_executor_plugin_mantik.runs.directories import NEW_PREFIX, RunDirectory, runs_home
from snakemake_executor_plugin_mantik.runs.request import RunRequest, read_request

_SHORTEST: Final = 4
"""The least characters of a run's id that identify it."""


@dataclass(frozen=True)
class LocalRun:
    """A run that was submitted from this machine.

    Attributes:
        alive: whether its controller is alive.
        end: how its workflow ended (`RunDirectory.read_end`); None if it is not over.
    """

    directory: RunDirectory
    request: RunRequest
    alive: bool
    end: Mapping[str, Any] | None

    @property
    def gone(self) -> bool:
        """Whether the run is not over, but its controller is gone."""
        return not self.alive and self.end is None

    @property
    def workdir(self) -> Path:
        """The snapshot of the project: the workflow's working directory."""
        return self.directory.path / self.request.folder

    @property
    def tries(self) -> list[TryRecord]:
        """The tries of its job in the journal, the oldest first."""
        return controller.tries_in(self.workdir)


def read_local_run(directory: RunDirectory) -> LocalRun:
    """Read a run from its directory.

    Raises:
        MantikError: the directory's request cannot be read.
    """
    request = read_request(directory)
    # In this order: a controller records the end while it is alive.
    alive = controller.is_alive(directory)
    return LocalRun(directory, request, alive, directory.read_end())


def list_local_runs() -> list[LocalRun]:
    """List the runs submitted from this machine, the latest first, without unreadable ones."""
    found = []
    for path in _directories():
        try:
            found.append(read_local_run(RunDirectory(path)))
        except MantikError:
            continue
    return sorted(found, key=lambda each: each.request.created, reverse=True)


def find_local_run(word: str) -> LocalRun | None:
    """Find a run of this machine by its id, the beginning of its id, or its name.

    Raises:
        UserError: several runs match.
        MantikError: the request of one whose id matches cannot be read.
    """
    if "/" in word:
        return None
    if (runs_home() / word / "request.json").is_file():
        return read_local_run(RunDirectory(runs_home() / word))
    close = [p for p in _directories() if len(word) >= _SHORTEST and p.name.startswith(word)]
    found = [read_local_run(RunDirectory(path)) for path in close]
    found = found or [each for each in list_local_runs() if each.request.name == word]
    if len(found) > 1:
        raise ambiguous_run(word, [each.request.run_id for each in found])
    return found[0] if found else None


def ambiguous_run(word: str, ids: list[str]) -> UserError:
    """Return the error for a word that matches several runs."""
    listed = "".join(f"\n  {run_id}" for run_id in ids)
    return UserError(f"{word!r} matches several runs:{listed}", do="Use the id of one of them")


def _directories() -> list[Path]:
    runs = runs_home()
    if not runs.is_dir():
        return []
    return [p for p in runs.iterdir() if not p.name.startswith(NEW_PREFIX) and p.is_dir()]
