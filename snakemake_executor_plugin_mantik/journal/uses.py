"""What tries use at their places, and the checkpoints that segments leave there.

What a try that may still run reads or writes is not removed. A run that asks for one target knows
nothing of the jobs that an earlier run submitted for another one. Everything that removes or
replaces files at a place asks here first.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..jobs.paths import at_or_above
from .database import Database
from .history import read_tries, reading
from .records import FileRecord, TryRecord, is_utf8

_IN_USE = (
    "SELECT try FROM uses JOIN tries ON id = try WHERE uses.place = :place AND ({paths})"
    # A checkpoint is kept after its try's end, as long as the job can go on from it.
    " AND (NOT checkpoint OR goes_on <> '' AND NOT EXISTS (SELECT 1 FROM tries AS later"
    " WHERE later.job = tries.job AND later.rowid > tries.rowid"
    " AND (later.outcome = 'succeeded' OR later.follows = '')))"
)


class UseLedger:
    """Reads and writes the paths that tries use. Belongs to the journal's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.write() as db:  # the try was never submitted
            db.execute(
                "DELETE FROM uses WHERE try IN (SELECT id FROM tries WHERE state = 'planned')"
            )

    def begin(
        self,
        try_id: str,
        place: str,
        paths: Iterable[str],
        *,
        checkpoint: Iterable[str] = (),
        elsewhere: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Record what a try reads and writes at its place; call it before the submission.

        It holds until the try has ended, or is given up. `checkpoint` are the paths from which a
        next segment goes on; `elsewhere` are other places, and what is brought from there.
        """
        rows = [(place, path, try_id, False) for path in paths]
        rows += [(at, path, try_id, False) for at, path in elsewhere]
        rows += [(place, path, try_id, True) for path in checkpoint]
        with self._database.write() as db:
            db.execute("DELETE FROM uses WHERE try = ?", (try_id,))
            db.executemany(
                "INSERT OR IGNORE INTO uses VALUES (?, ?, ?, ?)",
                [row for row in rows if is_utf8(row[1])],
            )

    def end(self, try_id: str) -> None:
        """Record that a try has ended, as its marker shows, though nobody has watched it."""
        with self._database.write() as db:
            end_uses(db, try_id)

    def of(self, place: str, path: str = "", *, above: bool = True) -> list[TryRecord]:
        """Return the tries because of which a path at a place must stay as it is.

        They use it, something below it, or a directory `above` it. Without a path, return those
        that use anything there.
        """
        return _using(self._database.db, place, path, above=above)


def read_uses(directory: Path, place: str, path: str) -> list[TryRecord]:
    """Return the tries because of which a path at a place must stay, without the journal's lock.

    For `directory` and what is raised see `history`.
    """
    with reading(directory) as db:
        return _using(db, place, path) if db is not None else []


def _using(
    db: sqlite3.Connection, place: str, path: str = "", *, above: bool = True
) -> list[TryRecord]:
    which = "path = :path OR path >= :low AND path < :high"
    which += " OR path IN (SELECT value FROM json_each(:above))" if above else ""
    found = db.execute(
        _IN_USE.format(paths=which if path else "TRUE"),
        # "0" is the character after "/".
        {"place": place, "path": path, "low": f"{path}/", "high": f"{path}0",
         "above": json.dumps(at_or_above(path))},
    )  # fmt: skip
    ids = json.dumps([row["try"] for row in found])
    return read_tries(db, "WHERE id IN (SELECT value FROM json_each(?))", (ids,))


def end_uses(db: sqlite3.Connection, try_id: str) -> None:
    """Record, in the caller's transaction, that a try reads and writes nothing any more."""
    db.execute("DELETE FROM uses WHERE try = ? AND NOT checkpoint", (try_id,))


class SegmentLedger:
    """Reads and writes the journal's part on segments. Belongs to the journal's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def keep_checkpoint(self, try_id: str, goes_on: str, files: Iterable[FileRecord] = ()) -> None:
        """Record that another try can go on from a try's checkpoint, which consists of `files`.

        `goes_on` is how (`TryRecord.goes_on`). What the try itself went on from is forgotten.
        """
        with self._database.write() as db:
            db.execute(
                "DELETE FROM kept WHERE try = (SELECT follows FROM tries WHERE id = ?)", (try_id,)
            )
            db.executemany(
                "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)",
                [(try_id, f.path, f.size, f.sha256) for f in files if is_utf8(f.path)],
            )
            db.execute(
                "UPDATE tries SET goes_on = '' WHERE id = (SELECT follows FROM tries WHERE id = ?)",
                (try_id,),
            )
            db.execute("UPDATE tries SET goes_on = ? WHERE id = ?", (goes_on, try_id))

    def forget_checkpoint(self, try_id: str) -> None:
        """Record that no try can go on from what a try left."""
        with self._database.write() as db:
            db.execute("UPDATE tries SET goes_on = '' WHERE id = ?", (try_id,))
            db.execute("DELETE FROM kept WHERE try = ?", (try_id,))

    def checkpoint(self, try_id: str) -> list[FileRecord]:
        """Return the files of the checkpoint that a try left; see `keep_checkpoint`."""
        found = self._database.db.execute(
            "SELECT path, size, sha256 FROM kept WHERE try = ?", (try_id,)
        )
        return [FileRecord(**row) for row in found]

    def last(self, job: str, place: str) -> TryRecord | None:
        """Return the try from whose checkpoint at a place a job can go on, if there is one."""
        for record in reversed(self._tries("WHERE job = ?", (job,))):
            if record.goes_on:
                return record if record.place == place else None
            if record.outcome == "succeeded" or not record.follows:
                return None  # the job has begun anew since
        return None

    def waiting_after(self, try_id: str) -> list[TryRecord]:
        """Return the open tries that are to go on after a try, one after the other."""
        found: list[TryRecord] = []
        while more := self._tries(
            "WHERE follows = ? AND state NOT IN ('done', 'abandoned')",
            (found[-1].id if found else try_id,),
        ):
            found.append(more[-1])
        return found

    def was_followed(self, record: TryRecord) -> bool:
        """Return whether an earlier try has gone on from the same checkpoint as a try."""
        others = self._tries("WHERE follows = ? AND job = ?", (record.follows, record.job))
        return any(other.id != record.id for other in others)

    def _tries(self, where: str, values: Sequence[object]) -> list[TryRecord]:
        return read_tries(self._database.db, where, values)
