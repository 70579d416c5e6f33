"""Selection of the project files: files of the working directory to upload besides a job's inputs.

A rule names its inputs, but not the scripts that its command calls, nor their imports. So all small
files of the working directory are uploaded as project files, once per site and content, except:
hidden files and directories, files in the backend config's Exclude, files that jobs make or read
(they are uploaded as inputs) or that rules have made before, virtual environments and caches of
Python, `node_modules`, MLflow's own files, logs, profiles of Snakemake, files above the size limit,
and files that may hold a secret (`staging.secret_files`).
"""

import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from ..common.errors import UserError, one_line
from ..common.humanize import humanize_size
from ..jobs.paths import workspace_top
from .secret_files import NOTHING, Matching, Withheld

_WORD: Final = re.compile(r"[^\s'\"`()<>\[\]{},;:=|*?]+")
_QUOTED: Final = re.compile(r"'([^'\n]{1,200})'|\"([^\"\n]{1,200})\"")
_MISSING: Final = re.compile(
    r"no such file|not found|cannot (open|find|access)|can't open|could not (open|find)|"
    r"unable to open|does ?n[o']t exist|FileNotFound|Errno 2\b",
    re.IGNORECASE,
)
"""Lines in which a command says that it lacks a file."""

_SPOOLED: Final = re.compile(
    r"^/(usr|bin|sbin|lib\w*|etc|dev|proc|sys|run)/|/(job\d+/slurm_script|mom_priv/jobs/.*)$"
)
"""Programs, and the scheduler's copy of the script: shells and programs name them in messages."""

_OURS: Final = frozenset({".snakemake", ".mantik", ".git"})
UNSENT: Final = "but was not uploaded"
"""Words about a file that a job misses, and that no rule declares."""
_MOST_WORDS: Final = 20_000
_MOST_NAMED: Final = 3


def missed_files(
    text: str,
    workdir: Path,
    workspace: str,
    why: Callable[[str], str | None],
    *,
    known: Collection[str],
) -> list[str]:
    """Return sentences about the files that a text names, that are here, and not there at the site.

    Args:
        text: what a failed job wrote, and how it ended.
        workdir: the workflow's directory.
        workspace: that at the site, as jobs see it.
        why: returns why a path relative to `workdir` is no project file; None if it is one.
        known: the job's own inputs and outputs, relative to `workdir` or absolute.
    """
    found: dict[str, str] = {}
    for path in _named(text, workdir, workspace):
        if path in known or path in found or len(found) > _MOST_NAMED:
            continue
        local = workdir / path
        try:
            if not local.is_file() and not local.is_dir():
                continue
            outside = os.path.isabs(path)
            if outside and _SPOOLED.search(path):
                continue
            if outside and os.path.relpath(path, workdir) in known:
                found[path] = (
                    f"{one_line(path)} is a file of the rule, but outside the working directory,"
                    " so it has another path at the site: use the path that the command or script"
                    " gets ({input}, snakemake.input) instead of naming it."
                )
                continue
            reason = "it is outside the working directory" if outside else why(path)
            if reason is not None:
                size = "" if local.is_dir() else f" ({humanize_size(local.stat().st_size)})"
                found[path] = f"{one_line(path)} is here{size} {UNSENT}: {reason}."
        except (OSError, ValueError):  # a name that is too long, or that no file can have
            continue
    return list(found.values())[:_MOST_NAMED]


def _named(text: str, workdir: Path, workspace: str) -> Iterator[str]:
    """Yield what may be paths: relative to the directory, or absolute where a file is missing."""
    seen: set[str] = set()
    for line in reversed(text.splitlines()):  # the last lines say why it failed
        missing = _MISSING.search(line) is not None
        quoted = [one or other for one, other in _QUOTED.findall(line)]
        for word in [*quoted, *_WORD.findall(line)]:
            if word in seen:
                continue
            seen.add(word)
            if len(seen) > _MOST_WORDS:
                return
            path = _relative(word.rstrip(".!"), workdir, workspace)
            if path and (missing or not os.path.isabs(path)):
                yield path


