"""The attempts and workflows that have MLflow runs, as far as the journal must know them.

A workflow here is what one run at MLflow shows: it may be continued by several Snakemakes. Each
attempt of such a workflow has a row, whether it has a run of its own or not.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .database import Database, insert
from .records import AttemptRecord, EventKind, add_event

FINISHED: Final = "FINISHED"
GOES_ON: Final = "GOES_ON"
"""The status of a segment that another one follows: its job is not over."""
_STATUS: Final[Mapping[str, str]] = {
    "finished": FINISHED, "failed": "FAILED", "killed": "KILLED",
}  # fmt: skip
_ANEW: Final = "it was to go on in a next segment, but began anew"
_NO_NEXT: Final = "it was to go on in a next segment, and did not"
_UNSENT: Final = "its Snakemake ended before the job was submitted"
_DEAD: Final = "its Snakemake had ended, and no job of it was open any more"


@dataclass(frozen=True)
class TrackedAttempt:
    """An attempt of a workflow that is tracked.

    Attributes:
        number: 1, or one more than that of the previous attempt, if that one did not finish.
        behind: whether it waits at the site for the attempt that it follows, or never did more.
        follows: the attempt whose job it continues as a segment; empty if that began with it.
        status: MLflow's final status, or `GOES_ON`; empty until the attempt has ended.
        data: what its run is created with; empty if it has no run of its own.
        given: the ids of its run as the job knows them (`TrackedLedger.give`).
    """

    attempt_id: str
    workflow: str
    number: int
    behind: bool
    follows: str
    status: str
    data: Mapping[str, Any]
    given: Mapping[str, Any]


class TrackedLedger:
    """Reads and writes the journal's part on MLflow runs. Belongs to the journal's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._db = database.db

    # Workflows

    def begin(self, identity: str) -> str:
        """Return the workflow that this Snakemake runs: an open one to continue, or a new one.

        `identity` is what identifies it in its directory.
        """
        key = self.unended(identity)
        with self._database.write() as db:
            if not key:
                key = str(uuid.uuid4())
                db.execute(
                    "INSERT INTO workflows (id, identity, created) VALUES (?, ?, ?)",
                    (key, identity, time.time()),
                )
            db.execute(
                "UPDATE workflows SET run = (SELECT MAX(rowid) FROM runs) WHERE id = ?", (key,)
            )
            add_event(db, key, EventKind.BEGUN)
        return key

    def unended(self, identity: str) -> str:
        """Return the last workflow of an identity that has not ended; empty if there is none."""
        last = "identity = ? AND ended IS NULL ORDER BY rowid DESC LIMIT 1"
        return self._database.value(f"SELECT id FROM workflows WHERE {last}", identity) or ""  # noqa: S608

    def any(self) -> bool:
        """Return whether a workflow was ever tracked here."""
        return bool(self._database.value("SELECT 1 FROM workflows"))

    def has_run(self, workflow: str) -> bool:
        """Return whether a workflow has a run of its own (`describe`)."""
        return bool(self._database.value("SELECT data FROM workflows WHERE id = ?", workflow))

    def settle(self, but: str = "") -> None:
        """End the workflows whose Snakemake is gone and that have no open attempt at a site.

        `but` is the identity of a workflow that may be continued, and is left out.
        """
        over = self._db.execute(
            "SELECT id FROM workflows WHERE ended IS NULL AND identity <> ? AND NOT EXISTS"
            " (SELECT 1 FROM tracked JOIN attempts ON attempts.id = attempt"
            " WHERE workflow = workflows.id AND status = ''"
            " AND state IN ('submitting', 'submitted', 'ended')) ORDER BY rowid",
            (but,),
        ).fetchall()
        for row in over:
            with self._database.write() as db:
                for unsent in db.execute(
                    "SELECT attempt FROM tracked WHERE workflow = ? AND status = '' AND NOT behind",
                    (row["id"],),
                ).fetchall():
                    add_event(db, unsent["attempt"], EventKind.SETTLED, words=_UNSENT)
                db.execute(
                    "UPDATE tracked SET status = 'KILLED' WHERE workflow = ? AND status = ''",
                    (row["id"],),
                )
                _conclude(db, "KILLED", _NO_NEXT, workflow=row["id"])
                _end(db, row["id"], "KILLED", _DEAD)

    # Attempts

    def get(self, attempt_id: str) -> TrackedAttempt | None:
        """Return an attempt; None if it belongs to no workflow."""
        return read_tracked(self._db, attempt_id)

    def join(self, record: AttemptRecord, workflow: str, *, behind: bool = False) -> TrackedAttempt:
        """Add an attempt to a workflow; it continues the one it follows, unless that is over."""
        first = self._continued(record.follows) if record.follows else None
        before = self.before(record)
        number = before.number + 1 if before is not None else 1
        with self._database.write() as db:
            insert(db, "tracked", {
                "attempt": record.id, "workflow": workflow,
                "number": first.number if first is not None else number,
                "behind": behind and first is not None,
                "follows": record.follows if first is not None else "",
            })  # fmt: skip
        found = self.get(record.id)
        assert found is not None
        return found

    def _continued(self, attempt_id: str) -> TrackedAttempt | None:
        """Return an attempt if another can continue its job's run; None if that run has ended."""
        later = self._database.value(
            "SELECT 1 FROM tracked WHERE follows = ? AND status NOT IN ('', ?) AND NOT behind",
            attempt_id, GOES_ON,
        )  # fmt: skip
        found = self.get(attempt_id)
        return found if later is None and found and found.status in ("", GOES_ON) else None

    def before(self, record: AttemptRecord) -> TrackedAttempt | None:
        """Return the previous attempt of the same job, if it ended without finishing."""
        last = self._database.value(
            "SELECT attempt FROM tracked JOIN attempts ON attempts.id = attempt WHERE job = ?"
            " AND attempt <> ? AND NOT behind ORDER BY tracked.rowid DESC LIMIT 1",
            record.job, record.id,
        )  # fmt: skip
        found = self.get(last) if last is not None else None
        return found if found is not None and found.status not in ("", FINISHED) else None

    def revive(self, attempt_id: str) -> None:
        """Reopen an attempt that was taken for over because it had not been submitted."""
        with self._database.write() as db:
            db.execute("UPDATE tracked SET status = '' WHERE attempt = ?", (attempt_id,))
            add_event(db, attempt_id, EventKind.TRACKED)

    def take_up(self, attempt_id: str) -> None:
        """Record that a segment is the present one of its job, not one that waits any more."""
        with self._database.write() as db:
            while (found := read_tracked(db, attempt_id)) is not None:
                if found.behind:
                    db.execute("UPDATE tracked SET behind = 0 WHERE attempt = ?", (attempt_id,))
                    add_event(db, attempt_id, EventKind.REATTACHED)
                attempt_id = found.follows

    def begin_anew(self, record: AttemptRecord) -> None:
        """End the runs of a job's earlier segments: an attempt begins the job anew."""
        with self._database.write() as db:
            _conclude(db, "KILLED", _ANEW, job=record.job, but=record.id)

    def describe(self, subject: str, data: Mapping[str, Any]) -> None:
        """Record what the run of an attempt or a workflow is created with."""
        with self._database.write() as db:
            for table, key in (("tracked", "attempt"), ("workflows", "id")):
                db.execute(
                    f"UPDATE {table} SET data = ? WHERE {key} = ?",  # noqa: S608
                    (json.dumps(data), subject),
                )
            add_event(db, subject, EventKind.TRACKED)

    def give(self, attempt_id: str, given: Mapping[str, Any]) -> None:
        """Record the ids that a job is given: of its run, its experiment and its members' runs."""
        self._database.change(
            "UPDATE tracked SET given = ? WHERE attempt = ?", json.dumps(given), attempt_id
        )

    def adopted(self, run_id: str) -> str:
        """Return the attempt that uses the existing run of this id; empty if none does."""
        return read_adopted(self._db, run_id)


