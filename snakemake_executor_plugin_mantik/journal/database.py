"""The journal's file: its tables, its lock, its transactions; and a copy of it to look at."""

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from snakemake_executor_plugin_mantik.errors import JournalError
from snakemake_executor_plugin_mantik.private import make_private

VERSION = 4
FILE = "journal.sqlite"

_ADDED_IN_2 = """
CREATE TABLE workflow (id TEXT NOT NULL);
INSERT INTO workflow VALUES (lower(hex(randomblob(16))));
CREATE TABLE links (path TEXT PRIMARY KEY, target TEXT NOT NULL);
"""

_ADDED_IN_3 = """
ALTER TABLE tries ADD COLUMN reason TEXT NOT NULL DEFAULT '';
CREATE INDEX tries_name ON tries (name);
"""

_ADDED_IN_4 = """
CREATE TABLE members (
    try TEXT NOT NULL REFERENCES tries (id), job TEXT NOT NULL, name TEXT NOT NULL
);
CREATE INDEX members_job ON members (job);
CREATE INDEX members_name ON members (name);
"""

_SCHEMA = f"""
{_ADDED_IN_2}
CREATE TABLE sites (
    site TEXT PRIMARY KEY, url TEXT NOT NULL, workspace TEXT NOT NULL,
    first_bucket INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE tries (
    id TEXT PRIMARY KEY, site TEXT NOT NULL, bucket INTEGER NOT NULL,
    job TEXT NOT NULL, rule TEXT NOT NULL, name TEXT NOT NULL, fingerprint TEXT NOT NULL,
    state TEXT NOT NULL, outcome TEXT NOT NULL DEFAULT '',
    queue TEXT NOT NULL DEFAULT '', log TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL, submitted REAL, finished REAL, waited REAL, ran REAL
);
CREATE INDEX tries_job ON tries (job);
CREATE INDEX tries_bucket ON tries (site, bucket);
CREATE TABLE submissions (
    try TEXT NOT NULL REFERENCES tries (id), site_job TEXT NOT NULL,
    PRIMARY KEY (try, site_job)
);
CREATE TABLE local_files (
    path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, sha256 TEXT NOT NULL
);
CREATE TABLE remote_files (
    site TEXT NOT NULL, path TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    source INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (site, path)
);
CREATE TABLE bundles (
    id TEXT PRIMARY KEY, site TEXT NOT NULL, state TEXT NOT NULL
);
CREATE TABLE bundle_files (
    bundle TEXT NOT NULL REFERENCES bundles (id), path TEXT NOT NULL, size INTEGER NOT NULL,
    sha256 TEXT NOT NULL, source INTEGER NOT NULL, PRIMARY KEY (bundle, path)
);
{_ADDED_IN_3}
{_ADDED_IN_4}
"""

_ADDED = {2: _ADDED_IN_2, 3: _ADDED_IN_3, 4: _ADDED_IN_4}
"""What each version has beyond the one before."""


class Tables:
    """The journal's tables, open. Not thread-safe: they belong to the thread that opened them.

    Attributes:
        path: the journal's file, for messages.
        db: where they are.
    """

    path: Path
    db: sqlite3.Connection

    def _damaged(self, why: str) -> JournalError:
        return JournalError(
            f"the journal cannot be read ({why})",
            where=str(self.path),
            do="Keep a copy, then move it away; jobs that still run are then not adopted",
        )

    def _prepare(self) -> None:
        """Make the tables, or bring those of an older version up to date."""
        version = self.db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise JournalError(
                f"the journal is of version {version}, this executor knows up to {VERSION}",
                where=str(self.path),
                do="Update snakemake-executor-plugin-mantik",
            )
        since = "".join(steps for added, steps in _ADDED.items() if added > version)
        if steps := since if version else _SCHEMA:
            self.db.executescript(f"BEGIN; {steps} PRAGMA user_version = {VERSION}; COMMIT;")

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is in the tables afterwards, or nothing.

        Raises:
            JournalError: it cannot be written, the disk is full, say.
        """
        try:
            self.db.execute("BEGIN IMMEDIATE")
            yield self.db
            self.db.execute("COMMIT")
        except BaseException as error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise JournalError(
                    f"the journal cannot be written ({error})",
                    where=str(self.path),
                    do="Free space here and start again: what runs is taken up",
                ) from error
            raise


class Copy(Tables):
    """What the journal holds just now, in memory: what is written to it is forgotten.

    Needs no lock, so it may be made beside a running controller; without a journal it is empty.
    """

    def __init__(self, directory: Path) -> None:
        """Copy the journal in `directory`.

        Raises:
            JournalError: it is damaged, or of a newer version.
        """
        self.path = directory / FILE
        self.db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        try:
            if self.path.exists():
                # Where nobody works with it, SQLite is not to leave files beside it.
                quiet = not self.path.with_name(f"{FILE}-wal").exists()
                source = f"file:{quote(str(self.path))}?mode=ro{'&immutable=1' * quiet}"
                with closing(sqlite3.connect(source, uri=True)) as journal:
                    journal.backup(self.db)
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error


class Database(Tables):
    """An open journal file, locked."""

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        """Open or create the journal in `directory` and take its lock.

        A new directory is closed to others, unless it is `shared` with its group.

        Raises:
            JournalError: another controller holds it, it is damaged, or of a newer version.
        """
        make_private(directory, shared=shared)
        self.path = directory / FILE
        self._lock = (directory / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            if not isinstance(error, BlockingIOError):
                raise JournalError(
                    f"the journal cannot be locked ({error.strerror})",
                    where=str(directory),
                    do="Work in a directory on a file system that has locks",
                ) from error
            raise JournalError(
                "another Snakemake with the mantik executor is running in this directory",
                where=str(directory),
                do="Wait for it, or stop it, and start again",
            ) from None
        try:
            self.db = _connect(self.path)
        except sqlite3.DatabaseError as error:
            self._lock.close()
            raise self._damaged(str(error)) from error
        try:
            self._check()
            self._prepare()
        except sqlite3.DatabaseError as error:
            self.close()
            raise self._damaged(str(error)) from error
        except JournalError:
            self.close()
            raise

    def _check(self) -> None:
        found = self.db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged(" ".join(str(found).split()))

    def close(self) -> None:
        """Close the file and give the lock back."""
        self.db.close()
        self._lock.close()


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    return db
