"""Find files in workspaces that no rule declares, by their paths."""

import fnmatch
import posixpath
from collections.abc import Iterable, Iterator

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import OURS, outside_path
from snakemake_executor_plugin_mantik.journal import FileRecord, StoredOutput, content_name
from snakemake_executor_plugin_mantik.sites.base import Entry
from snakemake_executor_plugin_mantik.storage.access import Access

_OWN = frozenset({OURS, ".snakemake"})
_MOST_DIRECTORIES = 200
"""Most directories of a place that are listed to find files."""


def find_workspace_files(access: Access, places: Iterable[str], name: str) -> list[StoredOutput]:
    """Return the files at `name`, or in the directory `name`, in the workspaces at `places`.

    The last part of `name` may be a pattern of the shell. Each file is returned in the form of an
    output without a checksum.

    Raises:
        UserError: the path is one of the executor's own, leads out of the workspace, or stands for
            too many directories.
        SiteError: a site does not answer.
    """
    path = posixpath.normpath(outside_path(name) if name.startswith("/") else name)
    if path == ".." or path.startswith("../") or (path.split("/")[0] in _OWN and name == path):
        raise UserError(
            f"{name} is no file of the workflow", where="smk-mantik get",
            do="Name files below the working directory, relative to it",
        )  # fmt: skip
    return [file for place in places for file in _find_at(access, place, path)]


def _find_at(access: Access, place: str, path: str) -> Iterator[StoredOutput]:
    """Yield the files at `path`, or below it, at one place."""
    folder, last = posixpath.split(path)
    entries = access.list(place, folder or ".", [path])
    exact = entries.get(last)
    found = [exact] if exact is not None else _matching(entries.values(), last)
    waiting = [(folder, entry) for entry in found]
    listed = 0
    while waiting:
        folder, entry = waiting.pop()
        below = posixpath.join(folder, entry.name)
        if not entry.directory:
            yield as_output(folder, entry, place)
        elif entry.name not in _OWN and not entry.link:
            listed += 1
            if listed > _MOST_DIRECTORIES:
                raise UserError(
                    f"there are more than {_MOST_DIRECTORIES} directories below {path}",
                    where=f"site {access.name(place)}",
                    do="Name one of them",
                )
            inside = access.list(place, below)
            waiting += [(below, inside[name]) for name in sorted(inside, reverse=True)]


def as_output(folder: str, entry: Entry, place: str) -> StoredOutput:
    """Return a file in a directory of a place in the form of an output without a checksum."""
    path = posixpath.join(folder, entry.name)
    name = content_name("", entry.size, entry.modified)
    record = FileRecord(path, entry.size, name, modified=entry.modified or 1.0, mode=0o644)
    return StoredOutput(path, place, False, entry.modified, "", (record,))


def _matching(entries: Iterable[Entry], pattern: str) -> list[Entry]:
    return [e for e in entries if fnmatch.fnmatchcase(e.name, pattern) and e.name[:1] != "."]
