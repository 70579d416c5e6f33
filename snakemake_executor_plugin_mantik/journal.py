"""The journal: what was done and what is about to be done, written before it is done.

One SQLite file per workflow directory, `.snakemake/mantik/journal.sqlite`, used by one controller
at a time (a lock that dies with its process). Every write is a transaction of its own that survives
kill -9 when the method returns. What comes before a submission survives power loss, too: the next
controller knows each try that may exist at a site. What comes after it may be forgotten by that: it
is then asked of the site again. Readers (`smk-mantik jobs`) may look at any time.
"""

import fcntl
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from snakemake_executor_plugin_mantik.errors import JournalError
from snakemake_executor_plugin_mantik.jobs.paths import TryPaths

VERSION = 1
BUCKET_SIZE = 500
"""Tries per bucket: small enough for one listing, large enough that few buckets are open."""

_SCHEMA = """
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
"""


class TryState(StrEnum):
    """How far a try is. The order is the order of life; a try never goes back.

    PLANNED: it exists here only. SUBMITTING: the site may have heard of it. SUBMITTED: the site has
    acknowledged it. ENDED: its end is known, its results may still be at the site. DONE: committed,
    nothing of it is needed any more. ABANDONED: it will never run or its results are not wanted.
    """

    PLANNED = "planned"
    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    ENDED = "ended"
    DONE = "done"
    ABANDONED = "abandoned"

    @property
    def final(self) -> bool:
        """Whether nothing is left to do for the try."""
        return self in (TryState.DONE, TryState.ABANDONED)


_ORDER = {state: rank for rank, state in enumerate(TryState)}


@dataclass(frozen=True)
class TryRecord:
    """A try as the journal knows it; times are seconds since the epoch, durations seconds.

    Attributes:
        job: what the try is a try of: stable over runs (rule, wildcards, outputs).
        fingerprint: of command, parameters, inputs, site and environment.
        outcome: empty while open, else `succeeded`, `failed: …` or `cancelled`.
        log: local path of the job's log once it is there.
    """

    id: str
    site: str
    bucket: int
    job: str
    rule: str
    name: str
    fingerprint: str
    state: TryState
    outcome: str = ""
    queue: str = ""
    log: str = ""
    created: float = 0.0
    submitted: float | None = None
    finished: float | None = None
    waited: float | None = None
    ran: float | None = None
    site_jobs: tuple[str, ...] = ()

    @property
    def paths(self) -> TryPaths:
        """Where the try's own things lie in the workspace."""
        return TryPaths(self.bucket, self.id)


@dataclass(frozen=True)
class FileRecord:
    """A file's content as the journal knows it, `path` relative to the workflow's directory."""

    path: str
    size: int
    sha256: str
    source: bool = False


