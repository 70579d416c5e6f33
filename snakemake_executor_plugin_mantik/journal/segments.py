"""The segments of jobs: which try goes on from which, and from what."""

from collections.abc import Iterable, Sequence

from .database import Database
from .history import read_tries
from .records import FileRecord, TryRecord, is_utf8


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
