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

import filecmp
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import zip_longest
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, Final

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import RuleException
from snakemake.iocontainers import Namedlist
from snakemake_interface_common.exceptions import WorkflowError

from ...common.errors import UserError
from ...jobs.paths import OURS, UP, display_path, is_at, outside_path, path_at_site
from ...storage.paths import find_local_prefix, home_of, plain_local_path, storable_path
from .. import Job

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

        `path` is absolute, or relative to the working directory. A file that may be a remote output
        has the path that its rule names.

        Raises:
            UserError: the path is in the executor's own directory at a site.
        """
        if (stored := storable_path(path)) is not None:
            return stored
        absolute = self._absolute(str(path))
        if any(is_at(absolute, root) for root in _EVERYWHERE):
            return None
        inside = self._inside(absolute)
        if inside is None:
            return outside_path(absolute, self.workdir)
        if is_at(inside, OURS):
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


def is_kept_in_storage(path: Any) -> bool:
    """Return whether a path is a `storage(…, retrieve=False)`, which the command itself fetches."""
    stored = getattr(path, "is_storage", False) and storable_path(path) is None
    return bool(stored and path.should_not_be_retrieved_from_storage)


def command_text(path: Any) -> str:
    """Return how a command on this machine names a file of a rule.

    A file that may be a remote output has the path that its rule names, as if it were not stored:
    commands and scripts compute with the text of their paths.
    """
    if storable_path(path) is not None:
        return home_of(path.storage_object.query)
    unfetched = getattr(path, "is_storage", False) and path.should_not_be_retrieved_from_storage
    return str(path.storage_object.query if unfetched else path)


UNKNOWN: Final = str(TBDString())
"""The text of a value that Snakemake has not evaluated yet."""

BEFORE: Final = r"(?:(?<![\w.~/@%+\-)}\]*?])|(?<=\s-[A-Za-z])|(?<=file://))"
"""Context before a whole path: `-I/data` is an option with its value, `${A}/data` and `a/data` are
other paths."""
_WORD: Final = r"[^\s'\";|&<>()`]*"


def expand_params(job: Job, lists: tuple[Any, Any], resources: Any = None) -> Any:
    """Evaluate a job's parameters again, with other inputs and outputs, or other resources."""
    # Snakemake's `expand_params` reads only the resources of the job that it gets.
    source = job if resources is None else SimpleNamespace(resources=resources)
    made, _ = job.rule.expand_params(job.wildcards_dict, *lists, source)
    return made


def plain_params(job: Job, resources: Any = None) -> Any:
    """Return a job's parameters as if no file was stored.

    With `resources`, evaluate parameters again that are not determined.

    Raises:
        UserError: a parameter may be computed from an outdated file of this machine.
    """
    params, lists = job.params, (job.input, job.output)
    if resources is not None and UNKNOWN in str(params):
        params = expand_params(job, lists, resources)
    plain = make_plain(job)
    if plain is None:
        return params
    now = again = params
    stored = [path for path in (*job.input, *job.output) if storable_path(path) is not None]
    if stored:
        inputs, outputs = (type(each)(toclone=each, custom_map=command_text) for each in lists)
        with suppress(WorkflowError, RuleException):
            # Snakemake keeps those of the first attempt: not all that differs is due to names.
            now = expand_params(job, lists, resources)
            again = expand_params(job, (inputs, outputs), resources)

    def choose(value: Any, at_present: Any, named: Any) -> Any:
        text = map_texts(value, plain)
        # Without the local copy, a function that reads the file cannot be evaluated, either.
        if UNKNOWN in f"{value}{named}" or repr(named) == repr(map_texts(at_present, plain)):
            return text
        _refuse_outdated(job, stored)
        return map_texts(named, plain)

    values = iter([choose(*each) for each in zip_longest(params, now, again)])
    return type(params)(toclone=params, custom_map=lambda _: next(values))


def _refuse_outdated(job: Job, stored: list[Any]) -> None:
    """Refuse a job if a function may have read another file under a plain path than is stored."""
    for path in stored:
        home = command_text(path)
        if not (os.path.lexists(path) and os.path.lexists(home)) or os.path.samefile(path, home):
            continue
        if os.path.isdir(path) or os.path.isdir(home) or not filecmp.cmp(path, home, shallow=False):
            raise UserError(
                f"a parameter depends on {home}, of which another version lies on this machine",
                where=f"rule {job.rule.name}",
                do=f"Move {home} away",
            )


def make_plain(job: Job) -> Callable[[str], str] | None:
    """Return a function that names files plainly in a text; None if the workflow stores none.

    With a default storage provider, Snakemake calls `results/a.txt` by the path of a local copy,
    `.snakemake/storage/mantik/results/a.txt`. Programs use the text of their paths: as the name of
    a sample, as a column, as a parameter of a run in MLflow.
    """
    prefix = find_local_prefix(job.rule.workflow)
    if prefix is None:
        return None
    workdir, below = os.getcwd(), re.escape(os.path.relpath(prefix))
    copies = rf"(?P<above>{re.escape(workdir)}/|{BEFORE}(?:\.{{1,2}}/)*){below}"
    if os.path.isabs(prefix):
        copies = rf"{BEFORE}(?P<above>){re.escape(str(prefix))}"
    pattern = re.compile(rf"{copies}(?:/(?P<rest>{_WORD})|(?![\w.~@%+\-]))")

    def plain(match: re.Match[str]) -> str:
        path = plain_local_path(match["rest"] or "")
        return path if os.path.isabs(path) else (match["above"] + path) or "."

    return lambda text: pattern.sub(plain, text)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with `change` applied to all strings in it."""
    if isinstance(value, str) and not isinstance(value, TBDString):
        changed = change(value)
        return changed if changed != value else value
    if isinstance(value, PurePath):
        return type(value)(change(str(value)))
    if isinstance(value, Namedlist):
        return type(value)(toclone=value, custom_map=lambda item: map_texts(item, change))
    if type(value) in (list, tuple, set):
        return type(value)(map_texts(item, change) for item in value)
    if type(value) is dict:
        return {key: map_texts(item, change) for key, item in value.items()}
    return value
