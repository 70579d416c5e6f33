"""Where runs lie on this machine: a directory per run, below one that belongs to the user."""

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.state_directory import data_home, make_private

RUNS_VARIABLE: Final = "MANTIK_RUNS"
"""The variable that names the directory of all runs."""

NEW_PREFIX: Final = ".new-"
"""How the name of a run directory begins until its run is made in MLflow."""

CONFIGS: Final = "site"
"""In a run directory: where the backend config is, under the site's name."""

_PROJECTS: Final = "project"


def runs_home(environ: Mapping[str, str] | None = None) -> Path:
    """The directory of all runs, which need not be there yet."""
    known = os.environ if environ is None else environ
    if given := known.get(RUNS_VARIABLE):
        return Path(given).expanduser().absolute()
    return data_home(known) / "runs"


def make_runs_home(environ: Mapping[str, str] | None = None) -> Path:
    """The directory of all runs; it is made if it is not there, closed to others.

    Raises:
        UserError: it cannot be made.
    """
    found = runs_home(environ)
    try:
        make_private(found)
    except OSError as error:
        raise UserError(
            f"it cannot be made ({error.strerror or error})",
            where=str(found),
            do=f"Name another directory for runs with {RUNS_VARIABLE}",
        ) from None
    return found


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run directory."""

    path: Path

    @property
    def request(self) -> Path:
        """What the run was asked for."""
        return self.path / "request.json"

    @property
    def log(self) -> Path:
        """What the controller and Snakemake have said."""
        return self.path / "snakemake.log"

    @property
    def lock(self) -> Path:
        """Held while a controller, or a Snakemake that it started, is there."""
        return self.path / "lock"

    @property
    def making(self) -> Path:
        """Held by the process that submits the run, until it is made."""
        return self.path / "making"

    @property
    def cancelled(self) -> Path:
        """There if somebody has asked for the run to be cancelled."""
        return self.path / "cancelled"

    @property
    def ended(self) -> Path:
        """There when the workflow is over and nothing of it is at the site."""
        return self.path / "ended.json"

    @property
    def told(self) -> Path:
        """There when MLflow knows how the run ended."""
        return self.path / "told"

    def read_end(self) -> Mapping[str, Any] | None:
        """Return how the workflow ended: `exit_code` and `time`.

        None means that it has not, or that jobs may be left.
        """
        with suppress(OSError, ValueError):
            found: Mapping[str, Any] = json.loads(self.ended.read_text())
            return found
        return None

    def write_end(self, code: int) -> None:
        """Record that the workflow is over, with its exit code."""
        new = self.ended.with_suffix(".new")
        new.write_text(json.dumps({"exit_code": code, "time": time.time()}))
        new.replace(self.ended)

    def project(self, name: str) -> Path:
        """The snapshot of a project of this name: the workflow's working directory."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40]
        return self.path / _PROJECTS / (readable or "project")

    def config(self, site: str, suffix: str) -> Path:
        """The copy of a site's backend config."""
        return self.path / CONFIGS / f"{site}{suffix}"
