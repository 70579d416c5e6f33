"""The directories of runs on this machine: one per run, in a directory of the user."""

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
"""The prefix of a run directory's name until its run exists in MLflow."""

CONFIGS: Final = "site"
"""The folder of a run directory that holds the backend config, under the site's name."""

_PROJECTS: Final = "project"


def runs_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of all runs, which may not exist yet."""
    known = os.environ if environ is None else environ
    if given := known.get(RUNS_VARIABLE):
        return Path(given).expanduser().absolute()
    return data_home(known) / "runs"


def make_runs_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of all runs; create it if needed, closed to others.

    Raises:
        UserError: the directory cannot be created.
    """
    found = runs_home(environ)
    try:
        make_private(found)
    except OSError as error:
        raise UserError(
            f"the directory for runs cannot be created ({error.strerror or error})",
            where=str(found),
            do=f"Set {RUNS_VARIABLE} to another directory",
        ) from None
    return found


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run directory."""

    path: Path

    @property
    def request(self) -> Path:
        return self.path / "request.json"

    @property
    def log(self) -> Path:
        """The output of the controller and of Snakemake."""
        return self.path / "snakemake.log"

    @property
    def lock(self) -> Path:
        """Locked by a controller and its Snakemake, or a command that ends or removes the run."""
        return self.path / "lock"

    @property
    def making(self) -> Path:
        """Locked by the process that submits the run."""
        return self.path / "making"

    @property
    def cancelled(self) -> Path:
        """Exists if the user has asked to cancel the run since it was last started."""
        return self.path / "cancelled"

    @property
    def ended(self) -> Path:
        """Exists when the workflow is over and no job of it is left at the site."""
        return self.path / "ended.json"

    @property
    def reported(self) -> Path:
        """Exists when MLflow knows how the run ended."""
        return self.path / "told"

    def read_end(self) -> Mapping[str, Any] | None:
        """Return how the workflow ended: `exit_code` and `time`.

        None means that it has not ended, or that jobs may be left.
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
        """Return the path of a project's snapshot, the workflow's working directory."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40]
        return self.path / _PROJECTS / (readable or "project")

    def config(self, site: str, suffix: str) -> Path:
        """Return the path of the copy of a site's backend config."""
        return self.path / CONFIGS / f"{site}{suffix}"
