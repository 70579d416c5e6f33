"""Map paths on this machine to paths at a site.

The workspace mirrors the working directory, and the directories above it (`jobs.paths.UPS`) mirror
those above the working directory, so a relative path is the same at both ends. Any other path
outside is mirrored below `.mantik/outside/` in the workspace. An absolute path stays absolute,
because the command may change its directory. A relative path with `..` stays relative, because a
command that has done so may put `../` before it.

    here, in /home/me/a/b/c/run         at the site, in the workspace /scratch/w/up3/up2/up1/workdir
    data/x.csv                          data/x.csv
    ../data/x.csv                       ../data/x.csv
    ../../../../x.csv                   .mantik/outside/home/me/x.csv
    /home/me/a/b/c/run/data/x.csv       /scratch/w/up3/up2/up1/workdir/data/x.csv
    /home/me/a/b/c/data/x.csv           /scratch/w/up3/up2/up1/data/x.csv
    /data/x.csv                         /scratch/w/up3/up2/up1/workdir/.mantik/outside/data/x.csv
    /dev/null                           /dev/null
"""

import os
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import (
    OURS,
    UP,
    display_path,
    outside_path,
    path_at_site,
)
from snakemake_executor_plugin_mantik.storage.paths import home_of, storable_path

from .. import Job
from ..context import RuleContext
from ..resources import choose_site, given_resources

_EVERYWHERE = ("/dev", "/proc", "/sys")
"""Directories that every machine has of its own. Never staged, and the same path everywhere."""


class JobPaths:
    """Maps paths of this machine to those at one site."""

    def __init__(self, workdir: Path, workspace: Callable[[], str]) -> None:
        """Map `workdir`, a path without links, to `workspace()`, which is called only if needed."""
        self.workdir = str(workdir)
        self._tell_workspace = workspace
        self._real = lru_cache(maxsize=None)(os.path.realpath)

    @cached_property
    def workspace(self) -> str:
        """The absolute path of the workspace at the site, without a trailing slash."""
        return self._tell_workspace().rstrip("/")

    def place(self, path: object) -> str | None:
        """Return a path relative to the workspace; None below `/dev`, `/proc` and `/sys`.

        `path` is absolute, or relative to the working directory. A file that may be a stored output
        has the path that its rule names.

        Raises:
            UserError: the path is in the executor's own directory at a site.
        """
        if (stored := storable_path(path)) is not None:
            return stored
        absolute = self._absolute(str(path))
        if _is_below(absolute, _EVERYWHERE):
            return None
        inside = self._inside(absolute)
        if inside is None:
            return outside_path(absolute, self.workdir)
        if _is_below(inside, (OURS,)):
            raise UserError(
                f"the path {path} is in the executor's own directory at a site",
                do=f"Rename the directory {OURS}",
            )
        return inside

    def at_site(self, path: object) -> str:
        """Return a path as a command at the site uses it; unchanged if it means the same there."""
        text = str(path)
        if not os.path.isabs(text):
            # Keep `./` and `//` in paths that need no change.
            if ".." not in text.split("/"):
                return text
            place = self.place(text) or text
            return display_path(place) if place.startswith(f"{UP}/") else place
        there = self.place(text)
        return text if there is None else os.path.normpath(path_at_site(self.workspace, there))

    def _absolute(self, path: str) -> str:
        """Return the absolute path without `..`. As in the kernel, `..` follows links before it."""
        parts = os.path.join(self.workdir, path).split("/")
        at = ""
        for part in parts:
            if part == "..":
                at = os.path.dirname(self._real(at or "/")).rstrip("/")
            elif part not in ("", "."):
                at = f"{at}/{part}"
        return at or "/"

    def _inside(self, absolute: str) -> str | None:
        """Return the path relative to the working directory, or None if it is outside.

        A path that is in the working directory through a link counts as inside.
        """
        folder, name = os.path.split(absolute)
        for path in (absolute, os.path.join(self._real(folder), name)):
            if path == self.workdir:
                return "."
            if path.startswith(f"{self.workdir.rstrip('/')}/"):
                return os.path.relpath(path, self.workdir)
        return None


def find_job_paths(job: Job, context: RuleContext) -> JobPaths:
    """Return the mapping of paths to the site that a job runs at.

    Raises:
        UserError: the job names an unknown site.
    """
    site = choose_site(given_resources(job), context.sites)
    return JobPaths(context.workdir, lambda: context.workspace(site))


def is_kept_in_storage(path: Any) -> bool:
    """Return whether a path is a `storage(…, retrieve=False)`, which the command itself fetches."""
    if not getattr(path, "is_storage", False) or storable_path(path) is not None:
        return False
    return bool(path.should_not_be_retrieved_from_storage)


def command_text(path: Any) -> str:
    """Return how a command on this machine names a file of a rule.

    A file that may be a stored output has the path that its rule names, as if it were not stored:
    commands and scripts compute with the text of their paths.
    """
    if storable_path(path) is not None:
        return home_of(path.storage_object.query)
    unfetched = getattr(path, "is_storage", False) and path.should_not_be_retrieved_from_storage
    return str(path.storage_object.query if unfetched else path)


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