def read_tracked(db: sqlite3.Connection, attempt_id: str) -> TrackedAttempt | None:
    """Return an attempt that belongs to a tracked workflow; None if it does not."""
    row = db.execute("SELECT * FROM tracked WHERE attempt = ?", (attempt_id,)).fetchone()
    if row is None:
        return None
    values = dict(row)
    data, given = (json.loads(values.pop(name) or "{}") for name in ("data", "given"))
    return TrackedAttempt(
        values.pop("attempt"), data=data, given=given, **values | {"behind": bool(row["behind"])}
    )


def read_adopted(db: sqlite3.Connection, run_id: str) -> str:
    """Return the attempt that uses the existing run of this id; empty if none does."""
    row = db.execute(
        "SELECT attempt FROM tracked WHERE data <> '' AND json_extract(data, '$.run_id') = ?",
        (run_id,),
    ).fetchone()
    return str(row["attempt"]) if row else ""


def end_tracked(db: sqlite3.Connection, attempt_id: str, how: str, successor: str) -> None:
    """Record the end of an attempt in the caller's transaction, if tracked; the first one counts.

    The arguments are those of `engine.observer.JobEnd`.
    """
    db.execute(
        "UPDATE tracked SET status = CASE WHEN ? = 'next segment'"
        " OR (? = 'same segment' AND follows <> '') THEN ? ELSE ? END"
        " WHERE attempt = ? AND status = ''",
        (successor, successor, GOES_ON, _STATUS[how], attempt_id),
    )


def end_workflow(db: sqlite3.Connection, ending: str) -> None:
    """Record, in the caller's transaction, how the Snakemake that started last has ended."""
    row = db.execute(
        "SELECT id FROM workflows WHERE run = (SELECT MAX(rowid) FROM runs) AND ended IS NULL"
    ).fetchone()
    if row is None:
        return
    if ending == "detached":
        add_event(db, row["id"], EventKind.DETACHED)
        return
    _conclude(db, "FAILED" if ending == "failed" else "KILLED", _NO_NEXT, workflow=row["id"])
    _end(db, row["id"], _STATUS[ending], "")


def _end(db: sqlite3.Connection, key: str, status: str, words: str) -> None:
    db.execute("UPDATE workflows SET ended = ? WHERE id = ?", (time.time(), key))
    add_event(db, key, EventKind.ENDED, status=status, words=words)


def _conclude(
    db: sqlite3.Connection, status: str, words: str, *, workflow: str = "", job: str = "",
    but: str = "",
) -> None:  # fmt: skip
    """End the runs of jobs that were to go on in a next segment and did not.

    `workflow` or `job` chooses them; `but` is an attempt that does not count as one that goes on.
    """
    unfinished = db.execute(
        "SELECT attempt FROM tracked AS t JOIN attempts AS j ON j.id = attempt"
        " WHERE status = ? AND ? IN (workflow, job) AND NOT EXISTS"
        " (SELECT 1 FROM tracked AS n JOIN attempts AS m ON m.id = n.attempt WHERE m.job = j.job"
        " AND n.rowid > t.rowid AND n.attempt <> ? AND (n.status = '' OR NOT n.behind))",
        (GOES_ON, workflow or job, but),
    ).fetchall()
    for row in unfinished:
        db.execute("UPDATE tracked SET status = ? WHERE attempt = ?", (status, row["attempt"]))
        add_event(db, row["attempt"], EventKind.CONCLUDED, status=status, words=words)
