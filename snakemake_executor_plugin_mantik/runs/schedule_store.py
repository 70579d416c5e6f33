"""Store schedules in one SQLite file per user, which commands and schedulers write concurrently.

A due time is claimed by inserting its row into `firings`, before any other step; each due time has
one row at most. When a method returns, its write survives a power cut.
"""

import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any, Final

from ..common.errors import MantikError, UserError
from ..common.state_directory import make_private, open_private
from .schedules import Firing, FiringState, MissedPolicy, Schedule

SCHEDULES_FILE: Final = "schedules.sqlite"
_VERSION: Final = 2
KEPT: Final = 500
"""How many past due times of each schedule are kept, to be shown."""

CAUGHT_UP: Final = "caught up"
NEVER_BEGUN: Final = "no scheduler submitted it before the next due time"

_LOCK_WAIT_S: Final = 30.0
_SCHEMA: Final = """
CREATE TABLE schedules (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, run TEXT NOT NULL,
    cron TEXT NOT NULL, tz TEXT NOT NULL, until TEXT, account TEXT NOT NULL, missed TEXT NOT NULL,
    since REAL NOT NULL, revision INTEGER NOT NULL DEFAULT 0, site TEXT NOT NULL DEFAULT ''
);
CREATE TABLE firings (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    schedule INTEGER NOT NULL REFERENCES schedules (id) ON DELETE CASCADE, due INTEGER NOT NULL,
    state TEXT NOT NULL, key TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    begun INTEGER NOT NULL DEFAULT 0, retry REAL NOT NULL, run TEXT NOT NULL DEFAULT '',
    told TEXT NOT NULL DEFAULT '', changed REAL NOT NULL, UNIQUE (schedule, due)
);
CREATE INDEX firings_state ON firings (state);
"""

_CLAIM: Final = """
INSERT INTO firings (schedule, due, state, key, retry, told, changed)
VALUES (:schedule, :due, :state, :key, :now, :told, :now)
ON CONFLICT (schedule, due) DO UPDATE SET state = :state, told = :told, changed = :now, retry = :now
WHERE state = 'missed' AND :state = 'firing'
"""
"""A due time that a wrong clock marked as missed can still be fired."""