def _relative(word: str, workdir: Path, workspace: str) -> str:
    """Return a word as a normal path; empty if it cannot be one of the user's files."""
    if word.startswith(f"{workspace_top(workspace)}/"):
        word = os.path.relpath(word, workspace)
    for root in (workspace, str(workdir)):
        if root and word.startswith(f"{root.rstrip('/')}/"):
            word = word[len(root.rstrip("/")) + 1 :]
    path = os.path.normpath(word) if word else ""
    if path.startswith("../"):
        path = os.path.normpath(workdir / path)
    plain = path not in ("", ".", "..", "/") and not _OURS & set(PurePosixPath(path).parts)
    return path if plain else ""


_GENERATED = frozenset({"__pycache__", "node_modules", "mlruns", "mlartifacts"})
_MLFLOW = "mlflow.db"
"""MLflow's own store, which changes with each run; beside it are SQLite's -wal and -shm."""

_LOG = (".log", "nohup.out")
"""Endings of the names of logs. `snakemake > run.log` and its like grow during the upload, and
differ in each run."""

MIB = 1 << 20

FILE_BYTES = MIB
"""Size above which files are no project files: larger ones are data, which rules name as inputs."""

_PROFILE = re.compile(r"(workflow/)?profiles/[^/]+/(config|profile)(\.v\d+\+)?\.ya?ml")
"""Options of the Snakemake on this machine, addresses and passwords among them. A nested
Snakemake reads none."""


@dataclass(frozen=True)
class ProjectFiles:
    """The selected project files, `paths` in order and relative to the working directory.

    Attributes:
        size: bytes of all of them together.
        too_large: paths left out because of the limit for one file.
        withheld: one line about files withheld as secrets, with advice; may be empty.
        left_out: why other files and directories (with a final slash) are left out, by path,
            without those that rules read or make.
    """

    paths: tuple[str, ...]
    size: int
    too_large: tuple[str, ...]
    withheld: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)


OF_RULES = "read or made by a rule"
"""The reason for files that are uploaded for the jobs that name them as inputs."""

REPORT_FILE = "mantik-report.html"
"""What `smk-mantik report` writes, unless the user names another file."""

_HIDDEN = "hidden"
_EXCLUDED = "in Exclude of the backend config"


