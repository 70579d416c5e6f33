"""New files that jobs left beside their outputs, and where they lie."""

import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from .database import Tables
from .records import is_utf8

_MOST_KEPT = 10_000
"""Most of these files that the journal lists; the latest count."""


@dataclass(frozen=True)
class UndeclaredFile:
    """A file that a job left in its workspace and that no rule declares.

    Attributes:
        path: relative to the workspace.
        place: the identity of the place.
        size: in bytes.
        modified: when it was modified, by the clock of the site.
        mode: its permission bits.
        job: the rule and its wildcards, for messages. Another job that ran at the same time may
            have made the file.
    """

    path: str
    place: str
    size: int
    modified: float
    mode: int
    job: str


class UndeclaredLedger:
    """Reads and writes the journal's part on undeclared files."""

    def __init__(self, database: Tables) -> None:
        self._database = database

    def add(self, files: Iterable[UndeclaredFile]) -> None:
        """Record files that are new, or new again; forget the oldest ones beyond a limit."""
        rows = [astuple(file) for file in files if is_utf8(file.path)]
        if not rows:
            return
        with self._database.write() as db:
            db.executemany("INSERT OR REPLACE INTO undeclared VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.execute(
                "DELETE FROM undeclared WHERE rowid <= (SELECT max(rowid) FROM undeclared) - ?",
                (_MOST_KEPT,),
            )


def all_undeclared(db: sqlite3.Connection) -> list[UndeclaredFile]:
    """Return the undeclared files that a journal lists."""
    return [UndeclaredFile(**row) for row in db.execute("SELECT * FROM undeclared ORDER BY path")]