class ScheduleStore:
    """The schedules of a user.

    All methods raise `MantikError` if the file cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        """Open the file in `directory`. Create missing ones, accessible to the user only.

        Raises:
            UserError: another version wrote the file.
        """
        self.path = directory / SCHEDULES_FILE
        try:
            make_private(directory)
            open_private(self.path, "ab").close()
            # No write-ahead log: it does not work on network file systems, where homes often lie.
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=_LOCK_WAIT_S)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from None
        self._db.row_factory = sqlite3.Row
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        with self._store_errors():
            self._db.execute("PRAGMA foreign_keys = ON")
        if not self._version():
            with self._write() as db:
                if not self._version():  # another process may have done it meanwhile
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {_VERSION}")
        if (version := self._version()) != _VERSION:
            raise UserError(
                f"the file has version {version}, this command reads {_VERSION}",
                where=str(self.path),
                do="Use the snakemake-executor-plugin-mantik that wrote it, or move it away",
            )

    def _version(self) -> int:
        return int(self._rows("PRAGMA user_version")[0][0])

    def close(self) -> None:
        self._db.close()

    def _unusable(self, error: Exception) -> MantikError:
        return MantikError(
            f"cannot use the schedules ({error})", where=str(self.path),
            do="Check that the disk is not full and that you own the file",
        )  # fmt: skip

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._store_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, statement: str, *values: object) -> list[sqlite3.Row]:
        with self._store_errors():
            return self._db.execute(statement, values).fetchall()

    # Schedules

    def all(self) -> list[Schedule]:
        """Return all schedules, ordered by name."""
        return [_schedule(row) for row in self._rows("SELECT * FROM schedules ORDER BY name")]

    def get(self, name: str) -> Schedule | None:
        return next((each for each in self.all() if each.name == name), None)

    def by_id(self, schedule_id: int) -> Schedule | None:
        return next((each for each in self.all() if each.id == schedule_id), None)

    def add(self, schedule: Schedule) -> bool:
        """Add a schedule under a new id. Return False if its name is taken."""
        values = _columns(schedule)
        del values["id"]
        names = ", ".join(values)
        with self._write() as db:
            done = db.execute(
                f"INSERT OR IGNORE INTO schedules ({names})"  # noqa: S608 - our own names
                f" VALUES ({', '.join('?' * len(values))})",
                list(values.values()),
            )
        return done.rowcount == 1

    def edit(self, schedule: Schedule) -> bool:
        """Change all but name and id. Return False if it was changed or removed since the read."""
        values = _columns(schedule) | {"revision": schedule.revision + 1}
        del values["id"], values["name"]
        setting = ", ".join(f"{name} = ?" for name in values)
        with self._write() as db:
            done = db.execute(
                f"UPDATE schedules SET {setting} WHERE id = ? AND revision = ?",  # noqa: S608
                [*values.values(), schedule.id, schedule.revision],
            )
        return done.rowcount == 1

    def remove(self, schedule_id: int) -> None:
        """Remove a schedule and its due times."""
        with self._write() as db:
            db.execute("DELETE FROM schedules WHERE id = ?", (schedule_id,))

    def rewind(self, schedule: Schedule, now: float) -> None:
        """Check due times from `now` on, because the clock was ahead at the last check."""
        with self._write() as db:
            db.execute(
                "UPDATE schedules SET since = ? WHERE id = ? AND revision = ? AND since > ?",
                (now, schedule.id, schedule.revision, now),
            )

    # Due times

    def claim(
        self,
        schedule: Schedule,
        upto: int,
        rows: Sequence[tuple[int, FiringState, str]],
        now: float,
    ) -> bool:
        """Claim due times. Return False if another process did, or the schedule was edited.

        If one of them is to be fired, earlier firings that are not submitted are given up, except
        those whose submission is running or was interrupted.

        Args:
            schedule: as read when the due times were computed.
            upto: due times up to this one are not checked again, unless the clock is set back.
            rows: due time, state and reason of each.
            now: the current time.
        """
        with self._write() as db:
            done = db.execute(
                "UPDATE schedules SET since = ? WHERE id = ? AND revision = ? AND since < ?",
                (upto, schedule.id, schedule.revision, upto),
            )
            if done.rowcount != 1:
                return False
            if any(state is FiringState.FIRING for _, state, _ in rows):
                db.execute(
                    "UPDATE firings SET state = ?, changed = ?,"
                    " told = CASE WHEN told IN ('', ?) THEN ? ELSE told END"
                    " WHERE schedule = ? AND state = 'firing' AND NOT begun",
                    (FiringState.FAILED, now, CAUGHT_UP, NEVER_BEGUN, schedule.id),
                )
            for due, state, told in rows:
                row = {"schedule": schedule.id, "due": due, "state": state, "told": told}
                db.execute(_CLAIM, row | {"key": uuid.uuid4().hex, "now": now})
            db.execute(
                "DELETE FROM firings WHERE schedule = ? AND state != ? AND due <= ("
                "SELECT due FROM firings WHERE schedule = ? ORDER BY due DESC LIMIT 1 OFFSET ?)",
                (schedule.id, FiringState.FIRING, schedule.id, KEPT),
            )
        return True

    def firing(self, firing_id: int) -> Firing | None:
        found = self._rows("SELECT * FROM firings WHERE id = ?", firing_id)
        return _firing(found[0]) if found else None

    def open(self) -> list[Firing]:
        """Return the due times to submit, the oldest first."""
        rows = self._rows("SELECT * FROM firings WHERE state = ? ORDER BY due", FiringState.FIRING)
        return [_firing(row) for row in rows]

    def history(self, schedule_id: int, limit: int = KEPT) -> list[Firing]:
        """Return a schedule's claimed due times, the latest first."""
        rows = self._rows(
            "SELECT * FROM firings WHERE schedule = ? ORDER BY due DESC LIMIT ?",
            schedule_id, limit,
        )  # fmt: skip
        return [_firing(row) for row in rows]

    def begin(self, firing: Firing, now: float, retry: float) -> None:
        """Record that a submission starts: if this process is killed, a run may exist."""
        self._change(
            "attempts = attempts + 1, begun = 1, retry = ?, changed = ?", firing, retry, now
        )

    def fired(self, firing: Firing, run: str, now: float) -> None:
        self._change(
            "state = ?, begun = 0, run = ?, told = '', changed = ?",
            firing, FiringState.FIRED, run, now,
        )  # fmt: skip

    def put_off(self, firing: Firing, told: str, now: float, *, give_up: bool) -> None:
        """Record a failed submission, and give it up if a later due time is, or was, to be fired.

        If an earlier attempt was interrupted, a run may exist: `begun` stays set then, and the
        firing is not given up for a later one.

        `firing` is as before this attempt, `told` the reason. With `give_up`, give it up in any
        case.
        """
        with self._write() as db:
            later = db.execute(
                "SELECT 1 FROM firings WHERE schedule = ? AND due > ? AND state != ?",
                (firing.schedule, firing.due, FiringState.MISSED),
            ).fetchone()
            over = give_up or (later and not firing.begun)
            state = FiringState.FAILED if over else FiringState.FIRING
            db.execute(
                "UPDATE firings SET state = ?, begun = ?, told = ?, changed = ? WHERE id = ?",
                (state, firing.begun, told, now, firing.id),
            )

    def _change(self, setting: str, firing: Firing, *values: object) -> None:
        with self._write() as db:
            db.execute(f"UPDATE firings SET {setting} WHERE id = ?", (*values, firing.id))  # noqa: S608


def repeated_by(directory: Path, run_id: str) -> list[str]:
    """Return the names of the schedules that repeat a run, without creating the file.

    Raise MantikError if the file cannot be used.
    """
    if not (directory / SCHEDULES_FILE).exists():
        return []
    with closing(ScheduleStore(directory)) as store:
        return [schedule.name for schedule in store.all() if schedule.run == run_id]


def _columns(schedule: Schedule) -> dict[str, Any]:
    values = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    return values | {"until": schedule.until.isoformat() if schedule.until else None}


def _schedule(row: sqlite3.Row) -> Schedule:
    values = dict(row)
    until = date.fromisoformat(values["until"]) if values["until"] else None
    return Schedule(**values | {"until": until, "missed": MissedPolicy(values["missed"])})


def _firing(row: sqlite3.Row) -> Firing:
    values = dict(row)
    return Firing(
        **values | {"state": FiringState(values["state"]), "begun": bool(values["begun"])}
    )
