"""Where schedules are kept: one SQLite file per user, written by commands and schedulers at once.

A due time is a row of `firings` before anything is done about it, and there is one row for each:
whoever has put it there has claimed it. A write has survived a power cut when the method returns.
"""

import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.common.state_directory import make_private, open_private
from snakemake_executor_plugin_mantik.schedule.schedules import (
    Firing,
    FiringState,
    MissedPolicy,
    Schedule,
)

SCHEDULES_FILE: Final = "schedules.sqlite"
_VERSION: Final = 1
KEPT: Final = 500
"""Due times that are over and still shown, of each schedule."""

NEVER_BEGUN: Final = "the scheduler ended before it was submitted, until the next one was due"

_LOCK_WAIT_S: Final = 30.0
_SCHEMA: Final = """
CREATE TABLE schedules (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, run TEXT NOT NULL,
    cron TEXT NOT NULL, tz TEXT NOT NULL, until TEXT, account TEXT NOT NULL, missed TEXT NOT NULL,
    since REAL NOT NULL, revision INTEGER NOT NULL DEFAULT 0
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
"""What was missed by a clock that was wrong comes after all."""


class ScheduleStore:
    """The schedules of a user.

    All methods raise `MantikError` if the file cannot be used, and `UserError` where they say so.
    """

    def __init__(self, directory: Path) -> None:
        """Open the file in `directory`; both are made, closed to others, if they are not there."""
        self.path = directory / SCHEDULES_FILE
        try:
            make_private(directory)
            open_private(self.path, "ab").close()
            # No write-ahead log: homes are on network file systems, where there is none.
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
        with self._asked():
            self._db.execute("PRAGMA foreign_keys = ON")
        if self._version() < _VERSION:
            with self._write() as db:
                if self._version() == 0:  # nobody else has made them meanwhile
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {_VERSION}")
        if (version := self._version()) > _VERSION:
            raise UserError(
                f"it is of version {version}, this command knows up to {_VERSION}",
                where=str(self.path),
                do="Update snakemake-executor-plugin-mantik",
            )

    def _version(self) -> int:
        return int(self._rows("PRAGMA user_version")[0][0])

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _unusable(self, error: Exception) -> MantikError:
        return MantikError(
            f"the schedules cannot be used ({error})", where=str(self.path),
            do="See whether the disk is full and the file is yours",
        )  # fmt: skip

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._asked():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, statement: str, *values: object) -> list[sqlite3.Row]:
        with self._asked():
            return self._db.execute(statement, values).fetchall()

    # Schedules

    def all(self) -> list[Schedule]:
        """All schedules, by name."""
        return [_schedule(row) for row in self._rows("SELECT * FROM schedules ORDER BY name")]

    def get(self, name: str) -> Schedule | None:
        """The schedule of this name; None: there is none."""
        found = self._rows("SELECT * FROM schedules WHERE name = ?", name)
        return _schedule(found[0]) if found else None

    def by_id(self, schedule_id: int) -> Schedule | None:
        """The schedule of this id; None: it was removed."""
        found = self._rows("SELECT * FROM schedules WHERE id = ?", schedule_id)
        return _schedule(found[0]) if found else None

    def add(self, schedule: Schedule) -> bool:
        """Add a schedule, whose id does not count; False: its name is taken."""
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
        """Change all but name and id; False: it was changed or removed since it was read."""
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
        """Forget a schedule and its due times."""
        with self._write() as db:
            db.execute("DELETE FROM schedules WHERE id = ?", (schedule_id,))

    def rewind(self, schedule: Schedule, now: float) -> None:
        """The clock was ahead when due times were last looked at: they are looked at from now."""
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
        """Claim due times; False: somebody else has, or the schedule was edited.

        What of earlier ones failed so far is given up: the new one has come.

        Args:
            schedule: as it was read when they were found.
            upto: due times up to this one need not be looked at again.
            rows: for each: when it was due, how far it is, why.
            now: the time.
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
                    "UPDATE firings SET state = ?, changed = ?, told = CASE told WHEN '' THEN ?"
                    " ELSE told END WHERE schedule = ? AND state = ? AND NOT begun",
                    (FiringState.FAILED, now, NEVER_BEGUN, schedule.id, FiringState.FIRING),
                )
            for due, state, told in rows:
                db.execute(
                    _CLAIM,
                    {
                        "schedule": schedule.id,
                        "due": due,
                        "state": state,
                        "told": told,
                        "key": uuid.uuid4().hex,
                        "now": now,
                    },
                )
            db.execute(
                "DELETE FROM firings WHERE schedule = ? AND state != ? AND due <= ("
                "SELECT due FROM firings WHERE schedule = ? ORDER BY due DESC LIMIT 1 OFFSET ?)",
                (schedule.id, FiringState.FIRING, schedule.id, KEPT),
            )
        return True

    def firing(self, firing_id: int) -> Firing | None:
        """A claimed due time; None: there is none any more."""
        found = self._rows("SELECT * FROM firings WHERE id = ?", firing_id)
        return _firing(found[0]) if found else None

    def open(self) -> list[Firing]:
        """The due times that are to be submitted, the oldest first."""
        rows = self._rows("SELECT * FROM firings WHERE state = ? ORDER BY due", FiringState.FIRING)
        return [_firing(row) for row in rows]

    def history(self, schedule_id: int, limit: int = KEPT) -> list[Firing]:
        """What became of a schedule's due times, the latest first."""
        rows = self._rows(
            "SELECT * FROM firings WHERE schedule = ? ORDER BY due DESC LIMIT ?",
            schedule_id, limit,
        )  # fmt: skip
        return [_firing(row) for row in rows]

    def begin(self, firing: Firing, now: float, retry: float) -> None:
        """It is about to be submitted: if we are killed now it may have been."""
        self._change(
            "attempts = attempts + 1, begun = 1, retry = ?, changed = ?", firing, retry, now
        )

    def fired(self, firing: Firing, run: str, now: float) -> None:
        """It has been submitted."""
        self._change(
            "state = ?, begun = 0, run = ?, told = '', changed = ?",
            firing, FiringState.FIRED, run, now,
        )  # fmt: skip

    def put_off(self, firing: Firing, told: str, now: float, *, give_up: bool) -> None:
        """It could not be submitted; it is given up, too, if a later one has been claimed.

        Where an attempt before was interrupted, nobody knows whether a run came of it: then it
        stays so, and it is not given up for a later one.

        Args:
            firing: as it was before this attempt.
            told: why.
            now: the time.
            give_up: whether it is given up in any case.
        """
        with self._write() as db:
            later = db.execute(
                "SELECT 1 FROM firings WHERE schedule = ? AND due > ? AND state != ?",
                (firing.schedule, firing.due, FiringState.MISSED),
            ).fetchone()
            over = give_up or (later and not firing.begun)
            db.execute(
                "UPDATE firings SET state = ?, begun = ?, told = ?, changed = ? WHERE id = ?",
                (
                    FiringState.FAILED if over else FiringState.FIRING,
                    firing.begun,
                    told,
                    now,
                    firing.id,
                ),
            )

    def _change(self, setting: str, firing: Firing, *values: object) -> None:
        with self._write() as db:
            db.execute(f"UPDATE firings SET {setting} WHERE id = ?", (*values, firing.id))  # noqa: S608


def repeated_by(directory: Path, run_id: str) -> list[str]:
    """The names of the schedules that repeat a run; no file is made for that.

    Raises:
        MantikError: the file cannot be used.
    """
    if not (directory / SCHEDULES_FILE).exists():
        return []
    store = ScheduleStore(directory)
    try:
        return [schedule.name for schedule in store.all() if schedule.run == run_id]
    finally:
        store.close()


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
