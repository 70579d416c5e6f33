"""What the journal's log says of runs, and up to where it is published to MLflow.

The journal is read without its lock. What was published is in a file of its own, one per workflow
directory, that only the process that publishes writes: MLflow's ids of the runs, and of each the
last event that is published. A write survives kill -9 once the method has returned. Whatever reads
or writes here raises `sqlite3.Error` if the journal or that file cannot be used.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.state_directory import STATE
from ..journal import (
    GOES_ON,
    JOURNAL_FILE,
    AttemptRecord,
    Event,
    EventKind,
    TrackedAttempt,
    connect,
    read_adopted,
    read_attempts,
    read_events,
    read_tracked,
)
from .store import DIRECTORY

CURSOR = "published.sqlite"
_VERSION = 1
_LOCK_WAIT_S = 5.0
"""The most seconds to wait while another process writes; a write takes about a millisecond."""

ALL = ""
"""In place of an attempt or workflow: its `seq` is the event up to which everything is
published."""


@dataclass(frozen=True)
class PublishedRun:
    """A run at MLflow.

    Attributes:
        id: the attempt or workflow that it was created for.
        run_id: MLflow's id; empty until MLflow has created it.
        members: MLflow's ids of the runs of a group's members, by number.
        steps: the last step of each metric that earlier segments have logged, as far as known.
        making: whether its creation was ever begun.
        described: whether its parameters and files are published.
        live: whether what its running job has logged was ever begun to be published.
        begun, seq: the last event whose publication was begun, and that is published.
    """

    id: str
    uri: str = ""
    run_id: str = ""
    experiment_id: str = ""
    experiment: str = ""
    members: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, int] | None = None
    making: bool = False
    described: bool = False
    live: bool = False
    begun: int = 0
    seq: int = 0


class Cursor:
    """What was published of one workflow directory; all methods may be called from any thread."""

    def __init__(self, workdir: Path) -> None:
        """Open the file, and create it if needed."""
        path = workdir / DIRECTORY / CURSOR
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            path, isolation_level=None, timeout=_LOCK_WAIT_S, check_same_thread=False
        )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        if (version := self._db.execute("PRAGMA user_version").fetchone()[0]) not in (0, _VERSION):
            raise sqlite3.NotSupportedError(f"{path} was made by another version")
        if not version:
            self._db.executescript(
                "BEGIN IMMEDIATE; CREATE TABLE IF NOT EXISTS runs"
                " (id TEXT PRIMARY KEY, data TEXT NOT NULL) WITHOUT ROWID;"
                f" PRAGMA user_version = {_VERSION}; COMMIT"
            )

    def close(self) -> None:
        self._db.close()

    def run(self, run_of: str) -> PublishedRun:
        """Return the run of an attempt or workflow, as far as it is published."""
        with self._lock:
            return PublishedRun(run_of, **self._read(run_of))

    def set(self, run_of: str, **values: object) -> None:
        """Record some of the attributes of `PublishedRun`."""
        with self._lock:
            now = json.dumps(self._read(run_of) | values)
            self._db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (run_of, now))

    def _read(self, run_of: str) -> dict[str, Any]:
        row = self._db.execute("SELECT data FROM runs WHERE id = ?", (run_of,)).fetchone()
        return dict(json.loads(row[0])) if row else {}


@dataclass(frozen=True)
class LoggedRun:
    """An attempt that has a run, or a workflow, as the journal knows it now.

    Attributes:
        data: what its run is created with.
        created: seconds since the epoch.
        tracked, record: the attempt; None for a workflow.
    """

    id: str
    data: Mapping[str, Any]
    created: float
    tracked: TrackedAttempt | None = None
    record: AttemptRecord | None = None

    @property
    def head(self) -> str:
        """The attempt or workflow that the run was created for."""
        return str(self.data.get("head") or self.id)

    @property
    def one(self) -> bool:
        """Whether retries go on in its run."""
        return bool(self.data.get("one"))


class Log:
    """The journal of a workflow directory, read beside the controller that writes it.

    An object is used within `open_log`, in one thread.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def run(self, run_of: str) -> LoggedRun | None:
        """Return an attempt that has a run, or a workflow; None if it has none."""
        tracked = read_tracked(self.db, run_of)
        if tracked is not None:
            records = read_attempts(self.db, "WHERE id = ?", (run_of,))
            if not tracked.data or not records:
                return None
            return LoggedRun(run_of, tracked.data, records[0].created, tracked, records[0])
        row = self.db.execute(
            "SELECT data, created FROM workflows WHERE id = ? AND data <> ''", (run_of,)
        ).fetchone()
        return LoggedRun(run_of, json.loads(row["data"]), row["created"]) if row else None

    def events(self, after: int = 0, *, of: str = "") -> list[Event]:
        """Return the events after one, of one attempt or workflow or of all."""
        return read_events(self.db, after, subject=of)

    def end(self, attempt_id: str) -> Event | None:
        """Return how an attempt has ended; the first time counts."""
        found = (e for e in self.events(of=attempt_id) if e.kind is EventKind.ENDED)
        return next(found, None)

    def sharing(self, head: str) -> list[str]:
        """Return the attempts whose run was created for one of them, in their order.

        They are of the same job: to look at those of all jobs would take longer with each job.
        """
        rows = self.db.execute(
            "SELECT attempt FROM tracked JOIN attempts ON attempts.id = attempt"
            " WHERE job = (SELECT job FROM attempts WHERE id = ?)"
            " AND (attempt = ? OR data <> '' AND json_extract(data, '$.head') = ?)"
            " ORDER BY tracked.rowid",
            (head, head, head),
        )
        return [row["attempt"] for row in rows]

    def attempts(self, head: str) -> list[LoggedRun]:
        """Return the attempts that share a run, without those that wait for the one before."""
        found = map(self.run, self.sharing(head))
        return [run for run in found if run and run.tracked and not run.tracked.behind]

    def jobs(self, workflow: str) -> list[tuple[TrackedAttempt, AttemptRecord]]:
        """Return all attempts of a workflow, the oldest first."""
        records = read_attempts(
            self.db, "WHERE id IN (SELECT attempt FROM tracked WHERE workflow = ?)", (workflow,)
        )
        pairs = ((read_tracked(self.db, record.id), record) for record in records)
        return [(tracked, record) for tracked, record in pairs if tracked is not None]

    def pipeline(self, workflow: str) -> Any:
        """Return a workflow's jobs and their dependencies; None if another one ran since."""
        row = self.db.execute(
            "SELECT pipeline FROM runs WHERE rowid = (SELECT run FROM workflows WHERE id = ?)",
            (workflow,),
        ).fetchone()
        return json.loads(row["pipeline"]) if row is not None and row["pipeline"] else None

    def running(self) -> list[str]:
        """Return the attempts with runs of their own that may log now."""
        rows = self.db.execute(
            "SELECT attempt FROM tracked WHERE status = '' AND data <> '' AND NOT behind"
        )
        return [row["attempt"] for row in rows]

    def unpublished(self, cursor: Cursor) -> dict[str, list[Event]]:
        """Return the events to publish, by attempt or workflow, in the order of the first of each.

        Segments that wait for the one before are left out until their turn comes.
        """
        new: dict[str, list[Event]] = {}
        for event in self.events(cursor.run(ALL).seq):
            new.setdefault(event.subject, []).append(event)
        found = {}
        for subject, events in new.items():
            run, seq = self.run(subject), cursor.run(subject).seq
            left = [event for event in events if event.seq > seq]
            if left and run is not None and not (run.tracked is not None and run.tracked.behind):
                found[subject] = left
        return found


@contextmanager
def open_log(workdir: Path) -> Iterator[Log]:
    """Open the journal of the workflow in `workdir` for reading."""
    with closing(connect(workdir / STATE / JOURNAL_FILE)) as db:
        yield Log(db)


def count_unpublished(workdir: Path) -> int:
    """Return the number of runs that MLflow does not know everything about."""
    with closing(Cursor(workdir)) as cursor, open_log(workdir) as log:
        return len(log.unpublished(cursor))


def is_reported(workdir: Path, run_id: str) -> bool:
    """Return whether the end of the run of this id, which an attempt has adopted, is published."""
    with closing(Cursor(workdir)) as cursor, open_log(workdir) as log:
        return any(
            (tracked := read_tracked(log.db, attempt_id)) is not None
            and tracked.status not in ("", GOES_ON)
            and (end := log.end(attempt_id)) is not None
            and cursor.run(attempt_id).seq >= end.seq
            for attempt_id in log.sharing(read_adopted(log.db, run_id))
        )
