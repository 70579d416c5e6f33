"""Tries that were submitted while their files are still being uploaded, and waits in queues."""

from collections.abc import Iterable

from snakemake_executor_plugin_mantik.journal.database import Database
from snakemake_executor_plugin_mantik.journal.history import read_tries
from snakemake_executor_plugin_mantik.journal.records import FileRecord, TryRecord


class ArrivalLedger:
    """Reads and writes the journal's part on such tries. Belongs to the journal's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, place: str, bundle: str, files: Iterable[FileRecord]) -> None:
        """Record that tries may name a bundle before all of it is at a place."""
        with self._database.write() as db:
            db.execute("INSERT OR REPLACE INTO bundles VALUES (?, ?, 'arriving')", (bundle, place))
            db.executemany(
                "INSERT OR REPLACE INTO bundle_files VALUES (?, ?, ?, ?, ?)",
                [(bundle, f.path, f.size, f.sha256, f.source) for f in files],
            )

    def state(self, bundle: str) -> str:
        """Return `arriving`, `uploaded`, `unpacked` or `gone`; empty for an unknown bundle."""
        found = self._database.db.execute("SELECT state FROM bundles WHERE id = ?", (bundle,))
        row = found.fetchone()
        return str(row["state"]) if row is not None else ""

    def arriving(self, place: str) -> list[str]:
        """Return the bundles that tries may name and that are not all at a place yet."""
        rows = self._database.db.execute(
            "SELECT id FROM bundles WHERE place = ? AND state = 'arriving'", (place,)
        )
        return [row["id"] for row in rows]

    def await_bundles(self, try_id: str, bundles: Iterable[str]) -> None:
        """Record the bundles that were not all at the place when a try was to be submitted."""
        with self._database.write() as db:
            db.executemany(
                "INSERT OR IGNORE INTO awaited VALUES (?, ?)", [(try_id, b) for b in bundles]
            )

    def awaited_by(self, try_id: str) -> list[str]:
        """Return the bundles of `await_bundles`, whatever has become of them since."""
        found = self._database.db.execute("SELECT bundle FROM awaited WHERE try = ?", (try_id,))
        return [row["bundle"] for row in found]

    def waiting(self) -> list[TryRecord]:
        """Return the tries that the sites may know and whose files are not all there yet."""
        return read_tries(
            self._database.db,
            "WHERE state IN ('submitting', 'submitted') AND id IN"
            " (SELECT try FROM awaited JOIN bundles ON bundle = bundles.id"
            " WHERE bundles.state = 'arriving')",
            (),
        )

    def recent_waits(self, site: str, queue: str, number: int) -> list[tuple[float, float]]:
        """Return the last waits of tries in a queue: when each try was made, and its seconds.

        Tries that also waited for others are left out.
        """
        rows = self._database.db.execute(
            "SELECT created, waited FROM tries WHERE site = ? AND queue = ?"
            " AND waited IS NOT NULL AND after = '' AND follows = ''"
            " ORDER BY rowid DESC LIMIT ?",
            (site, queue, number),
        )
        return [(row["created"], row["waited"]) for row in rows]
