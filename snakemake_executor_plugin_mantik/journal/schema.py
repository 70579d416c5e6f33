"""The journal's tables, and which rows fit into them."""

import json
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Any, Final

from .records import IDENTITY, AttemptState, is_utf8

SCHEMA: Final = """
CREATE TABLE workflow (
    id TEXT NOT NULL, instance TEXT NOT NULL, seat TEXT NOT NULL, home TEXT NOT NULL
);
CREATE TABLE runs (
    began REAL NOT NULL, ended REAL, ending TEXT NOT NULL DEFAULT '', about TEXT NOT NULL,
    pipeline TEXT NOT NULL DEFAULT ''
);
CREATE TABLE sites (
    site TEXT PRIMARY KEY, url TEXT NOT NULL, workspace TEXT NOT NULL,
    config TEXT NOT NULL DEFAULT '', place TEXT NOT NULL
);
CREATE TABLE places (
    place TEXT PRIMARY KEY, bucket INTEGER, number INTEGER NOT NULL DEFAULT 0,
    restored INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE locks (
    place TEXT PRIMARY KEY, lease TEXT NOT NULL, about TEXT NOT NULL, unlocked INTEGER NOT NULL
);
CREATE TABLE buckets (
    place TEXT NOT NULL, bucket INTEGER NOT NULL, PRIMARY KEY (place, bucket)
);
CREATE TABLE attempts (
    id TEXT PRIMARY KEY, site TEXT NOT NULL, place TEXT NOT NULL, bucket INTEGER NOT NULL,
    job TEXT NOT NULL, rule TEXT NOT NULL, name TEXT NOT NULL, fingerprint TEXT NOT NULL,
    made_of TEXT NOT NULL DEFAULT '', state TEXT NOT NULL, outcome TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '', queue TEXT NOT NULL DEFAULT '', log TEXT NOT NULL DEFAULT '',
    logs TEXT NOT NULL DEFAULT '', created REAL NOT NULL, submitted REAL, sent REAL, started REAL,
    finished REAL, waited REAL, ran REAL, runtime REAL, waits TEXT NOT NULL DEFAULT '',
    pending TEXT NOT NULL DEFAULT '', expected REAL, after TEXT NOT NULL DEFAULT '',
    segment INTEGER NOT NULL DEFAULT 0, segments INTEGER NOT NULL DEFAULT 0,
    follows TEXT NOT NULL DEFAULT '', goes_on TEXT NOT NULL DEFAULT '',
    asked TEXT NOT NULL DEFAULT '', used TEXT NOT NULL DEFAULT ''
);
CREATE INDEX attempts_job ON attempts (job);
CREATE INDEX attempts_name ON attempts (name);
CREATE INDEX attempts_bucket ON attempts (site, bucket);
CREATE INDEX attempts_place ON attempts (place, bucket);
CREATE INDEX attempts_after ON attempts (after)
    WHERE after <> '' AND state NOT IN ('done', 'abandoned');
CREATE TABLE members (
    attempt TEXT NOT NULL REFERENCES attempts (id), job TEXT NOT NULL, name TEXT NOT NULL
);
CREATE INDEX members_attempt ON members (attempt);
CREATE INDEX members_job ON members (job);
CREATE INDEX members_name ON members (name);
CREATE TABLE submissions (
    attempt TEXT NOT NULL REFERENCES attempts (id), site_job TEXT NOT NULL,
    PRIMARY KEY (attempt, site_job)
);
CREATE TABLE secrets (attempt TEXT PRIMARY KEY REFERENCES attempts (id));
CREATE TABLE allocations (
    tag TEXT PRIMARY KEY, site TEXT NOT NULL, pool TEXT NOT NULL, site_job TEXT NOT NULL,
    cores INTEGER NOT NULL, submitted REAL NOT NULL, started REAL, ended REAL,
    seconds INTEGER NOT NULL, used INTEGER NOT NULL
);
CREATE TABLE uses (
    place TEXT NOT NULL, path TEXT NOT NULL, attempt TEXT NOT NULL REFERENCES attempts (id),
    checkpoint INTEGER NOT NULL, PRIMARY KEY (place, path, attempt, checkpoint)
) WITHOUT ROWID;
CREATE INDEX uses_attempt ON uses (attempt);
CREATE TABLE made (
    attempt TEXT NOT NULL, path TEXT NOT NULL, sha256 TEXT NOT NULL, PRIMARY KEY (attempt, path)
);
CREATE TABLE kept (
    attempt TEXT NOT NULL, path TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (attempt, path)
);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, subject TEXT NOT NULL, kind TEXT NOT NULL, time REAL NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX events_subject ON events (subject);
CREATE TABLE workflows (
    id TEXT PRIMARY KEY, identity TEXT NOT NULL, created REAL NOT NULL, ended REAL,
    run INTEGER, data TEXT NOT NULL DEFAULT ''
);
CREATE TABLE tracked (
    attempt TEXT PRIMARY KEY REFERENCES attempts (id), workflow TEXT NOT NULL,
    number INTEGER NOT NULL, behind INTEGER NOT NULL, follows TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT '', data TEXT NOT NULL DEFAULT '', given TEXT NOT NULL DEFAULT ''
);
CREATE INDEX tracked_workflow ON tracked (workflow);
CREATE INDEX tracked_follows ON tracked (follows);
CREATE INDEX tracked_open ON tracked (status) WHERE status = '';
CREATE TABLE local_files (
    path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL, inode INTEGER NOT NULL, sha256 TEXT NOT NULL
);
CREATE TABLE remote_files (
    place TEXT NOT NULL, path TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    project INTEGER NOT NULL DEFAULT 0, modified REAL NOT NULL DEFAULT 0,
    mode INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (place, path)
);
CREATE TABLE links (path TEXT PRIMARY KEY, target TEXT NOT NULL);
CREATE TABLE stored (
    path TEXT PRIMARY KEY, place TEXT NOT NULL, directory INTEGER NOT NULL,
    files INTEGER NOT NULL, made REAL NOT NULL, job TEXT NOT NULL
);
CREATE TABLE undeclared (
    path TEXT NOT NULL, place TEXT NOT NULL, size INTEGER NOT NULL, modified REAL NOT NULL,
    mode INTEGER NOT NULL, job TEXT NOT NULL, PRIMARY KEY (path, place)
);
CREATE TABLE numbered (
    place TEXT NOT NULL, path TEXT NOT NULL, number INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (place, path)
);
CREATE TABLE bundles (
    id TEXT PRIMARY KEY, place TEXT NOT NULL, state TEXT NOT NULL,
    digest TEXT NOT NULL DEFAULT '', size INTEGER NOT NULL DEFAULT 0,
    sent INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE bundle_files (
    bundle TEXT NOT NULL REFERENCES bundles (id), path TEXT NOT NULL, size INTEGER NOT NULL,
    sha256 TEXT NOT NULL, project INTEGER NOT NULL, name TEXT NOT NULL DEFAULT '',
    site TEXT NOT NULL DEFAULT '', import_id TEXT NOT NULL DEFAULT '', PRIMARY KEY (bundle, path)
);
CREATE INDEX bundle_files_content ON bundle_files (path, sha256);
"""
VERSION: Final = zlib.crc32(SCHEMA.encode()) >> 1
"""What a journal with these tables has as its `user_version`: no change of them is forgotten."""

