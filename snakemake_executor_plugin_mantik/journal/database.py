"""The journal's file with its tables, lock and transactions; and an in-memory copy for reading."""

import hashlib
import itertools
import os
import platform
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from snakemake_executor_plugin_mantik.common.errors import JournalError, JournalLocked, printable
from snakemake_executor_plugin_mantik.common.locks import take_lock
from snakemake_executor_plugin_mantik.common.state_directory import STATE, make_private
from snakemake_executor_plugin_mantik.journal import backup
from snakemake_executor_plugin_mantik.journal.records import LOST, StoredOutput, TryState

JOURNAL_VERSION = 18
JOURNAL_FILE = "journal.sqlite"
JOURNAL_LOCK = "lock"

_SCHEMA = """
CREATE TABLE workflow (
    id TEXT NOT NULL, instance TEXT NOT NULL DEFAULT '', seat TEXT NOT NULL DEFAULT ''
);
INSERT INTO workflow (id) VALUES (lower(hex(randomblob(16))));
CREATE TABLE runs (
    began REAL NOT NULL, ended REAL, ending TEXT NOT NULL DEFAULT '', about TEXT NOT NULL,
    pipeline TEXT NOT NULL DEFAULT ''
);
CREATE TABLE sites (
    site TEXT PRIMARY KEY, url TEXT NOT NULL, workspace TEXT NOT NULL,
    config TEXT NOT NULL DEFAULT '', place TEXT NOT NULL DEFAULT ''
);
CREATE TABLE places (place TEXT PRIMARY KEY, bucket INTEGER);
CREATE TABLE buckets (
    place TEXT NOT NULL, bucket INTEGER NOT NULL, PRIMARY KEY (place, bucket)
);

CREATE TABLE tries (
    id TEXT PRIMARY KEY, site TEXT NOT NULL, bucket INTEGER NOT NULL,
    job TEXT NOT NULL, rule TEXT NOT NULL, name TEXT NOT NULL, fingerprint TEXT NOT NULL,
    state TEXT NOT NULL, outcome TEXT NOT NULL DEFAULT '',
    queue TEXT NOT NULL DEFAULT '', log TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL, submitted REAL, finished REAL, waited REAL, ran REAL,
    reason TEXT NOT NULL DEFAULT '', made_of TEXT NOT NULL DEFAULT '', sent REAL,
    waits TEXT NOT NULL DEFAULT '', place TEXT NOT NULL DEFAULT '',
    after TEXT NOT NULL DEFAULT '', started REAL, runtime REAL,
    pending TEXT NOT NULL DEFAULT '', logs TEXT NOT NULL DEFAULT '',
    segment INTEGER NOT NULL DEFAULT 0, segments INTEGER NOT NULL DEFAULT 0,
    follows TEXT NOT NULL DEFAULT '', goes_on TEXT NOT NULL DEFAULT '',
    asked TEXT NOT NULL DEFAULT '', used TEXT NOT NULL DEFAULT '', expected REAL
);
CREATE INDEX tries_job ON tries (job);
CREATE INDEX tries_name ON tries (name);
CREATE INDEX tries_bucket ON tries (site, bucket);
CREATE INDEX tries_place ON tries (place, bucket);
CREATE INDEX tries_after ON tries (after)
    WHERE after <> '' AND state NOT IN ('done', 'abandoned');
CREATE TABLE members (
    try TEXT NOT NULL REFERENCES tries (id), job TEXT NOT NULL, name TEXT NOT NULL
);
CREATE INDEX members_job ON members (job);
CREATE INDEX members_name ON members (name);
CREATE TABLE submissions (
    try TEXT NOT NULL REFERENCES tries (id), site_job TEXT NOT NULL,
    PRIMARY KEY (try, site_job)
);
CREATE TABLE secrets (try TEXT PRIMARY KEY REFERENCES tries (id));
CREATE TABLE made (
    try TEXT NOT NULL, path TEXT NOT NULL, sha256 TEXT NOT NULL, PRIMARY KEY (try, path)
);
CREATE TABLE kept (
    try TEXT NOT NULL, path TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (try, path)
);

CREATE TABLE links (path TEXT PRIMARY KEY, target TEXT NOT NULL);
CREATE TABLE local_files (
    path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL, inode INTEGER NOT NULL, sha256 TEXT NOT NULL
);
CREATE TABLE remote_files (
    place TEXT NOT NULL, path TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    source INTEGER NOT NULL DEFAULT 0, modified REAL NOT NULL DEFAULT 0,
    mode INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (place, path)
);
CREATE TABLE numbered (
    place TEXT NOT NULL, path TEXT NOT NULL, number INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (place, path)
);
CREATE TABLE bundles (
    id TEXT PRIMARY KEY, place TEXT NOT NULL, state TEXT NOT NULL
);
CREATE TABLE bundle_files (
    bundle TEXT NOT NULL REFERENCES bundles (id), path TEXT NOT NULL, size INTEGER NOT NULL,
    sha256 TEXT NOT NULL, source INTEGER NOT NULL, PRIMARY KEY (bundle, path)
);
CREATE INDEX bundle_files_content ON bundle_files (path, sha256);
CREATE TABLE uploads (
    bundle TEXT PRIMARY KEY, place TEXT NOT NULL, digest TEXT NOT NULL,
    size INTEGER NOT NULL, sent INTEGER NOT NULL
);
CREATE TABLE imports (
    bundle TEXT NOT NULL, path TEXT NOT NULL, name TEXT NOT NULL,
    site TEXT NOT NULL, import_id TEXT NOT NULL, PRIMARY KEY (bundle, path)
);
CREATE TABLE stored (
    path TEXT PRIMARY KEY, place TEXT NOT NULL, directory INTEGER NOT NULL,
    files INTEGER NOT NULL, made REAL NOT NULL, job TEXT NOT NULL
);
CREATE TABLE undeclared (
    path TEXT NOT NULL, place TEXT NOT NULL, size INTEGER NOT NULL, modified REAL NOT NULL,
    mode INTEGER NOT NULL, job TEXT NOT NULL, PRIMARY KEY (path, place)
);
"""


