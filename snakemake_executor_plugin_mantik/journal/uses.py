"""What attempts use at their places, and the checkpoints that segments leave there.

What an attempt that may still run reads or writes is not removed. A run that asks for one target
knows nothing of the jobs that an earlier run submitted for another one. Everything that removes or
replaces files at a place asks here first.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..jobs.paths import at_or_above
from .database import Database
from .history import read_attempts, reading
from .records import AttemptRecord, FileRecord, is_utf8

_IN_USE = (
    "SELECT attempt FROM uses JOIN attempts ON id = attempt WHERE uses.place = :place AND ({paths})"
    # A checkpoint is kept after its attempt's end, as long as the job can go on from it.
    " AND (NOT checkpoint OR goes_on <> '' AND NOT EXISTS (SELECT 1 FROM attempts AS later"
    " WHERE later.job = attempts.job AND later.rowid > attempts.rowid"
    " AND (later.outcome = 'succeeded' OR later.follows = '')))"
)


class UseLedger:
    """Reads and writes the paths that attempts use. Belongs to the journal's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.write() as db:  # the attempt was never submitted
            db.execute(
                "DELETE FROM uses WHERE attempt IN"
                " (SELECT id FROM attempts WHERE state = 'planned')"
            )

    def begin(
        self,
        attempt_id: str,
        place: str,
        paths: Iterable[str],
        *,
        checkpoint: Iterable[str] = (),
        elsewhere: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Record what an attempt reads and writes at its place; call it before the submission.

        It holds until the attempt has ended, or is given up. `checkpoint` are the paths from which
        a next segment goes on; `elsewhere` are other places, and what is brought from there.
        """
        rows = [(place, path, attempt_id, False) for path in paths]
        rows += [(at, path, attempt_id, False) for at, path in elsewhere]
        rows += [(place, path, attempt_id, True) for path in checkpoint]
        with self._database.write() as db:
            db.execute("DELETE FROM uses WHERE attempt = ?", (attempt_id,))
            db.executemany(
                "INSERT OR IGNORE INTO uses VALUES (?, ?, ?, ?)",
                [row for row in rows if is_utf8(row[1])],
            )

    def end(self, attempt_id: str) -> None:
        """Record that an attempt has ended, as its marker shows, though nobody has watched it."""
        with self._database.write() as db:
            end_uses(db, attempt_id)

    def of(self, place: str, path: str = "", *, above: bool = True) -> list[AttemptRecord]:
        """Return the attempts because of which a path at a place must stay as it is.

        They use it, something below it, or a directory `above` it. Without a path, return those
        that use anything there.
        """
        return _using(self._database.db, place, path, above=above)


def read_uses(directory: Path, place: str, path: str) -> list[AttemptRecord]:
    """Return the attempts because of which a path at a place must stay, without the journal's lock.

    For `directory` and what is raised see `history`.
    """
    with reading(directory) as db:
        return _using(db, place, path) if db is not None else []


def _using(
    db: sqlite3.Connection, place: str, path: str = "", *, above: bool = True
) -> list[AttemptRecord]:
    which = "path = :path OR path >= :low AND path < :high"
    which += " OR path IN (SELECT value FROM json_each(:above))" if above else ""
    found = db.execute(
        _IN_USE.format(paths=which if path else "TRUE"),
        # "0" is the character after "/".
        {"place": place, "path": path, "low": f"{path}/", "high": f"{path}0",
         "above": json.dumps(at_or_above(path))},
    )  # fmt: skip
    ids = json.dumps([row["attempt"] for row in found])
    return read_attempts(db, "WHERE id IN (SELECT value FROM json_each(?))", (ids,))


def end_uses(db: sqlite3.Connection, attempt_id: str) -> None:
    """Record, in the caller's transaction, that an attempt reads and writes nothing any more."""
    db.execute("DELETE FROM uses WHERE attempt = ? AND NOT checkpoint", (attempt_id,))


class SegmentLedger:
    """Reads and writes the journal's part on segments. Belongs to the journal's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def keep_checkpoint(
        self, attempt_id: str, goes_on: str, files: Iterable[FileRecord] = ()
    ) -> None:
        """Record that another attempt can go on from this one's checkpoint, which is `files`.

        `goes_on` is how (`AttemptRecord.goes_on`). What the attempt itself went on from is
        forgotten.
        """
        with self._database.write() as db:
            db.execute(
                "DELETE FROM kept WHERE attempt = (SELECT follows FROM attempts WHERE id = ?)",
                (attempt_id,),
            )
            db.executemany(
                "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)",
                [(attempt_id, f.path, f.size, f.sha256) for f in files if is_utf8(f.path)],
            )
            db.execute(
                "UPDATE attempts SET goes_on = ''"
                " WHERE id = (SELECT follows FROM attempts WHERE id = ?)",
                (attempt_id,),
            )
            db.execute("UPDATE attempts SET goes_on = ? WHERE id = ?", (goes_on, attempt_id))

    def forget_checkpoint(self, attempt_id: str) -> None:
        """Record that no attempt can go on from what an attempt left."""
        with self._database.write() as db:
            db.execute("UPDATE attempts SET goes_on = '' WHERE id = ?", (attempt_id,))
            db.execute("DELETE FROM kept WHERE attempt = ?", (attempt_id,))

    def checkpoint(self, attempt_id: str) -> list[FileRecord]:
        """Return the files of the checkpoint that an attempt left; see `keep_checkpoint`."""
        found = self._database.db.execute(
            "SELECT path, size, sha256 FROM kept WHERE attempt = ?", (attempt_id,)
        )
        return [FileRecord(**row) for row in found]

    def last(self, job: str, place: str) -> AttemptRecord | None:
        """Return the attempt from whose checkpoint at a place a job can go on, if there is one."""
        for record in reversed(self._attempts("WHERE job = ?", (job,))):
            if record.goes_on:
                return record if record.place == place else None
            if record.outcome == "succeeded" or not record.follows:
                return None  # the job has begun anew since
        return None

    def waiting_after(self, attempt_id: str) -> list[AttemptRecord]:
        """Return the open attempts that are to go on after an attempt, one after the other."""
        found: list[AttemptRecord] = []
        while more := self._attempts(
            "WHERE follows = ? AND state NOT IN ('done', 'abandoned')",
            (found[-1].id if found else attempt_id,),
        ):
            found.append(more[-1])
        return found

    def was_followed(self, record: AttemptRecord) -> bool:
        """Return whether an earlier attempt has gone on from the same checkpoint as an attempt."""
        others = self._attempts("WHERE follows = ? AND job = ?", (record.follows, record.job))
        return any(other.id != record.id for other in others)

    def _attempts(self, where: str, values: Sequence[object]) -> list[AttemptRecord]:
        return read_attempts(self._database.db, where, values)
