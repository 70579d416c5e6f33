"""The tries and workflows that have MLflow runs, as far as the journal must know them.

A workflow here is what one run at MLflow shows: it may be continued by several Snakemakes. Each try
of such a workflow has a row, whether it has a run of its own or not.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .database import Database, insert
from .records import EventKind, TryRecord, add_event

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
class TrackedTry:
    """A try of a workflow that is tracked.

    Attributes:
        number: 1, or one more than that of the previous try, if that one did not finish.
        behind: whether it waits at the site for the try that it follows, or never did more.
        follows: the try whose job it continues as a segment; empty if that began with it.
        status: MLflow's final status, or `GOES_ON`; empty until the try has ended.
        data: what its run is created with; empty if it has no run of its own.
        given: the ids of its run as the job knows them (`TrackedLedger.give`).
    """

    try_id: str
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
        """End the workflows whose Snakemake is gone and that have no open try at a site.

        `but` is the identity of a workflow that may be continued, and is left out.
        """
        over = self._db.execute(
            "SELECT id FROM workflows WHERE ended IS NULL AND identity <> ? AND NOT EXISTS"
            " (SELECT 1 FROM tracked JOIN tries ON tries.id = try WHERE workflow = workflows.id"
            " AND status = '' AND state IN ('submitting', 'submitted', 'ended')) ORDER BY rowid",
            (but,),
        ).fetchall()
        for row in over:
            with self._database.write() as db:
                for unsent in db.execute(
                    "SELECT try FROM tracked WHERE workflow = ? AND status = '' AND NOT behind",
                    (row["id"],),
                ).fetchall():
                    add_event(db, unsent["try"], EventKind.SETTLED, words=_UNSENT)
                db.execute(
                    "UPDATE tracked SET status = 'KILLED' WHERE workflow = ? AND status = ''",
                    (row["id"],),
                )
                _conclude(db, "KILLED", _NO_NEXT, workflow=row["id"])
                _end(db, row["id"], "KILLED", _DEAD)

    # Tries

    def get(self, try_id: str) -> TrackedTry | None:
        """Return a try; None if it belongs to no workflow."""
        return read_tracked(self._db, try_id)

    def join(self, record: TryRecord, workflow: str, *, behind: bool = False) -> TrackedTry:
        """Add a try to a workflow; it continues the one that it follows, unless that is over."""
        first = self._continued(record.follows) if record.follows else None
        before = self.before(record)
        number = before.number + 1 if before is not None else 1
        with self._database.write() as db:
            insert(db, "tracked", {
                "try": record.id, "workflow": workflow,
                "number": first.number if first is not None else number,
                "behind": behind and first is not None,
                "follows": record.follows if first is not None else "",
            })  # fmt: skip
        found = self.get(record.id)
        assert found is not None
        return found

    def _continued(self, try_id: str) -> TrackedTry | None:
        """Return a try if another one can continue its job's run; None if that run has ended."""
        later = self._database.value(
            "SELECT 1 FROM tracked WHERE follows = ? AND status NOT IN ('', ?) AND NOT behind",
            try_id, GOES_ON,
        )  # fmt: skip
        found = self.get(try_id)
        return found if later is None and found and found.status in ("", GOES_ON) else None

    def before(self, record: TryRecord) -> TrackedTry | None:
        """Return the previous try of the same job, if it ended without finishing."""
        last = self._database.value(
            "SELECT try FROM tracked JOIN tries ON tries.id = try WHERE job = ? AND try <> ?"
            " AND NOT behind ORDER BY tracked.rowid DESC LIMIT 1",
            record.job, record.id,
        )  # fmt: skip
        found = self.get(last) if last is not None else None
        return found if found is not None and found.status not in ("", FINISHED) else None

    def revive(self, try_id: str) -> None:
        """Reopen a try that was taken for over because it had not been submitted."""
        with self._database.write() as db:
            db.execute("UPDATE tracked SET status = '' WHERE try = ?", (try_id,))
            add_event(db, try_id, EventKind.TRACKED)

    def take_up(self, try_id: str) -> None:
        """Record that a segment is the present one of its job, not one that waits any more."""
        with self._database.write() as db:
            while (found := read_tracked(db, try_id)) is not None:
                if found.behind:
                    db.execute("UPDATE tracked SET behind = 0 WHERE try = ?", (try_id,))
                    add_event(db, try_id, EventKind.TAKEN_UP)
                try_id = found.follows

    def begin_anew(self, record: TryRecord) -> None:
        """End the runs of a job's earlier segments: a try begins the job anew."""
        with self._database.write() as db:
            _conclude(db, "KILLED", _ANEW, job=record.job, but=record.id)

    def describe(self, subject: str, data: Mapping[str, Any]) -> None:
        """Record what the run of a try or a workflow is created with."""
        with self._database.write() as db:
            for table, key in (("tracked", "try"), ("workflows", "id")):
                db.execute(
                    f"UPDATE {table} SET data = ? WHERE {key} = ?",  # noqa: S608
                    (json.dumps(data), subject),
                )
            add_event(db, subject, EventKind.TRACKED)

    def give(self, try_id: str, given: Mapping[str, Any]) -> None:
        """Record the ids that a job is given: of its run, its experiment and its members' runs."""
        self._database.change(
            "UPDATE tracked SET given = ? WHERE try = ?", json.dumps(given), try_id
        )

    def adopted(self, run_id: str) -> str:
        """Return the try that uses the existing run of this id; empty if none does."""
        return read_adopted(self._db, run_id)


