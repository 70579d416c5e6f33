"""The outbox: events for MLflow, written before they are published and marked afterwards.

It is one SQLite file per workflow directory, written by the controller and by one worker at a time.
Each tracked try has a row, and so does each workflow with a run of its own, under a key that is no
try's id. The events of a row are published in order, except that those of kind LIVE have a lane of
their own. A write survives kill -9 once the method has returned. `ledger.py` stores the records of
a workflow's jobs in the same file.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

OUTBOX_VERSION = 5
_LOCK_WAIT_S = 5.0
"""The most seconds to wait while another process writes; a write takes about a millisecond."""

_SCHEMA = """
CREATE TABLE runs (
    try TEXT PRIMARY KEY, uri TEXT NOT NULL, data TEXT NOT NULL, created REAL NOT NULL,
    run_id TEXT NOT NULL DEFAULT '', experiment_id TEXT NOT NULL DEFAULT '',
    experiment TEXT NOT NULL DEFAULT '', own_id TEXT NOT NULL DEFAULT '',
    own_experiment_id TEXT NOT NULL DEFAULT '', head TEXT NOT NULL DEFAULT ''
);
CREATE INDEX runs_head ON runs (head);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, try TEXT NOT NULL, kind TEXT NOT NULL,
    data TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, done REAL, UNIQUE (try, kind)
);
CREATE INDEX events_open ON events (done, seq);
CREATE TABLE workflows (
    id TEXT PRIMARY KEY, identity TEXT NOT NULL, created REAL NOT NULL, ended REAL,
    pipeline TEXT NOT NULL DEFAULT ''
);
CREATE TABLE jobs (
    try TEXT PRIMARY KEY, workflow TEXT NOT NULL, job TEXT NOT NULL, rule TEXT NOT NULL,
    name TEXT NOT NULL, site TEXT NOT NULL, members TEXT NOT NULL DEFAULT '[]',
    attempt INTEGER NOT NULL, created REAL NOT NULL, cores INTEGER, queued REAL, started REAL,
    ended REAL, status TEXT NOT NULL DEFAULT '', cpu REAL, ran REAL, submitted REAL,
    note TEXT NOT NULL DEFAULT '',
    follows TEXT NOT NULL DEFAULT '', behind INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX jobs_job ON jobs (job);
CREATE INDEX jobs_workflow ON jobs (workflow);
CREATE INDEX jobs_follows ON jobs (follows)
"""


class Lane(StrEnum):
    """A concurrent queue of the worker: jobs wait for their runs, and an end may take long."""

    MAKING = "making"
    STATES = "states"
    LIVE = "live"
    ENDING = "ending"


class EventKind(StrEnum):
    """What happened to a try or to a workflow; between start and end, a workflow has UPDATE."""

    CREATE = "create"
    SUBMITTED = "submitted"
    WAITING = "waiting"
    STARTED = "started"
    LIVE = "live"
    UPDATE = "update"
    END = "end"


_REPEATED = (EventKind.SUBMITTED, EventKind.WAITING, EventKind.LIVE, EventKind.UPDATE)
"""Kinds that may repeat; a new event replaces the last one of its kind, published or not."""
LATE = (EventKind.UPDATE, EventKind.END)
"""Kinds that may take long to publish: they have a lane of their own."""


@dataclass(frozen=True)
class Event:
    """An event to publish to MLflow.

    Attributes:
        seq: grows with time.
        attempts: how often its publication was begun, or that of an event that it replaced.
    """

    seq: int
    try_id: str
    kind: EventKind
    data: Mapping[str, Any]
    attempts: int


@dataclass(frozen=True)
class RunRecord:
    """A tracked try, or a workflow.

    Attributes:
        uri: the tracking URI; empty: MLflow's default, until the worker knows it.
        data: the values to create the run with.
        created: seconds since the epoch.
        run_id: MLflow's id of the run; empty until MLflow has created it.
        experiment_id, experiment: of the run.
        own_id: the id that the job got instead of MLflow's: one of ours, because MLflow's was late,
            or that of a run created before the job.
        own_experiment_id: the experiment's id that the job got with `own_id`.
        head: the try that the run was created for, if this one is another segment of the same job
            (`continue_run`).
    """

    try_id: str
    uri: str
    data: Mapping[str, Any]
    created: float
    run_id: str
    experiment_id: str
    experiment: str
    own_id: str
    own_experiment_id: str
    head: str = ""

    @property
    def given(self) -> tuple[str, str]:
        """The ids of the run and of its experiment as the job knows them."""
        if self.own_id:
            return self.own_id, self.own_experiment_id or self.experiment_id
        return self.run_id, self.experiment_id

    @property
    def members(self) -> dict[int, tuple[str, str]]:
        """The members of a group that have runs of their own, by number.

        Of each, the run's id as the job knows it, and MLflow's; that is empty until it is made.
        """
        made = self.data.get("member_runs", {})
        found = {}
        for number in self.data.get("members", {}):
            run_id = made.get(number, "")
            own_id = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.try_id}/{number}").hex
            found[int(number)] = (own_id if self.own_id or not run_id else run_id, run_id)
        return found


class Outbox:
    """The outbox of one workflow directory. An object belongs to one thread at a time.

    All methods raise `sqlite3.Error` if the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and create it if needed."""
        self._db = sqlite3.connect(
            path, isolation_level=None, timeout=_LOCK_WAIT_S, check_same_thread=False
        )
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self.write() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, OUTBOX_VERSION):
                raise sqlite3.NotSupportedError(f"{path} was made by another version")
            if not version:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {OUTBOX_VERSION}")

    def close(self) -> None:
        self._db.close()

    @property
    def db(self) -> sqlite3.Connection:
        """The connection to the file, for reading."""
        return self._db

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: roll it back on any exception."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # The controller

    def add_run(self, try_id: str, uri: str, data: Mapping[str, Any]) -> None:
        """Track a try, unless it is tracked already."""
        with self.write() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO runs (try, uri, data, created) VALUES (?, ?, ?, ?)",
                (try_id, uri, json.dumps(data), time.time()),
            )
            if added.rowcount:
                self._insert(db, try_id, EventKind.CREATE, {})

    def continue_run(self, try_id: str, before: RunRecord, data: Mapping[str, Any]) -> None:
        """Track a try in the run of the try that it goes on from, unless it is tracked already."""
        with self.write() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO runs SELECT ?, uri, ?, ?, run_id, experiment_id, experiment,"
                " own_id, own_experiment_id, ? FROM runs WHERE try = ?",
                (try_id, json.dumps(data), time.time(), before.head or before.try_id,
                 before.try_id),
            )  # fmt: skip
            if added.rowcount:
                self._insert(db, try_id, EventKind.CREATE, {}, done=True)

    def drop(self, try_id: str) -> None:
        """Publish nothing more of a try that never was more than a segment that waited."""
        with self.write() as db:
            db.execute(
                "DELETE FROM events WHERE try = ? AND (done IS NULL OR kind = 'end')", (try_id,)
            )
            self._insert(db, try_id, EventKind.END, {"goes_on": True}, done=True)

    def conclude(self, try_id: str, data: Mapping[str, Any]) -> None:
        """End the run of a job with the segment `try_id`, after which it was to go on.

        `data` are the values of its END event that change. What is published already is not again.
        """
        with self.write() as db:
            known = dict(self.end_of(try_id))
            if not known.get("goes_on"):
                return
            row = db.execute(
                "SELECT seq, attempts, done FROM events WHERE try = ? AND kind = ?",
                (try_id, EventKind.END),
            ).fetchone()
            db.execute("DELETE FROM events WHERE seq = ?", (row["seq"],))
            if row["done"] is not None:
                known.pop("metrics", None)
            self._insert(
                db, try_id, EventKind.END, {**known, **data, "goes_on": False},
                attempts=row["attempts"],
            )  # fmt: skip

    def end_of(self, try_id: str) -> Mapping[str, Any]:
        """Return the values of a try's END event; empty if there is none."""
        row = self._db.execute(
            "SELECT data FROM events WHERE try = ? AND kind = ?", (try_id, EventKind.END)
        ).fetchone()
        return dict(json.loads(row["data"])) if row is not None else {}

    def add(self, try_id: str, kind: EventKind, data: Mapping[str, Any]) -> bool:
        """Add an event of a tracked try; return whether it was added.

        Each kind happens once per try, except those in `_REPEATED`. Nothing happens after the end.
        """
        with self.write() as db:
            known = {
                row["kind"]: row["attempts"]
                for row in db.execute("SELECT kind, attempts FROM events WHERE try = ?", (try_id,))
            }
            if EventKind.CREATE not in known or EventKind.END in known:
                return False
            if kind in known:
                if kind not in _REPEATED:
                    return False
                db.execute("DELETE FROM events WHERE try = ? AND kind = ?", (try_id, kind))
            self._insert(db, try_id, kind, data, attempts=known.get(kind, 0))
        return True

    @staticmethod
    def _insert(
        db: sqlite3.Connection,
        try_id: str,
        kind: EventKind,
        data: Mapping[str, Any],
        *,
        attempts: int = 0,
        done: bool = False,
    ) -> None:
        db.execute(
            "INSERT INTO events (try, kind, data, attempts, done) VALUES (?, ?, ?, ?, ?)",
            (try_id, kind, json.dumps(data), attempts, time.time() if done else None),
        )

    def give_own_id(self, try_id: str, own_id: str, experiment_id: str, experiment: str) -> None:
        """Store the id and experiment given to a job, unless MLflow has created its run."""
        self.execute(
            "UPDATE runs SET own_id = ?, own_experiment_id = ?, experiment = ? "
            " WHERE (try = ? OR head = ?) AND run_id = ''",
            (own_id, experiment_id, experiment, try_id, try_id),
        )

    # The controller and the worker

    def run(self, try_id: str) -> RunRecord | None:
        """Return a tracked try; None if it is not tracked."""
        row = self._db.execute("SELECT * FROM runs WHERE try = ?", (try_id,)).fetchone()
        if row is None:
            return None
        values = dict(row)
        return RunRecord(try_id=values.pop("try"), data=json.loads(values.pop("data")), **values)

    def adopted(self, run_id: str) -> str:
        """Return the try that uses the existing run of this id; empty if none does."""
        row = self._db.execute(
            "SELECT try FROM runs WHERE json_extract(data, '$.run_id') = ?", (run_id,)
        ).fetchone()
        return str(row["try"]) if row else ""

    def pending(self) -> int:
        """Return the number of tries and workflows with unpublished events."""
        row = self._db.execute("SELECT COUNT(DISTINCT try) FROM events WHERE done IS NULL")
        return int(row.fetchone()[0])

    def is_continued(self, try_id: str) -> bool:
        """Return whether another try goes on in the run of this one."""
        row = self._db.execute(
            "SELECT 1 FROM runs WHERE json_extract(data, '$.follows') = ?", (try_id,)
        ).fetchone()
        return row is not None

    def settled(self, try_id: str) -> bool:
        """Return whether the end of a try is published, or the outbox has no events of it."""
        row = self._db.execute(
            "SELECT COUNT(*) AS all_of_it, SUM(kind = ? AND done IS NOT NULL) AS ended"
            " FROM events WHERE try = ?",
            (EventKind.END, try_id),
        ).fetchone()
        return not row["all_of_it"] or bool(row["ended"])

    def is_over(self, try_id: str) -> bool:
        """Return whether the end of the run that was created for a try is published."""
        row = self._db.execute(
            "SELECT 1 FROM events JOIN runs USING (try) WHERE (try = ? OR head = ?) AND kind = ?"
            " AND done IS NOT NULL AND NOT COALESCE(json_extract(events.data, '$.goes_on'), 0)",
            (try_id, try_id, EventKind.END),
        ).fetchone()
        return row is not None

    # The worker

    def open_tries(self, lane: Lane) -> list[str]:
        """Return the tries of a lane that have unpublished events, the oldest first.

        MAKING: MLflow has not created their runs, which must come first. ENDING: their CREATE
        events are published, and one in `LATE` is not. LIVE: their jobs have logged. STATES: the
        rest.
        """
        rows = self._db.execute(
            "SELECT try, MIN(seq) AS first, run_id, SUM(kind = 'create') AS making,"
            " SUM(kind = 'live') AS live, SUM(kind IN ('update', 'end')) AS late,"
            " COUNT(*) AS all_of_it"
            " FROM events JOIN runs USING (try) WHERE done IS NULL GROUP BY try ORDER BY first"
        )
        return [row["try"] for row in rows if lane in _lanes(row)]

    def events(self, try_id: str) -> list[Event]:
        """Return the unpublished events of a try, in order."""
        rows = self._db.execute(
            "SELECT * FROM events WHERE try = ? AND done IS NULL ORDER BY seq", (try_id,)
        )
        return [
            Event(r["seq"], r["try"], EventKind(r["kind"]), json.loads(r["data"]), r["attempts"])
            for r in rows
        ]

    def begin(self, event: Event) -> None:
        """Count an attempt to publish an event: if the worker dies now, MLflow may have it."""
        # Not by `seq`: a repeated event may just have replaced it under another one.
        self.execute(
            "UPDATE events SET attempts = attempts + 1 WHERE try = ? AND kind = ?",
            (event.try_id, event.kind),
        )

    def begun(self, try_id: str, kind: EventKind) -> bool:
        """Return whether the publication of an event of this kind was ever begun."""
        row = self._db.execute(
            "SELECT attempts FROM events WHERE try = ? AND kind = ?", (try_id, kind)
        ).fetchone()
        return row is not None and row["attempts"] > 0

    def done(self, event: Event) -> None:
        """Record that an event is published."""
        self.execute("UPDATE events SET done = ? WHERE seq = ?", (time.time(), event.seq))

    def made(self, try_id: str, uri: str, run_id: str, experiment_id: str, experiment: str) -> None:
        """Record that MLflow has created the run of a try."""
        self.execute(
            "UPDATE runs SET uri = ?, run_id = ?, experiment_id = ?, experiment = ?"
            " WHERE try = ? OR head = ?",
            (uri, run_id, experiment_id, experiment, try_id, try_id),
        )

    def keep_steps(self, try_id: str, steps: Mapping[str, int]) -> None:
        """Store the last step of each metric that earlier segments of a try's job have logged."""
        self.execute(
            "UPDATE runs SET data = json_set(data, '$.steps', json(?)) WHERE try = ?",
            (json.dumps(steps), try_id),
        )

    def keep_members(self, try_id: str, run_ids: Mapping[str, str]) -> None:
        """Store the ids of the runs of a group's members, by number."""
        self.execute(
            "UPDATE runs SET data = json_set(data, '$.member_runs', json(?)) WHERE try = ?",
            (json.dumps(run_ids), try_id),
        )

    def execute(self, statement: str, values: tuple[object, ...]) -> None:
        """Run one statement in a transaction of its own."""
        self._db.execute(statement, values)


def _lanes(row: sqlite3.Row) -> set[Lane]:
    """Return the lanes of a try with unpublished events."""
    if not row["run_id"]:
        return {Lane.MAKING}
    if row["late"] and not row["making"]:
        return {Lane.ENDING}
    lanes = {Lane.STATES} if row["all_of_it"] > row["live"] else set()
    return lanes | ({Lane.LIVE} if row["live"] and not row["making"] else set())