class Tables:
    """The journal's open tables. Not thread-safe: they belong to one thread at a time.

    `path` is the journal's file, for messages.
    """

    path: Path
    db: sqlite3.Connection

    def _damaged(self, why: str) -> JournalError:
        return JournalError(
            f"the journal cannot be read ({why})",
            where=str(self.path),
            do="Start again: it is restored from its spare. If that does not help, move it away"
            " and keep it; running jobs are then not adopted",
        )

    def _prepare(self) -> None:
        """Create the tables, unless they are there.

        Raises:
            JournalError: they have another version.
        """
        version = self.db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, JOURNAL_VERSION):
            raise JournalError(
                f"the journal has version {version}; this executor reads {JOURNAL_VERSION}",
                where=str(self.path),
                do="Use the snakemake-executor-plugin-mantik that wrote it, or move it away:"
                " running jobs are then not adopted",
            )
        if not version:
            self.db.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA user_version = {JOURNAL_VERSION}; COMMIT;"
            )

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction, written completely or not at all.

        Raises:
            JournalError: it is damaged or cannot be written, for example because the disk is full.
        """
        try:
            self.db.execute("BEGIN IMMEDIATE")
            yield self.db
            self.db.execute("COMMIT")
        except BaseException as error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            if getattr(error, "sqlite_errorcode", None) in _DAMAGE:
                raise self._damaged(str(error)) from error
            if isinstance(error, sqlite3.OperationalError):
                raise JournalError(
                    f"the journal cannot be written ({error})",
                    where=str(self.path),
                    do="Free disk space here and start again: running jobs are taken up again",
                ) from error
            raise

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Have what is written here, and all that was before, on disk when a transaction ends."""
        self.db.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self.db.execute("PRAGMA synchronous = NORMAL")


