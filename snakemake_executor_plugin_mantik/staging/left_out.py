"""Find files that a failed job missed although they are here: the commonest mistake of newcomers.

Locally a command finds every file. At a site it finds the inputs of its job and the sources, and
what it says in the end is "No such file".
"""

import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import one_line
from snakemake_executor_plugin_mantik.common.humanize import humanize_size

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
        why: returns why a path relative to `workdir` is no source; None if it is one.
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
    for root in (workspace, str(workdir)):
        if root and word.startswith(f"{root.rstrip('/')}/"):
            word = word[len(root.rstrip("/")) + 1 :]
    path = os.path.normpath(word) if word else ""
    if path.startswith("../"):
        path = os.path.normpath(workdir / path)
    plain = path not in ("", ".", "..", "/") and not _OURS & set(PurePosixPath(path).parts)
    return path if plain else ""
