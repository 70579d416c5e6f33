"""What the journal knows of files: here, at the sites, and in bundles on their way."""

import sqlite3
from collections.abc import Iterable

from snakemake_executor_plugin_mantik.journal.database import Tables
from snakemake_executor_plugin_mantik.journal.records import FileRecord


class FileLedger:
    """The files of the workflow: their checksums here, and what lies in the workspaces."""

    def __init__(self, database: Tables) -> None:
        """Keep the ledger in `database`."""
        self._database = database
        self._db = database.db

    def local_file(self, path: str, size: int, mtime_ns: int) -> str | None:
        """The checksum of a local file, if it was taken when it had this size and mtime."""
        row = self._db.execute(
            "SELECT sha256 FROM local_files WHERE path = ? AND size = ? AND mtime_ns = ?",
            (path, size, mtime_ns),
        ).fetchone()
        return row["sha256"] if row else None

    def set_local_files(self, files: Iterable[tuple[str, int, int, str]]) -> None:
        """Note (path, size, mtime in ns, sha256) of local files."""
        with self._database.write() as db:
            db.executemany("INSERT OR REPLACE INTO local_files VALUES (?, ?, ?, ?)", files)

    def remote_file(self, site: str, path: str) -> FileRecord | None:
        """What lies at `path` in the workspace of `site`, as far as is known."""
        row = self._db.execute(
            "SELECT path, size, sha256, source FROM remote_files WHERE site = ? AND path = ?",
            (site, path),
        ).fetchone()
        return _file(row) if row else None

    def remote_files(self, site: str, *, below: str = "") -> list[FileRecord]:
        """All that is known to lie in the workspace of `site`, or in a directory of it."""
        # "0" is the character after "/".
        low, high = (f"{below}/", f"{below}0") if below else ("", "\U0010ffff")
        rows = self._db.execute(
            "SELECT path, size, sha256, source FROM remote_files"
            " WHERE site = ? AND path >= ? AND path < ?",
            (site, low, high),
        )
        return [_file(row) for row in rows]

    def set_remote_files(self, site: str, files: Iterable[FileRecord]) -> None:
        """These files lie in the workspace of `site` now."""
        with self._database.write() as db:
            db.executemany(
                "INSERT OR REPLACE INTO remote_files VALUES (?, ?, ?, ?, ?)",
                [(site, f.path, f.size, f.sha256, f.source) for f in files],
            )

    def forget_remote_files(self, site: str, paths: Iterable[str]) -> None:
        """These files may no longer lie in the workspace of `site`."""
        with self._database.write() as db:
            db.executemany(
                "DELETE FROM remote_files WHERE site = ? AND path = ?",
                [(site, path) for path in paths],
            )

    # Links

    def set_links(self, links: Iterable[tuple[str, str]]) -> None:
        """Note (path, target) of symbolic links that jobs made and that came here with outputs."""
        with self._database.write() as db:
            db.executemany("INSERT OR REPLACE INTO links VALUES (?, ?)", links)

    def links(self, path: str) -> dict[str, str]:
        """The links that jobs made at `path` or below it, with what each points to."""
        rows = self._db.execute(
            "SELECT path, target FROM links WHERE path = ? OR path >= ? AND path < ?",
            (path, f"{path}/", f"{path}0"),  # "0" is the character after "/"
        )
        return {row["path"]: row["target"] for row in rows}

    # Bundles

    def add_bundle(self, site: str, bundle: str, files: Iterable[FileRecord]) -> None:
        """A bundle has been uploaded; the next job that names it unpacks it."""
        with self._database.write() as db:
            db.execute("INSERT INTO bundles VALUES (?, ?, 'uploaded')", (bundle, site))
            db.executemany(
                "INSERT INTO bundle_files VALUES (?, ?, ?, ?, ?)",
                [(bundle, f.path, f.size, f.sha256, f.source) for f in files],
            )

    def pending_bundles(self, site: str) -> dict[str, list[FileRecord]]:
        """Bundles that were uploaded and are not known to have been unpacked, with their files."""
        rows = self._db.execute(
            "SELECT bundle, path, size, sha256, source FROM bundle_files JOIN bundles"
            " ON bundle = bundles.id WHERE site = ? AND state = 'uploaded' ORDER BY bundles.rowid",
            (site,),
        )
        bundles: dict[str, list[FileRecord]] = {}
        for row in rows:
            bundles.setdefault(row["bundle"], []).append(_file(row))
        return bundles

    def bundle_files(self, bundle: str) -> list[FileRecord]:
        """The files of a bundle that is not known to have been unpacked, else none."""
        rows = self._db.execute(
            "SELECT path, size, sha256, source FROM bundle_files WHERE bundle = ?", (bundle,)
        )
        return [_file(row) for row in rows]

    def forget_bundled_files(self, site: str, paths: Iterable[str]) -> None:
        """No bundle on its way to `site` brings these files any more."""
        with self._database.write() as db:
            db.executemany(
                "DELETE FROM bundle_files WHERE path = ? AND bundle IN"
                " (SELECT id FROM bundles WHERE site = ? AND state = 'uploaded')",
                [(path, site) for path in paths],
            )

    def set_bundle(self, bundle: str, state: str) -> None:
        """Note that a bundle is `unpacked`, or `gone` from the site."""
        with self._database.write() as db:
            db.execute("UPDATE bundles SET state = ? WHERE id = ?", (state, bundle))
            db.execute("DELETE FROM bundle_files WHERE bundle = ?", (bundle,))


def _file(row: sqlite3.Row) -> FileRecord:
    return FileRecord(row["path"], row["size"], row["sha256"], bool(row["source"]))
