"""Read a journal without its lock, also beside the controller that writes it.

`directory` is a workflow's state directory. All functions that open the journal in it raise
JournalError if it cannot be read.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..common.errors import JournalError
from ..common.locks import is_locked
from ..jobs.pools import Allocation
from .database import JOURNAL_FILE, JOURNAL_LOCK, JournalCopy, Tables, connect, has_tables
from .files import FileLedger
from .records import (
    AttemptRecord,
    AttemptState,
    RemoteOutput,
    SiteRecord,
    SnakemakeRun,
    UndeclaredFile,
)


def read_attempts(
    db: sqlite3.Connection, where: str, values: Sequence[object]
) -> list[AttemptRecord]:
    """Return the attempts that match the SQL clause `where`, or all, the oldest first."""
    rows = db.execute(f"SELECT * FROM attempts {where} ORDER BY rowid", tuple(values)).fetchall()  # noqa: S608
    records = []
    for row in rows:
        fields = dict(row) | {"state": AttemptState(row["state"])}
        jobs = db.execute("SELECT site_job FROM submissions WHERE attempt = ?", (row["id"],))
        records.append(AttemptRecord(**fields, site_jobs=tuple(job["site_job"] for job in jobs)))
    return records


def read_sites(db: sqlite3.Connection) -> dict[str, SiteRecord]:
    """Return the sites by name."""
    rows = db.execute("SELECT site, url, workspace, config, place FROM sites ORDER BY site")
    return {row["site"]: SiteRecord(**row) for row in rows}


def read_allocations(db: sqlite3.Connection, since: float = 0.0) -> list[Allocation]:
    """Return the allocations of pools that had not ended at `since`, the oldest first."""
    rows = db.execute(
        "SELECT * FROM allocations WHERE COALESCE(ended, ?) >= ? ORDER BY rowid", (since, since)
    )
    return [Allocation(**row) for row in rows]


def read_last_allocations(directory: Path) -> list[Allocation]:
    """Return the allocations of pools that had not ended when the last Snakemake here began."""
    with reading(directory, quiet=True) as db:
        if db is None:
            return []
        began = db.execute("SELECT MAX(began) FROM runs").fetchone()[0]
        return read_allocations(db, began or 0.0)


def read_members(db: sqlite3.Connection) -> dict[str, tuple[str, ...]]:
    """Return the jobs of all groups, by the group's attempt."""
    members: dict[str, tuple[str, ...]] = {}
    for row in db.execute("SELECT attempt, job FROM members"):
        members[row["attempt"]] = (*members.get(row["attempt"], ()), row["job"])
    return members


@contextmanager
def reading(directory: Path, *, quiet: bool = False) -> Iterator[sqlite3.Connection | None]:
    """Open a journal; yield None if there is none, or its first controller is about to fill it.

    For `quiet` see `connect`.
    """
    path = directory / JOURNAL_FILE
    if not path.exists():
        yield None
        return
    try:
        with closing(connect(path, quiet=quiet)) as db:
            yield db if has_tables(db, path) else None
    except sqlite3.DatabaseError as error:
        raise JournalError(
            f"the journal cannot be read ({error})",
            where=str(path),
            do="If it is damaged, start snakemake: it is restored from its spare",
        ) from error


def require_journal(directory: Path) -> None:
    """Raise JournalError if there is no journal."""
    if not (directory / JOURNAL_FILE).exists():
        raise JournalError(
            "no job has been submitted from here yet",
            where=str(directory / JOURNAL_FILE),
            do="Run snakemake first, or name the workflow's working directory with -d",
        )


@dataclass(frozen=True)
class RemoteOutputs:
    """The remote outputs of a workflow, its sites by name, and its own name in the journal.

    `lost` are the paths of outputs that do not exist, whatever lies here under their names; `home`
    is the directory that its workspaces are named after.
    """

    outputs: tuple[RemoteOutput, ...] = ()
    lost: frozenset[str] = frozenset()
    sites: Mapping[str, SiteRecord] = field(default_factory=dict)
    workflow: str = ""
    home: Path = Path()


def read_stored(directory: Path) -> RemoteOutputs:
    """Return the remote outputs of a workflow; none if it has no journal."""
    with reading(directory) as db:
        known = db and db.execute("SELECT id, home FROM workflow").fetchone()
        if db is None or not known:
            return RemoteOutputs()
        tables = Tables()
        tables.db = db
        outputs = tuple(FileLedger(tables).all_stored())
        there = {output.path for output in outputs}
        paths = {row["path"] for row in db.execute("SELECT path FROM stored")}
        return RemoteOutputs(
            outputs, frozenset(paths - there), read_sites(db), known["id"], Path(known["home"])
        )


def read_undeclared(directory: Path) -> list[UndeclaredFile]:
    """Return the new files that jobs left beside their outputs; none if there is no journal."""
    with reading(directory, quiet=True) as db:
        found = db.execute("SELECT * FROM undeclared ORDER BY path") if db is not None else ()
        return [UndeclaredFile(**row) for row in found]


def read_history(directory: Path, name: str = "") -> list[AttemptRecord]:
    """Return a workflow's attempts, or those of the job `name` and its groups, oldest first.

    Raise JournalError also if there is no journal.
    """
    require_journal(directory)
    with reading(directory) as db:
        if db is None:
            return []
        if not name:
            return read_attempts(db, "", ())
        named = "WHERE name = ? OR id IN (SELECT attempt FROM members WHERE name = ?)"
        return read_attempts(db, named, (name, name))


@dataclass(frozen=True)
class WorkflowHistory:
    """All that is known of a workflow's runs and jobs; the oldest come first.

    Attributes:
        members: the identities of the jobs of each attempt of a group, by the attempt's id.
    """

    runs: tuple[SnakemakeRun, ...]
    attempts: tuple[AttemptRecord, ...]
    members: Mapping[str, tuple[str, ...]]
    sites: Mapping[str, SiteRecord]
    allocations: tuple[Allocation, ...]


def read_workflow(directory: Path) -> WorkflowHistory:
    """Return all runs and attempts of a workflow.

    Raise JournalError also if there is no journal, or it has another version.
    """
    require_journal(directory)
    with closing(JournalCopy(directory).db) as db:
        return WorkflowHistory(
            tuple(_run(row) for row in db.execute("SELECT * FROM runs ORDER BY rowid")),
            tuple(read_attempts(db, "", ())),
            read_members(db),
            read_sites(db),
            tuple(read_allocations(db)),
        )


def _run(row: sqlite3.Row) -> SnakemakeRun:
    parts = {name: json.loads(row[name] or "{}") for name in ("about", "pipeline")}
    return SnakemakeRun(**dict(row) | parts)


def is_controlled(directory: Path) -> bool:
    """Return whether a controller runs that holds the journal."""
    return is_locked(directory / JOURNAL_LOCK)