def read_tracked(db: sqlite3.Connection, try_id: str) -> TrackedTry | None:
    """Return a try that belongs to a tracked workflow; None if it does not."""
    row = db.execute("SELECT * FROM tracked WHERE try = ?", (try_id,)).fetchone()
    if row is None:
        return None
    values = dict(row)
    data, given = (json.loads(values.pop(name) or "{}") for name in ("data", "given"))
    return TrackedTry(
        values.pop("try"), data=data, given=given, **values | {"behind": bool(row["behind"])}
    )


def read_adopted(db: sqlite3.Connection, run_id: str) -> str:
    """Return the try that uses the existing run of this id; empty if none does."""
    row = db.execute(
        "SELECT try FROM tracked WHERE data <> '' AND json_extract(data, '$.run_id') = ?",
        (run_id,),
    ).fetchone()
    return str(row["try"]) if row else ""


def end_tracked(db: sqlite3.Connection, try_id: str, how: str, successor: str) -> None:
    """Record the end of a try in the caller's transaction, if it is tracked; the first one counts.

    The arguments are those of `engine.observer.JobEnd`.
    """
    db.execute(
        "UPDATE tracked SET status = CASE WHEN ? = 'next segment'"
        " OR (? = 'same segment' AND follows <> '') THEN ? ELSE ? END"
        " WHERE try = ? AND status = ''",
        (successor, successor, GOES_ON, _STATUS[how], try_id),
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

    `workflow` or `job` chooses them; `but` is a try that does not count as one that goes on.
    """
    unfinished = db.execute(
        "SELECT try FROM tracked AS t JOIN tries AS j ON j.id = try"
        " WHERE status = ? AND ? IN (workflow, job) AND NOT EXISTS"
        " (SELECT 1 FROM tracked AS n JOIN tries AS m ON m.id = n.try WHERE m.job = j.job"
        " AND n.rowid > t.rowid AND n.try <> ? AND (n.status = '' OR NOT n.behind))",
        (GOES_ON, workflow or job, but),
    ).fetchall()
    for row in unfinished:
        db.execute("UPDATE tracked SET status = ? WHERE try = ?", (status, row["try"]))
        add_event(db, row["try"], EventKind.CONCLUDED, status=status, words=words)