class ProjectFileFilter:
    """Decides which files below a working directory are project files."""

    def __init__(
        self,
        workdir: Path,
        exclude: Matching,
        products: Container[str] = (),
        include: Matching = NOTHING,
        file_limit: int = FILE_BYTES,
    ) -> None:
        """Make it for `workdir`, the workflow's working directory.

        `exclude` and `include` are the backend config's Exclude and `Site: Include`; the latter
        matches files that are uploaded although they may hold a secret. `products` are files and
        directories that jobs read, or that rules of the workflow make. A file above `file_limit`
        bytes is left out.
        """
        self._workdir = workdir
        self._exclude = exclude
        self._products = products
        self._limit = file_limit
        self._too_large = f"larger than {humanize_size(file_limit)}"
        self._withheld = Withheld(workdir, include)
        self._own = _own_output()

    def select(self, total_limit: int) -> ProjectFiles:
        """Select the project files.

        Raises:
            UserError: they are larger than `total_limit` bytes together.
        """
        paths: list[str] = []
        total = 0
        sizes: Counter[str] = Counter()
        left_out: dict[str, str] = {}
        for path, why, size in self.walk():
            if why:
                left_out[path] = why
                continue
            paths.append(path)
            total += size
            sizes[path.partition("/")[0]] += size
            if total > total_limit:
                largest = ", ".join(f"{n} ({humanize_size(s)})" for n, s in sizes.most_common(3))
                raise UserError(
                    "the project files in the working directory are larger than"
                    f" {humanize_size(total_limit)}; the largest parts so far are {largest}",
                    where=str(self._workdir),
                    do="Add files that the jobs do not need to Exclude in the backend config, name"
                    " data as inputs of the rules, or raise Site: ProjectFilesLimit",
                )
        too_large = tuple(path for path, why in left_out.items() if why == self._too_large)
        others = {path: why for path, why in left_out.items() if why != OF_RULES}
        return ProjectFiles(tuple(paths), total, too_large, str(self._withheld), others)

    def why_left_out(self, path: str) -> str | None:
        """Return why a file or directory is no project file, in a few words; None if it is.

        `path` is relative to the working directory. What does not exist has no reason, either.
        """
        is_directory = (self._workdir / path).is_dir()
        above = [str(parent) for parent in reversed(PurePosixPath(path).parents)][1:]
        for directory in [*above, path] if is_directory else above:
            if why := self._why_directory(directory):
                return why
        if is_directory or not os.path.lexists(self._workdir / path):
            return None
        return self._look_at(path)[0] or None

    def walk(self) -> Iterator[tuple[str, str, int]]:
        """Yield all files, with the reasons why they are no project files, if any, and their sizes.

        So are directories that are not entered, with a final slash. Links count as their targets.
        """
        for at, directories, files in os.walk(self._workdir):
            below = Path(at).relative_to(self._workdir).as_posix()
            prefix = "" if below == "." else f"{below}/"
            reasons = {name: self._why_directory(f"{prefix}{name}") for name in sorted(directories)}
            directories[:] = [name for name, why in reasons.items() if not why]
            yield from ((f"{prefix}{name}/", why, 0) for name, why in reasons.items() if why)
            for name in sorted(files):
                yield f"{prefix}{name}", *self._look_at(f"{prefix}{name}")

    def _why_directory(self, path: str) -> str:
        """Return why a directory is not entered; empty if it is."""
        name = path.rpartition("/")[2]
        if name.startswith("."):
            return _HIDDEN
        if name in _GENERATED:
            return "generated by a tool"
        if path in self._products:
            return OF_RULES
        if os.path.exists(self._workdir / path / "pyvenv.cfg"):
            return "a virtual environment"
        return _EXCLUDED if self._exclude.matches(path, is_dir=True) else ""

    def _look_at(self, path: str) -> tuple[str, int]:
        """Return why a file is no project file, empty if it is one, and its size."""
        if why := self._why_named(path):
            return why, 0
        status = None
        with suppress(OSError):
            status = os.stat(self._workdir / path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return "no regular file", 0
        if (status.st_dev, status.st_ino) in self._own:
            return "output of this command", 0
        if status.st_size > self._limit:
            return self._too_large, status.st_size
        return self._withheld.why(path, status), status.st_size

    def _why_named(self, path: str) -> str:
        name = path.rpartition("/")[2]
        if name.startswith("."):
            return _HIDDEN
        if name == REPORT_FILE or _PROFILE.fullmatch(path):
            return "a report" if name == REPORT_FILE else "a profile of Snakemake"
        if name.startswith(_MLFLOW):
            return "MLflow's own"
        if name.endswith(_LOG):
            return "named like a log"
        if path in self._products:
            return OF_RULES
        return _EXCLUDED if self._exclude.matches(path) else ""


def list_candidates(
    workdir: Path, exclude: Matching, products: Container[str], include: Matching
) -> Iterator[tuple[str, int]]:
    """Yield all files that are project files whatever their size, with their sizes in bytes.

    In a fixed order. Arguments as for `ProjectFileFilter`; `products` is also checked for
    directories, which are then left out with their files.
    """
    for path, why, size in ProjectFileFilter(
        workdir, exclude, products, include, sys.maxsize
    ).walk():
        if not why:
            yield path, size


def _own_output() -> set[tuple[int, int]]:
    """Return the files, as device and inode, that this process writes its output to."""
    found = set()
    for descriptor in (1, 2):
        with suppress(OSError):
            status = os.fstat(descriptor)
            found.add((status.st_dev, status.st_ino))
    return found