class JournalCopy(Tables):
    """An in-memory copy of the journal's current contents; writes to it are not kept.

    Needs no lock, so it can be made beside a running controller; empty if there is no journal.
    """

    def __init__(self, directory: Path) -> None:
        """Copy the journal in `directory`.

        Raises:
            JournalError: it cannot be read, for example because it is damaged, or has another
                version.
        """
        self.path = directory / JOURNAL_FILE
        self.db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        try:
            if self.path.exists():
                # If no controller uses the journal, SQLite must not leave files beside it.
                quiet = not self.path.with_name(f"{JOURNAL_FILE}-wal").exists()
                source = f"file:{quote(str(self.path))}?mode=ro{'&immutable=1' * quiet}"
                with closing(sqlite3.connect(source, uri=True)) as journal:
                    journal.backup(self.db)
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error


class Database(Tables):
    """An open and locked journal file.

    Attributes:
        instance: random name of this file; a copy of it gets another one.
        seat: a digest of where the journal lies: the machine, its directory, and the inode of the
            lock file.
        predecessor: the instance of the damaged journal that was just replaced by this one; empty
            if none was, or if that one lay elsewhere and may be in use there.
        remark: a notice for the user; may be empty.
    """

    remark = ""
    predecessor = ""

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        """Open or create the journal in `directory` and take its lock.

        A new directory is closed to others, unless it is `shared` with its group. A damaged journal
        is restored from its spare, and the damaged file is kept under another name.

        Raises:
            JournalError: another controller holds it, it has another version, it cannot be locked
                or written, or nothing of its contents can be restored.
            OSError: the directory cannot be created, or the lock file cannot be opened.
        """
        make_private(directory, shared=shared)
        self.path = directory / JOURNAL_FILE
        self._locks = _locked(directory)
        self.seat = _seat(directory)
        try:
            try:
                self._open(self.path)
            except sqlite3.DatabaseError as error:
                self._anew(error)
            self.instance = self._instance()
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.DatabaseError | OSError):
                raise self._damaged(str(error)) from error
            raise

    def _open(self, path: Path) -> None:
        self.db = _connect(path)
        found = self.db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            error = sqlite3.DatabaseError(" ".join(str(found).split()))
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        self._prepare()

    def _anew(self, error: sqlite3.DatabaseError) -> None:
        """Replace a damaged journal by a new one with the facts of the spare.

        Raises:
            JournalError: it is not damaged but inaccessible, its spare names no workflow, or the
                new one cannot be written.
            sqlite3.DatabaseError, OSError: the new one cannot replace it. The damaged one is still
                there, or kept under another name.
        """
        known = backup.read_backup(self.path.parent)
        if getattr(error, "sqlite_errorcode", None) not in _DAMAGE or not known.workflow:
            raise self._damaged(str(error)) from error
        if hasattr(self, "db"):
            self.db.close()
        new = self.path.with_name(f"{JOURNAL_FILE}.new")
        new.unlink(missing_ok=True)
        self._open(new)
        self.predecessor = known.instance if known.seat == self.seat else ""
        with self.write() as db:
            _fill(db, known)
        self.db.close()
        kept = _set_aside(self.path)
        new.replace(self.path)
        self._open(self.path)
        count = sum(output is not None and not output.here for output in known.stored.values())
        stored = f"Outputs that stay there: {count}. " if count else ""
        self.remark = (
            f"The journal was damaged ({error}). It has been restored from its spare; the damaged"
            f" one is kept as {kept}. Jobs to look for at the sites: {len(known.tries)}."
            f" {stored}Files are uploaded again."
        )

    def _instance(self) -> str:
        """Return the name of this file; choose a new one if it is a copy.

        A copy is on another machine, at another path, or beside another lock file.
        """
        row = self.db.execute("SELECT instance, seat FROM workflow").fetchone()
        if row["instance"] and row["seat"] == self.seat:
            return str(row["instance"])
        instance = uuid.uuid4().hex[:16]
        with self.write() as db:
            db.execute("UPDATE workflow SET instance = ?, seat = ?", (instance, self.seat))
            # The original may continue to fill its buckets.
            db.execute("UPDATE places SET bucket = NULL")
        return instance

    def close(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
        self._locks.close()


def _seat(directory: Path) -> str:
    """A digest of where the journal in `directory` lies."""
    inode = os.stat(directory / JOURNAL_LOCK).st_ino
    where = f"{_machine()} {inode} {directory.resolve()}".encode(errors="replace")
    return hashlib.sha256(where).hexdigest()


def _machine() -> str:
    with suppress(OSError):
        return f"{Path('/etc/machine-id').read_text().strip()} {platform.node()}"
    return platform.node()


_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""SQLite's error codes for a damaged file, in contrast to one that is not accessible."""


def _locked(directory: Path) -> ExitStack:
    """Take the locks of the journal in `directory`; its lock file names the holder.

    The second lock, for a journal in a workflow's state directory, is on the workflow's directory:
    it survives the removal of `.snakemake`.

    Raises:
        JournalLocked: another process holds one of them.
        JournalError: the file system does not support locks.
        OSError: the lock file cannot be opened.
    """
    locks = ExitStack()
    lock = locks.enter_context((directory / JOURNAL_LOCK).open("a+"))
    try:
        taken = take_lock(lock)
        if taken and directory.parts[-len(STATE.parts) :] == STATE.parts:
            taken = _take_directory(directory.parents[len(STATE.parts) - 1], locks)
    except OSError as error:
        locks.close()
        raise JournalError(
            f"the journal cannot be locked ({error.strerror})",
            where=str(directory),
            do="Work in a directory on a file system that supports locks",
        ) from error
    if not taken:
        lock.seek(0)
        holder = printable(lock.read(200)).strip()
        locks.close()
        raise JournalLocked(
            "another Snakemake with the mantik executor is running in this directory"
            + (f" ({holder})" if holder else ""),
            where=str(directory),
            do="Wait for it, or stop it, and start again",
        )
    with suppress(OSError):  # a full disk
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}\n")
        lock.flush()
    return locks


