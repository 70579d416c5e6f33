"""The log: what happened to each try, in order, for readers with a cursor of their own.

Each event is written in the transaction that changes what the journal knows of its subject.
"""

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class EventKind(StrEnum):
    """What happened to a try; `TRACKED` and those after it happen to a workflow as well.

    TAKEN_UP: a segment's turn has come. CONCLUDED: its job does not go on after it. TRACKED: it has
    an MLflow run from now on. BEGUN: another Snakemake goes on with the workflow. SETTLED: it was
    found to be over when no Snakemake was there any more.
    """

    SUBMITTED = "submitted"
    WAITING = "waiting"
    STARTED = "started"
    TAKEN_UP = "taken up"
    CONCLUDED = "concluded"
    TRACKED = "tracked"
    BEGUN = "begun"
    DETACHED = "detached"
    ENDED = "ended"
    SETTLED = "settled"


@dataclass(frozen=True)
class Event:
    """An event in the log.

    Attributes:
        seq: grows from event to event, also in a journal that was restored from its spare.
        subject: the id of a try or of a workflow.
        time: seconds since the epoch.
    """

    seq: int
    subject: str
    kind: EventKind
    time: float
    data: Mapping[str, Any]


def add_event(db: sqlite3.Connection, subject: str, kind: EventKind, **data: object) -> None:
    """Add an event in the caller's transaction."""
    now = time.time()
    db.execute(
        "INSERT INTO events SELECT MAX(COALESCE(MAX(seq), 0) + 1, ?), ?, ?, ?, ? FROM events",
        (int(now * 1e6), subject, kind, now, json.dumps(data)),
    )


def read_events(db: sqlite3.Connection, after: int = 0, *, subject: str = "") -> list[Event]:
    """Return the events after `after`, of one subject or of all."""
    which = "AND subject = ?" if subject else ""
    rows = db.execute(
        f"SELECT * FROM events WHERE seq > ? {which} ORDER BY seq",  # noqa: S608
        (after, subject) if subject else (after,),
    )
    return [
        Event(row["seq"], row["subject"], EventKind(row["kind"]), row["time"],
              json.loads(row["data"]))
        for row in rows
    ]  # fmt: skip