_FACTS: Final = {
    "workflow": ("workflow", "", ()),
    "site": ("sites", "site", ()),
    "number": ("places", "place", ()),
    "attempt": ("attempts", "id", ("members", "uses", "tracked", "workflows")),
    "stored": ("stored", "path", ("remote_files", "links")),
}
"""The table of each kind of fact in a spare, the column with its name, and further tables."""
_VALUES: Final = {"TEXT": (str,), "INTEGER": (int,), "REAL": (int, float)}
_JSON: Final = {"after": dict, "logs": list, "data": dict, "given": dict, "seat": dict}
"""What the JSON in some columns is, unless they are empty."""
_LARGEST: Final = 2**63


@cache
def _columns() -> dict[str, list[tuple[str, str, bool]]]:
    """Return the name and type of each table's columns, and whether they need a value."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE sql > ''")]
        return {
            table: [
                (name, kind, bool(key) or (needed and default is None))
                for _, name, kind, needed, default, key in db.execute(
                    f"PRAGMA table_info ({table})"
                )
            ]
            for table in tables
        }


def is_fact(kind: str, name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Return whether rows are a fact of a spare, as far as their tables and values tell."""
    if kind not in _FACTS or not rows:
        return False
    table, key, others = _FACTS[kind]
    own = rows[0][1]
    if rows[0][0] != table or (key and own.get(key) != name):
        return False
    if kind == "attempt" and own.get("state") not in list(AttemptState):
        return False
    return all(other in others for other, _ in rows[1:]) and all(
        row.get("attempt", name) == name and _is_value(row.get(column), column, sort, needed=needed)
        for other, row in rows
        for column, sort, needed in _columns()[other]
    )


def decode_identity(line: str) -> dict[str, Any] | None:
    """Return the columns in a line of `encode_identity`; None if it is damaged."""
    try:
        facts = json.loads(line)
        known = {name: facts[name] for name in IDENTITY}
        members = dict(facts["members"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    own = {**known, "id": "", "place": "", "bucket": 0, "state": AttemptState.SUBMITTING}
    rows = [{"attempt": "", "job": job, "name": name} for job, name in members.items()]
    fits = is_fact("attempt", "", [("attempts", own), *(("members", row) for row in rows)])
    return {**known, "members": members} if fits else None


def _is_value(value: object, column: str, sort: str, *, needed: bool) -> bool:
    if not isinstance(value, str | int | float):
        return value is None and not needed
    if not isinstance(value, _VALUES[sort]):
        return False
    if not isinstance(value, str):
        return abs(value) < _LARGEST  # nor is it NaN
    if column not in _JSON or not value:
        return is_utf8(value)
    try:
        return isinstance(json.loads(value), _JSON[column])
    except (ValueError, RecursionError):
        return False
