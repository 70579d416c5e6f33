"""The journal's file with its tables, lock and transactions; and an in-memory copy for reading."""

import hashlib
import itertools
import json
import os
import platform
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..common.errors import JournalError, JournalLocked, printable
from ..common.humanize import humanize_count
from ..common.locks import take_lock
from ..common.state_directory import STATE, make_private
from . import backup
from .records import LOST, EventKind, add_event
from .schema import SCHEMA, VERSION

JOURNAL_FILE = "journal.sqlite"
JOURNAL_LOCK = "lock"


def has_tables(db: sqlite3.Connection, path: Path) -> bool:
    """Check whether the journal at `path` has its tables.

    Raises:
        JournalError: another version of the executor made them.
    """
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION):
        raise JournalError(
            "another version of snakemake-executor-plugin-mantik wrote the journal",
            where=str(path),
            do="Use that version until none of its jobs runs, then move the journal's directory"
            " away",
        )
    return bool(version)


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
        """Create the tables, unless they are there; raise JournalError for another version's."""
        if not has_tables(self.db, self.path):
            self.db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")

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
                    do="Free disk space here and start again: running jobs are reattached",
                ) from error
            raise

    def change(self, statement: str, *values: object) -> None:
        """Execute a statement in a transaction of its own; see `write`."""
        with self.write() as db:
            db.execute(statement, values)

    def change_each(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Execute a statement with each of some rows, in one transaction."""
        with self.write() as db:
            db.executemany(statement, rows)

    def column(self, query: str, *values: object) -> list[Any]:
        """Return the first column that a query finds."""
        return [row[0] for row in self.db.execute(query, values)]

    def value(self, query: str, *values: object) -> Any:
        """Return the first column of the first row that a query finds; None if it finds none."""
        row = self.db.execute(query, values).fetchone()
        return row and row[0]

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Have what is written here, and all that was before, on disk when a transaction ends."""
        self.db.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self.db.execute("PRAGMA synchronous = NORMAL")


def connect(path: Path, *, quiet: bool = False) -> sqlite3.Connection:
    """Open a journal for reading; if `quiet`, leave no files beside one that nobody uses."""
    unused = quiet and not path.with_name(f"{path.name}-wal").exists()
    source = f"file:{quote(str(path))}?mode=ro{'&immutable=1' * unused}"
    db = sqlite3.connect(source, uri=True, timeout=30)
    db.row_factory = sqlite3.Row
    return db


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
                with closing(connect(self.path, quiet=True)) as journal:
                    journal.backup(self.db)
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error


@dataclass(frozen=True)
class Seat:
    """Where a journal lies: what tells a project's directory from a copy of it.

    Attributes:
        inode: of the directory. It survives a renaming, and the removal of `.snakemake`.
        path: of the directory, absolute.
    """

    machine: str
    inode: int
    path: str

    @classmethod
    def of(cls, home: Path) -> "Seat":
        return cls(_machine(), os.stat(home).st_ino, str(home.resolve()))

    @classmethod
    def read(cls, text: str) -> "Seat":
        """Return the seat in a journal; nowhere if it has none, or a damaged one."""
        try:
            seat = json.loads(text)
            return cls(str(seat["machine"]), int(seat["inode"]), str(seat["path"]))
        except (KeyError, TypeError, ValueError):
            return cls("", 0, "")

    @property
    def digest(self) -> str:
        """Return a name of it that tells nothing about it."""
        return _digest(self.machine, self.inode, self.path)

    @property
    def workflow(self) -> str:
        """Return the name of the workflow that begins here.

        It depends on nothing that can be lost with the journal, so that a new one finds the
        workspace of the lost one.
        """
        return _digest(self.machine, self.path)[:32]

    def is_same(self, now: "Seat") -> bool:
        """Return whether the directory `now` is the one that was here: it may have been moved."""
        if (self.machine, self.inode) != (now.machine, now.inode):
            return False
        with suppress(OSError):
            return os.stat(self.path).st_ino != self.inode or os.path.samefile(self.path, now.path)
        return True

    def is_left(self, now: "Seat") -> bool:
        """Return whether nothing is here any more: it was moved, maybe to another file system."""
        return self.machine == now.machine and not os.path.lexists(self.path)


class Database(Tables):
    """An open and locked journal file.

    Attributes:
        instance: a random name of this file; a copy, wherever it is, gets another when opened.
        home: the directory that the workflow's workspaces are named after: its own, or, if that was
            moved, the one in which it began.
        remark: a notice for the user; may be empty.
        learned: paths of remote outputs that the journal did not know when it was opened: its
            spare, or the place, did.
    """

    instance: str
    home: Path

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        """Open or create the journal in `directory` and take its lock.

        A new directory is closed to others, unless it is `shared` with its group. What the spare
        knows and the journal does not is restored: it is damaged, empty or missing, or it is an
        older one. A damaged file is kept under another name.

        Raises:
            JournalError: another controller holds it, it has another version, it cannot be locked
                or written, or nothing of its contents can be restored.
        """
        self.path = directory / JOURNAL_FILE
        self.remark = ""
        self.learned: set[str] = set()
        try:
            make_private(directory, shared=shared)
            self._locks = _locked(directory)
        except OSError as error:
            raise JournalError(
                f"the journal cannot be written ({error.strerror}: {error.filename})",
                where=str(directory),
                do="Check its permissions and the free disk space, and start again",
            ) from error
        self._seat = Seat.of(home_of(directory))
        known, self._lost_facts = backup.read_backup(directory)
        try:
            what = "empty" if self.path.exists() else "missing"
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                what = self._replace_damaged(error, known)
            self._restore(known, what)
        except BaseException as error:
            Database.close(self)
            if isinstance(error, sqlite3.DatabaseError | OSError):
                raise self._damaged(str(error)) from error
            raise

    def _open(self) -> None:
        self.db = sqlite3.connect(
            self.path, isolation_level=None, timeout=30, check_same_thread=False
        )
        self.db.row_factory = sqlite3.Row
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = NORMAL")
        found = self.db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            error = sqlite3.DatabaseError(" ".join(str(found).split()))
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        self._prepare()

    def _replace_damaged(self, error: sqlite3.DatabaseError, known: backup.Facts) -> str:
        """Replace a damaged journal by an empty one; return what was wrong, in words.

        Raises:
            JournalError: it is not damaged but inaccessible, or its spare names no workflow.
        """
        if getattr(error, "sqlite_errorcode", None) not in _DAMAGE or backup.WORKFLOW not in known:
            raise self._damaged(str(error)) from error
        if hasattr(self, "db"):
            self.db.close()
        kept = _set_aside(self.path)
        self._open()
        return f"damaged ({error}; it is kept as {kept})"

    def _restore(self, known: backup.Facts, what: str) -> None:
        """Take over from the spare what the journal does not know, and find out where it lies.

        `what` is wrong with the journal if it is new although there is a spare.
        """
        found = self.db.execute("SELECT * FROM workflow").fetchone()
        spared = dict(known[backup.WORKFLOW][0][1]) if backup.WORKFLOW in known else None
        before = dict(found) if found is not None else spared
        restored = spared is not None and found is None
        if found is not None and spared is not None and found["id"] == spared["id"]:
            what, restored = "older than its spare", self._lags(known)
        if restored:
            self._report_restored(known, what)
        now, copied = self._seated(before or {"id": self._seat.workflow})
        self.instance, self.home = str(now["instance"]), Path(now["home"])
        if not restored and found is not None and now == before:
            return
        with self.write() as db:
            db.execute("DELETE FROM workflow")
            insert(db, "workflow", now)
            if restored:
                fill(db, known)
                db.execute("UPDATE places SET restored = 1, bucket = NULL")
            if copied:  # the original may continue to fill its buckets
                db.execute("UPDATE places SET bucket = NULL")
                db.execute("DELETE FROM locks")

    def _report_restored(self, known: backup.Facts, what: str) -> None:
        places = {name: rows[0][1]["place"] for (kind, name), rows in known.items()
                  if kind == "stored"}  # fmt: skip
        self.learned = {path for path, place in places.items() if place != LOST}
        count = sum(place not in ("", LOST) for place in places.values())
        attempts = sum(kind == "attempt" for kind, _ in known)
        lost = lost_facts_message(self._lost_facts)
        self.remark = (
            f"The journal was {what}. It has been restored from its spare. Jobs to look for at"
            f" the sites: {attempts}.{f' Outputs that stay there: {count}.' if count else ''} Files"
            f" are uploaded again.{lost}"
        )

    def _lags(self, known: backup.Facts) -> bool:
        """Return whether the spare knows of submissions or runs that the journal does not know."""
        sent = set(self.column("SELECT id FROM attempts WHERE state <> 'planned'"))
        mine = dict(self.db.execute("SELECT place, number FROM places"))
        return any(
            (kind == "attempt" and name not in sent)
            or (kind == "number" and rows[0][1]["number"] > mine.get(name, 0))
            for (kind, name), rows in known.items()
        )

    def _seated(self, before: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the workflow's row, and whether this is a copy of the directory that it was in."""
        instance, home = before.get("instance", ""), before.get("home") or self._seat.path
        left = Seat.read(before.get("seat", ""))
        if instance and left == self._seat:
            return dict(before), False
        copied = bool(instance) and not left.is_same(self._seat)
        if copied and left.path != self._seat.path and not left.is_left(self._seat):
            home = self._seat.path
            self.remark += (
                f"{' ' * bool(self.remark)}This directory is a copy of {left.path}. It uses"
                " workspaces of its own; jobs and outputs at the sites belong to the original."
            )
        if copied or not instance:
            instance = uuid.uuid4().hex[:16]
        seat = json.dumps(asdict(self._seat))
        return {"id": before["id"], "instance": instance, "seat": seat, "home": home}, copied

    def close(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
        self._locks.close()


def lost_facts_message(number: int) -> str:
    """Return a sentence on damaged lines of a spare, with a blank before it; empty without any."""
    if not number:
        return ""
    return (
        f" {humanize_count(number, 'line')} of the spare cannot be read: jobs and outputs that are"
        " not in another one are looked for at the sites."
    )


def home_of(directory: Path) -> Path:
    """Return the workflow's directory, for its state directory; that itself if it is elsewhere."""
    if directory.parts[-len(STATE.parts) :] == STATE.parts:
        return directory.parents[len(STATE.parts) - 1]
    return directory


def _digest(*parts: object) -> str:
    text = "\0".join(map(str, parts))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


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
        if taken and (home := home_of(directory)) != directory:
            taken = _take_directory(home, locks)
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


def insert(
    db: sqlite3.Connection, table: str, columns: Mapping[str, object], else_: str = "ABORT"
) -> None:
    """Insert a row in the caller's transaction; `else_` is done if there is one (SQLite's OR)."""
    names, marks = ", ".join(columns), ", ".join("?" * len(columns))
    db.execute(
        f"INSERT OR {else_} INTO {table} ({names}) VALUES ({marks})",  # noqa: S608
        list(columns.values()),
    )


def fill(db: sqlite3.Connection, known: backup.Facts) -> None:
    """Add facts to tables that do not know them.

    Each attempt counts as possibly known to its site. What was uploaded since is unknown, and so is
    what runs have done since: the place is asked (`engine.leases`).
    """
    for (kind, name), rows in known.items():
        if kind == "workflow":
            continue
        if kind == "number":
            db.execute(
                "INSERT INTO places (place, number) VALUES (?, ?)"
                " ON CONFLICT (place) DO UPDATE SET number = MAX(number, excluded.number)",
                (name, rows[0][1]["number"]),
            )
            continue
        if kind == "attempt":
            db.execute("DELETE FROM attempts WHERE id = ? AND state = 'planned'", (name,))
            if db.execute("SELECT 1 FROM attempts WHERE id = ?", (name,)).fetchone():
                continue
            add_event(db, name, EventKind.TRACKED)
        for table, columns in rows:
            there = {row["name"] for row in db.execute(f"PRAGMA table_info ({table})")}
            known_columns = {column: columns[column] for column in columns.keys() & there}
            insert(db, table, known_columns, "IGNORE" if table == "workflows" else "REPLACE")


def _set_aside(path: Path) -> Path:
    """Move a damaged journal and its WAL to another name."""
    kept = next(
        name
        for number in itertools.count(1)
        if not (name := path.with_name(f"{path.name}.damaged-{number}")).exists()
    )
    for beside in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(f"{path.name}{beside}").replace(kept.with_name(f"{kept.name}{beside}"))
    return kept
