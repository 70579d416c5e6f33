"""Where the paths of a job are at its site, and how its command is told.

The workspace mirrors the working directory, so a relative path means the same at both ends. A path
that is not below the working directory has a mirror in the workspace, `.mantik/outside/…`. What is
written as an absolute path stays one, because the command may have changed its directory; what goes
up from the working directory stays relative for the same reason.

    here, in /home/me/run               at the site, in the workspace /scratch/w
    data/x.csv                          data/x.csv
    ../data/x.csv                       .mantik/outside/home/me/data/x.csv
    /home/me/run/data/x.csv             /scratch/w/data/x.csv
    /data/x.csv                         /scratch/w/.mantik/outside/data/x.csv
    /dev/null                           /dev/null
"""

import os
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import OURS, outside_path
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.context import RuleContext
from snakemake_executor_plugin_mantik.rules.resources import choose_site, given_resources

_EVERYWHERE = ("/dev", "/proc", "/sys")
"""What each machine has of its own: never staged, and called the same everywhere."""


class JobPaths:
    """Where paths of this machine are at one site."""

    def __init__(self, workdir: Path, workspace: Callable[[], str]) -> None:
        """Make the places of one site.

        Args:
            workdir: the workflow's working directory, links resolved.
            workspace: tells the absolute path of the workspace; asked only if that is needed.
        """
        self.workdir = str(workdir)
        self._tell_workspace = workspace
        self._real = lru_cache(maxsize=None)(os.path.realpath)

    @cached_property
    def workspace(self) -> str:
        """The absolute path of the workspace at the site, without a slash at its end."""
        return self._tell_workspace().rstrip("/")

    def place(self, path: object) -> str | None:
        """The place of a path in the workspace; None for what every machine has of its own.

        Args:
            path: absolute, or relative to the working directory.

        Raises:
            UserError: it is where our own things are at a site.
        """
        absolute = self._absolute(str(path))
        if _is_below(absolute, _EVERYWHERE):
            return None
        inside = self._inside(absolute)
        if inside is None:
            return outside_path(absolute)
        if _is_below(inside, (OURS,)):
            raise UserError(
                f"the path {path} is where the executor's own files are at a site",
                do=f"Give the directory {OURS} another name",
            )
        return inside

    def at_site(self, path: object) -> str:
        """What a command at the site calls a path; the text itself where it means the same."""
        text = str(path)
        if not os.path.isabs(text):
            # Neither `./` nor `//` is touched where nothing has to be.
            return text if ".." not in text.split("/") else self.place(text) or text
        place = self.place(text)
        return text if place is None else os.path.normpath(f"{self.workspace}/{place}")

    def _absolute(self, path: str) -> str:
        """The absolute path, without `..`: as the kernel finds it, links before a `..` followed."""
        parts = os.path.join(self.workdir, path).split("/")
        at = ""
        for part in parts:
            if part == "..":
                at = os.path.dirname(self._real(at or "/")).rstrip("/")
            elif part not in ("", "."):
                at = f"{at}/{part}"
        return at or "/"

    def _inside(self, absolute: str) -> str | None:
        """The path relative to the working directory, if it is in it, be it through a link."""
        folder, name = os.path.split(absolute)
        for path in (absolute, os.path.join(self._real(folder), name)):
            if path == self.workdir:
                return "."
            if path.startswith(f"{self.workdir.rstrip('/')}/"):
                return os.path.relpath(path, self.workdir)
        return None


def find_places(job: Job, context: RuleContext) -> JobPaths:
    """The places of the site that a job runs at.

    Raises:
        UserError: the job names a site that there is not.
    """
    site = choose_site(given_resources(job), context.sites)
    return JobPaths(context.workdir, lambda: context.workspace(site))


def is_kept_in_storage(path: Any) -> bool:
    """Whether a path is that of a `storage(…, retrieve=False)`, which is the command's to fetch."""
    is_storage = getattr(path, "is_storage", False)
    return bool(is_storage and path.should_not_be_retrieved_from_storage)


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