def _take_directory(directory: Path, locks: ExitStack) -> bool:
    """Take the lock of a directory; return whether it was free.

    Some network file systems cannot lock directories: the journal's own lock has to do there.
    """
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    locks.callback(os.close, opened)
    try:
        return take_lock(opened)
    except OSError:
        return True


def _rows_of(path: str, output: StoredOutput | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the table and columns of each row that records a stored output, or that it is lost."""
    if output is None:
        yield (
            "stored",
            {"path": path, "place": LOST, "directory": 0, "files": 0, "made": 0, "job": ""},
        )
        return
    yield "stored", {
        "path": path, "place": output.place, "directory": output.directory,
        "files": len(output.files), "made": output.made, "job": output.job,
    }  # fmt: skip
    for file in output.files:
        yield "remote_files", {"place": output.place, **asdict(file)}
    for link, target in output.links:
        yield "links", {"path": link, "target": target}


def _fill(db: sqlite3.Connection, known: backup.BackupContents) -> None:
    """Fill empty tables from a spare; each of its tries counts as possibly known to the site."""
    db.execute("UPDATE workflow SET id = ?", (known.workflow,))
    rows = [("sites", columns) for columns in known.sites.values()]
    for columns in known.tries.values():
        settled = {name: value for name, value in columns.items() if name != "members"}
        rows.append(("tries", {**settled, "state": TryState.SUBMITTING}))
        rows += [
            ("members", {"try": columns["id"], "job": job, "name": name})
            for job, name in columns["members"].items()
        ]
    for path, output in known.stored.items():
        rows += _rows_of(path, output)
    for table, columns in rows:
        there = {row["name"] for row in db.execute(f"PRAGMA table_info ({table})")}
        names = [name for name in columns if name in there]
        marks = ", ".join("?" * len(names))
        db.execute(
            f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})",  # noqa: S608
            [columns[name] for name in names],
        )


def _set_aside(path: Path) -> Path:
    """Copy a damaged journal to another name, and move its WAL there; the original stays."""
    kept = next(
        name
        for number in itertools.count(1)
        if not (name := path.with_name(f"{path.name}.damaged-{number}")).exists()
    )
    shutil.copyfile(path, kept)
    for beside in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(f"{path.name}{beside}").replace(kept.with_name(f"{kept.name}{beside}"))
    return kept


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
    db.row_factory = sqlite3.Row
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db
