"""The runs that were submitted from here, and how they are: read from their directories alone."""

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
"""Characters of a run's id that are enough to name it."""


@dataclass(frozen=True)
class LocalRun:
    """A run that was submitted from here.

    Attributes:
        directory: of the run.
        request: what it was asked for.
        alive: whether its controller is there.
        end: how its workflow ended; None: it has not.
    """

    directory: RunDirectory
    request: RunRequest
    alive: bool
    end: Mapping[str, Any] | None

    @property
    def gone(self) -> bool:
        """Whether nobody looks after a run that is not over."""
        return not self.alive and self.end is None

    @property
    def workdir(self) -> Path:
        """The snapshot of the project, which the workflow runs in."""
        return self.directory.path / self.request.folder

    @property
    def tries(self) -> list[TryRecord]:
        """What the journal knows of its job, the oldest first."""
        return controller.tries_in(self.workdir)


def read_local_run(directory: RunDirectory) -> LocalRun:
    """A run that was submitted from here.

    Raises:
        MantikError: its directory cannot be read.
    """
    request = read_request(directory)
    # In this order: it writes down its end while it is alive.
    alive = controller.is_alive(directory)
    return LocalRun(directory, request, alive, directory.read_end())


def list_local_runs() -> list[LocalRun]:
    """All runs that were submitted from here, the latest first; what cannot be read is left out."""
    found = []
    for path in _directories():
        try:
            found.append(read_local_run(RunDirectory(path)))
        except MantikError:
            continue
    return sorted(found, key=lambda each: each.request.created, reverse=True)


def find_local_run(word: str) -> LocalRun | None:
    """The run that a word names, by id, the beginning of it, or name; None: none from here.

    Raises:
        UserError: it may be several.
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
    """The mistake that a word names several runs."""
    listed = "".join(f"\n  {run_id}" for run_id in ids)
    return UserError(f"{word!r} may be several runs:{listed}", do="Name one of them by its id")


def _directories() -> list[Path]:
    runs = runs_home()
    if not runs.is_dir():
        return []
    return [p for p in runs.iterdir() if not p.name.startswith(NEW_PREFIX) and p.is_dir()]
