"""The spare: a second file with the facts that must survive a damaged journal.

One line of JSON per fact, append-only; a damaged line loses one fact and no other. A fact holds the
rows of one subject; the last one counts, and one without rows says that nothing is left to know. It
holds what no site can report: the workflow's name, the paths of its workspaces, the attempts that
may be there, and the remote outputs. The progress of attempts is queried from the sites again. The
file is rewritten at each start, so that it holds little more than open attempts and remote outputs.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from .records import LOST, RemoteOutput
from .schema import is_fact

_FILE = "journal.spare"

Row = tuple[str, Mapping[str, Any]]
"""A table and the columns of one of its rows."""
Subject = tuple[str, str]
"""`WORKFLOW`; or `site`, `number` (of a place), `attempt` or `stored`, and its name."""
WORKFLOW: Final[Subject] = ("workflow", "")
Facts = dict[Subject, list[Row]]
"""The rows of each subject that a spare knows; the first one is its own."""


class JournalBackup:
    """An open spare, for appending. Belongs to the holder of the journal's lock.

    Methods raise OSError if it cannot be written.
    """

    def __init__(self, directory: Path, facts: Iterable[tuple[Subject, Iterable[Row]]]) -> None:
        """Write a new spare with `facts` to `directory`, then replace the old one."""
        path = directory / _FILE
        new = directory / f"{_FILE}.new"
        with new.open("wb") as file:
            file.writelines(as_line(*fact) for fact in facts)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        self._file = path.open("ab", buffering=0)

    def add(self, subject: Subject, rows: Iterable[Row] = (), *, lasting: bool = False) -> None:
        """Add a fact; with `lasting` it is on disk when the method returns."""
        # A line that a full disk cut off before spoils only itself.
        self._file.write(b"\n" + as_line(subject, rows))
        if lasting:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def stored_rows(path: str, output: RemoteOutput | None) -> Iterator[Row]:
    """Yield the rows that record a remote output, or that there is none, whatever lies here."""
    if output is None:
        lost = {"place": LOST, "directory": 0, "files": 0, "made": 0, "job": ""}
        yield "stored", {"path": path, **lost}
        return
    yield "stored", {
        "path": path, "place": output.place, "directory": output.directory,
        "files": len(output.files), "made": output.made, "job": output.job,
    }  # fmt: skip
    for file in output.files:
        yield "remote_files", {"place": output.place, **asdict(file)}
    for link, target in output.links:
        yield "links", {"path": link, "target": target}


def read_backup(directory: Path) -> tuple[Facts, int]:
    """Read the spare in `directory`, if there is one; see `read_facts`."""
    try:
        return read_facts((directory / _FILE).read_bytes())
    except OSError:
        return {}, 0


def has_backup(directory: Path) -> bool:
    """Return whether there is a spare in `directory` from which a journal can be restored."""
    return WORKFLOW in read_backup(directory)[0]


def read_facts(content: bytes) -> tuple[Facts, int]:
    """Return the facts in a spare, and the number of damaged lines."""
    known: Facts = {}
    damaged = 0
    for line in filter(None, content.split(b"\n")):
        try:
            (kind, name), rows = json.loads(line)
            subject = (str(kind), str(name))
            found: list[Row] = [(str(table), dict(columns)) for table, columns in rows]
        except (TypeError, ValueError, RecursionError):
            damaged += 1
            continue
        if found and not is_fact(*subject, found):
            damaged += 1
            continue
        known.pop(subject, None)
        if found:
            known[subject] = found
    return known, damaged


def as_line(subject: Subject, rows: Iterable[Row]) -> bytes:
    """Return a fact as a line of a spare."""
    return json.dumps([subject, list(rows)]).encode() + b"\n"