class Journal:
    """Reads and writes the journal. Not thread-safe: it belongs to the thread that made it."""

    def __init__(self, directory: Path) -> None:
        """Open or create the journal in `directory` and take its lock.

        Raises:
            JournalError: another controller holds it, it is damaged, or of a newer version.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "journal.sqlite"
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
            self._db = _connect(self.path)
        except sqlite3.DatabaseError as error:
            self._lock.close()
            raise self._damaged(str(error)) from error
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self.close()
            raise self._damaged(str(error)) from error
        except JournalError:
            self.close()
            raise

    def _damaged(self, why: str) -> JournalError:
        return JournalError(
            f"the journal cannot be read ({why})",
            where=str(self.path),
            do="Keep a copy, then move it away; jobs that still run are then not adopted",
        )

    def _prepare(self) -> None:
        found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged(" ".join(str(found).split()))
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise JournalError(
                f"the journal is of version {version}, this executor knows up to {VERSION}",
                where=str(self.path),
                do="Update snakemake-executor-plugin-mantik",
            )
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")

    def close(self) -> None:
        """Close the file and give the lock back."""
        self._db.close()
        self._lock.close()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise JournalError(
                    f"the journal cannot be written ({error})",
                    where=str(self.path),
                    do="Free space here and start again: what runs is taken up",
                ) from error
            raise

    # Sites

    def site_workspace(self, site: str) -> tuple[str, str] | None:
        """The API's URL and the workspace that the site's records are about, if there are any."""
        row = self._db.execute("SELECT url, workspace FROM sites WHERE site = ?", (site,))
        found = row.fetchone()
        return (found["url"], found["workspace"]) if found else None

    def set_site(self, site: str, url: str, workspace: str) -> list[TryRecord]:
        """Note which workspace the records of `site` are about.

        If the name meant another workspace before, nothing is known of the new one, and the tries
        that were open at the old one are left to themselves; they are returned, to be told.
        """
        known = self.site_workspace(site)
        left: list[TryRecord] = []
        if known is not None and known != (url, workspace):
            left = [record for record in self.all_open_tries() if record.site == site]
        for record in left:
            self.abandoned(record.id, f"left at {known[0] if known else url}")
        with self._write() as db:
            if known is not None and known != (url, workspace):
                db.execute("DELETE FROM remote_files WHERE site = ?", (site,))
                db.execute("UPDATE bundles SET state = 'gone' WHERE site = ?", (site,))
            db.execute(
                "INSERT INTO sites (site, url, workspace) VALUES (?, ?, ?) ON CONFLICT (site)"
                " DO UPDATE SET url = excluded.url, workspace = excluded.workspace",
                (site, url, workspace),
            )
        return left

    def neighbours(self, site: str) -> list[str]:
        """The names, `site` among them, under which the workspace of `site` is known."""
        rows = self._db.execute(
            "SELECT b.site AS site FROM sites a JOIN sites b ON a.url = b.url"
            " AND a.workspace = b.workspace WHERE a.site = ? ORDER BY b.site",
            (site,),
        )
        return [row["site"] for row in rows]

    def retire_buckets(self, site: str) -> list[int]:
        """Close all buckets of the workspace of `site` that may lie there; their numbers.

        They are never used again: a job of theirs that the site starts late must not find a
        directory in which it could make a claim.
        """
        buckets: set[int] = set()
        names = self.neighbours(site)
        with self._write() as db:
            for name in names:
                rows = db.execute(
                    "SELECT DISTINCT bucket FROM tries WHERE site = :site AND bucket >="
                    " COALESCE((SELECT first_bucket FROM sites WHERE site = :site), 0)",
                    {"site": name},
                )
                buckets.update(row["bucket"] for row in rows)
            for name in names if buckets else []:
                db.execute(
                    "UPDATE sites SET first_bucket = ? WHERE site = ?", (max(buckets) + 1, name)
                )
        return sorted(buckets)

    # Tries

    def new_try(self, *, site: str, job: str, rule: str, name: str, fingerprint: str) -> TryRecord:
        """Decide to run a job: make a try with a new UUID in the bucket that is being filled."""
        with self._write() as db:
            row = db.execute(
                "SELECT bucket, COUNT(*) AS used FROM tries WHERE site = ? AND bucket ="
                " (SELECT MAX(bucket) FROM tries WHERE site = ?) GROUP BY bucket",
                (site, site),
            ).fetchone()
            bucket = 0 if row is None else row["bucket"] + (row["used"] >= BUCKET_SIZE)
            first = db.execute("SELECT first_bucket FROM sites WHERE site = ?", (site,)).fetchone()
            bucket = max(bucket, first["first_bucket"] if first else 0)
            record = TryRecord(
                id=str(uuid.uuid4()), site=site, bucket=bucket, job=job, rule=rule, name=name,
                fingerprint=fingerprint, state=TryState.PLANNED, created=time.time(),
            )  # fmt: skip
            db.execute(
                "INSERT INTO tries (id, site, bucket, job, rule, name, fingerprint, state, created)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (record.id, site, bucket, job, rule, name, fingerprint, record.state,
                 record.created),
            )  # fmt: skip
        return record

    def submitting(self, try_id: str, queue: str) -> None:
        """About to submit the try: from now on the site may know it. On disk when it returns."""
        self._db.execute("PRAGMA synchronous = FULL")
        self._advance(try_id, TryState.SUBMITTING, queue=queue)
        self._db.execute("PRAGMA synchronous = NORMAL")

    def submitted(self, try_id: str, site_job: str) -> None:
        """The site has acknowledged the try under the id `site_job`."""
        with self._write() as db:
            db.execute("INSERT OR IGNORE INTO submissions VALUES (?, ?)", (try_id, site_job))
            db.execute(
                "UPDATE tries SET state = ?, submitted = COALESCE(submitted, ?) WHERE id = ?"
                " AND state IN (?, ?, ?)",
                (TryState.SUBMITTED, time.time(), try_id, *list(TryState)[:3]),
            )

    def ended(
        self, try_id: str, outcome: str, *, waited: float | None, ran: float | None, log: str
    ) -> None:
        """The end of the try is known and told; its results are here or will not be wanted."""
        self._advance(
            try_id, TryState.ENDED, outcome=outcome, waited=waited, ran=ran, log=log,
            finished=time.time(),
        )  # fmt: skip

    def done(self, try_id: str) -> None:
        """Snakemake has taken the results: nothing at the site is needed any more."""
        self._advance(try_id, TryState.DONE)

    def abandoned(self, try_id: str, outcome: str) -> None:
        """The try is known never to run, or has ended and is not wanted."""
        self._advance(try_id, TryState.ABANDONED, outcome=outcome, finished=time.time())

    def _advance(self, try_id: str, state: TryState, **values: object) -> None:
        names = ", ".join(["state = ?", *(f"{name} = ?" for name in values)])
        before = [earlier for earlier in TryState if _ORDER[earlier] <= _ORDER[state]]
        marks = ", ".join("?" * len(before))
        with self._write() as db:
            db.execute(
                f"UPDATE tries SET {names} WHERE id = ? AND state IN ({marks})",  # noqa: S608
                (state, *values.values(), try_id, *before),
            )

    def open_tries(self, job: str) -> list[TryRecord]:
        """The tries of a job that are not final, the oldest first."""
        return self._tries("WHERE job = ? AND state NOT IN ('done', 'abandoned')", (job,))

    def all_open_tries(self) -> list[TryRecord]:
        """All tries that are not final, the oldest first."""
        return self._tries("WHERE state NOT IN ('done', 'abandoned')", ())

    def bucket_is_finished(self, site: str, bucket: int) -> bool:
        """Whether a bucket is full and all its tries are final."""
        row = self._db.execute(
            "SELECT COUNT(*) AS used, SUM(state NOT IN ('done', 'abandoned')) AS open FROM tries"
            " WHERE site = ? AND bucket = ?",
            (site, bucket),
        ).fetchone()
        return bool(row["used"] >= BUCKET_SIZE and not row["open"])

    def _tries(self, where: str, values: Sequence[object]) -> list[TryRecord]:
        return read_tries(self._db, where, values)

    # Files

    def local_file(self, path: str, size: int, mtime_ns: int) -> str | None:
        """The checksum of a local file, if it was taken when it had this size and mtime."""
        row = self._db.execute(
            "SELECT sha256 FROM local_files WHERE path = ? AND size = ? AND mtime_ns = ?",
            (path, size, mtime_ns),
        ).fetchone()
        return row["sha256"] if row else None

    def set_local_files(self, files: Iterable[tuple[str, int, int, str]]) -> None:
        """Note (path, size, mtime in ns, sha256) of local files."""
        with self._write() as db:
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
        with self._write() as db:
            db.executemany(
                "INSERT OR REPLACE INTO remote_files VALUES (?, ?, ?, ?, ?)",
                [(site, f.path, f.size, f.sha256, f.source) for f in files],
            )

    def forget_remote_files(self, site: str, paths: Iterable[str]) -> None:
        """These files may no longer lie in the workspace of `site`."""
        with self._write() as db:
            db.executemany(
                "DELETE FROM remote_files WHERE site = ? AND path = ?",
                [(site, path) for path in paths],
            )

    # Bundles

    def add_bundle(self, site: str, bundle: str, files: Iterable[FileRecord]) -> None:
        """A bundle has been uploaded; the next job that names it unpacks it."""
        with self._write() as db:
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
        with self._write() as db:
            db.executemany(
                "DELETE FROM bundle_files WHERE path = ? AND bundle IN"
                " (SELECT id FROM bundles WHERE site = ? AND state = 'uploaded')",
                [(path, site) for path in paths],
            )

    def set_bundle(self, bundle: str, state: str) -> None:
        """Note that a bundle is `unpacked`, or `gone` from the site."""
        with self._write() as db:
            db.execute("UPDATE bundles SET state = ? WHERE id = ?", (state, bundle))
            db.execute("DELETE FROM bundle_files WHERE bundle = ?", (bundle,))

    def unpacked_bundles(self, site: str) -> list[str]:
        """Bundles whose uploaded archives still lie at `site` and are of no more use."""
        rows = self._db.execute(
            "SELECT id FROM bundles WHERE site = ? AND state = 'unpacked'", (site,)
        )
        return [row["id"] for row in rows]


def _file(row: sqlite3.Row) -> FileRecord:
    return FileRecord(row["path"], row["size"], row["sha256"], bool(row["source"]))


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def read_tries(db: sqlite3.Connection, where: str, values: Sequence[object]) -> list[TryRecord]:
    """The tries that fit the SQL condition `where`, the oldest first."""
    rows = db.execute(f"SELECT * FROM tries {where} ORDER BY created", tuple(values)).fetchall()  # noqa: S608
    records = []
    for row in rows:
        fields = dict(row) | {"state": TryState(row["state"])}
        jobs = db.execute("SELECT site_job FROM submissions WHERE try = ?", (row["id"],))
        records.append(TryRecord(**fields, site_jobs=tuple(job["site_job"] for job in jobs)))
    return records


def history(directory: Path) -> list[TryRecord]:
    """All tries of the workflow in `directory`, read beside a running controller.

    Raises:
        JournalError: there is no journal, or it cannot be read.
    """
    path = directory / "journal.sqlite"
    if not path.exists():
        raise JournalError(
            "no job has been sent from here yet", where=str(path), do="Run snakemake first"
        )
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
            db.row_factory = sqlite3.Row
            return read_tries(db, "", ())
    except sqlite3.DatabaseError as error:
        raise JournalError(f"the journal cannot be read ({error})", where=str(path)) from error
