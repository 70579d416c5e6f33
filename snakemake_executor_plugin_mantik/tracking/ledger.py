"""Record the workflows that have MLflow runs, and the state of each of their jobs.

The records are in the outbox's file. Each submitted job of such a workflow has a row, whether it
has a run of its own or not. The workflow's run counts them all and shows them in its pictures, even
after its controller was killed and another one continued.
"""

import json
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .outbox import EventKind, Outbox

FINISHED = "FINISHED"
GOES_ON = "GOES_ON"
"""The status of a segment that another one follows: its job is not over."""


@dataclass(frozen=True)
class JobRow:
    """One try of a job of a workflow; times are seconds since the epoch on this machine's clock.

    Attributes:
        job: identifies the job, the same in every run (`JobRequest.job`).
        members: the jobs of a group.
        attempt: 1, or one more than that of the previous try, if that one did not finish.
        cores: the requested cores; None if unknown.
        submitted, queued, started, ended: None until then; `queued` is when the jobs before it at
            its site had ended, if there are any.
        ran: how long it ran, in seconds; None until it has ended, or if unknown.
        status: MLflow's final status, or `GOES_ON`; empty until the try has ended.
        cpu: the CPU time used, in seconds, if known.
        note: one line on how it ended.
        follows: the try of the same job that this one continues, in one run; empty if it has a run
            of its own.
        behind: whether it still waits at the site for that try's end, or never did more.
    """

    try_id: str
    workflow: str
    job: str
    rule: str
    name: str
    site: str
    members: tuple[str, ...]
    attempt: int
    created: float
    cores: int | None
    queued: float | None
    started: float | None
    ended: float | None
    status: str
    cpu: float | None
    note: str
    follows: str = ""
    behind: bool = False
    ran: float | None = None
    submitted: float | None = None

    @property
    def state(self) -> str:
        """MLflow's status, or `GOES_ON`."""
        return self.status or ("RUNNING" if self.started is not None else "SCHEDULED")

    @property
    def over(self) -> bool:
        return bool(self.status)

    @property
    def core_hours(self) -> float | None:
        """The cores times the running time in hours."""
        if self.cores is None or self.ran is None:
            return None
        return self.cores * self.ran / 3600


class Ledger:
    """Reads and writes the records. Belongs to the thread of its outbox.

    All methods raise `sqlite3.Error` if the file cannot be used.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._db: sqlite3.Connection = outbox.db

    # Workflows

    def begin(self, workflow: str, identity: str) -> None:
        self._outbox.execute(
            "INSERT INTO workflows (id, identity, created) VALUES (?, ?, ?)",
            (workflow, identity, time.time()),
        )

    def end(self, workflow: str) -> None:
        """Record that a workflow has ended and will not be continued."""
        self._outbox.execute("UPDATE workflows SET ended = ? WHERE id = ?", (time.time(), workflow))

    def unended(self, identity: str) -> str:
        """Return the last workflow of an identity that has not ended; empty if there is none."""
        row = self._db.execute(
            "SELECT id FROM workflows WHERE identity = ? AND ended IS NULL"
            " ORDER BY created DESC LIMIT 1",
            (identity,),
        ).fetchone()
        return row["id"] if row is not None else ""

    def over(self, open_tries: Collection[str], but: str = "") -> list[str]:
        """Return the workflows that have not ended, but have no open job at a site.

        Args:
            open_tries: tries that may be known at a site, or have results there.
            but: an identity whose workflows may be continued; they are left out.
        """
        rows = self._db.execute(
            "SELECT id FROM workflows WHERE ended IS NULL AND identity != ? ORDER BY created",
            (but,),
        )
        return [r["id"] for r in rows if not set(self.open_jobs(r["id"])) & set(open_tries)]

    def set_pipeline(self, workflow: str, pipeline: str) -> None:
        """Store a workflow's jobs and their dependencies, as JSON."""
        self._outbox.execute("UPDATE workflows SET pipeline = ? WHERE id = ?", (pipeline, workflow))

    def pipeline(self, workflow: str) -> Any:
        """Return a workflow's jobs and their dependencies; None if unknown."""
        row = self._db.execute(
            "SELECT pipeline FROM workflows WHERE id = ?", (workflow,)
        ).fetchone()
        return json.loads(row["pipeline"]) if row is not None and row["pipeline"] else None

    # Jobs

    def add(
        self, try_id: str, workflow: str, *, job: str, rule: str, name: str, site: str,
        members: Sequence[str] = (), follows: str = "", behind: bool = False,
    ) -> JobRow:  # fmt: skip
        """Add a try to a workflow, unless it belongs to one already; return its row.

        `follows` is the try that it goes on from; it belongs to the same run, unless that has
        ended.
        """
        known = self.job(try_id)
        if known is None:
            first = self._continued(follows) if follows else None
            before = self.before(try_id, job)
            attempt = before.attempt + 1 if before is not None else 1
            self._outbox.execute(
                "INSERT INTO jobs (try, workflow, job, rule, name, site, members, attempt, created,"
                " follows, behind) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    try_id, workflow, job, rule, name, site, json.dumps(list(members)),
                    first.attempt if first is not None else attempt, time.time(),
                    follows if first is not None else "", behind and first is not None,
                ),
            )  # fmt: skip
            known = self.job(try_id)
            assert known is not None
        return known

    def _continued(self, try_id: str) -> JobRow | None:
        """Return a try if another one can continue its run; None if that run has ended."""
        row = self._db.execute(
            "SELECT * FROM jobs WHERE try = ? AND status IN ('', ?) AND NOT EXISTS"
            " (SELECT 1 FROM jobs AS n WHERE n.follows = jobs.try AND n.status NOT IN ('', ?)"
            " AND NOT n.behind)",
            (try_id, GOES_ON, GOES_ON),
        ).fetchone()
        return _job(row) if row is not None else None

    def revive(self, job: JobRow) -> JobRow:
        """Reopen a try that was taken for over because it had not been submitted."""
        with self._outbox.write() as db:
            db.execute(
                "UPDATE jobs SET ended = NULL, status = '', note = '' WHERE try = ?",
                (job.try_id,),
            )
            db.execute("DELETE FROM events WHERE try = ? AND kind = ?", (job.try_id, EventKind.END))
        return replace(job, ended=None, status="", note="")

    def take_up(self, job: JobRow) -> JobRow:
        """Record that a try that waited for the one before is the present one of its job."""
        self._outbox.execute("UPDATE jobs SET behind = 0 WHERE try = ?", (job.try_id,))
        return replace(job, behind=False)

    def unfinished(self, *, workflow: str = "", job: str = "", but: str = "") -> list[str]:
        """Return the tries after which a job was to go on and did not.

        Args:
            workflow: only those of this workflow.
            job: only those of this job.
            but: a try that does not count as one that goes on.
        """
        rows = self._db.execute(
            "SELECT try FROM jobs AS j WHERE status = ? AND ? IN (workflow, job) AND NOT EXISTS"
            " (SELECT 1 FROM jobs AS n WHERE n.job = j.job AND n.rowid > j.rowid AND n.try != ?"
            " AND (n.ended IS NULL OR NOT n.behind))",
            (GOES_ON, workflow or job, but),
        )
        return [row["try"] for row in rows]

    def conclude(self, try_id: str, status: str, note: str) -> None:
        """Record the final status of a try after which its job was to go on."""
        self._outbox.execute(
            "UPDATE jobs SET status = ?, note = ? WHERE try = ?", (status, note, try_id)
        )

    def before(self, try_id: str, job: str) -> JobRow | None:
        """Return the previous try of the same job, if it ended without finishing."""
        row = self._db.execute(
            "SELECT * FROM jobs WHERE job = ? AND try != ? AND NOT behind"
            " ORDER BY rowid DESC LIMIT 1",
            (job, try_id),
        ).fetchone()
        found = _job(row) if row is not None else None
        return found if found is not None and found.status not in ("", FINISHED) else None

    def asked(self, try_id: str, cores: int | None) -> None:
        """Record the cores of a try; None if unknown."""
        self._outbox.execute("UPDATE jobs SET cores = ? WHERE try = ?", (cores, try_id))

    def submitted(self, try_id: str, at: float | None = None, *, waits: bool = False) -> None:
        """Record that a try was submitted, now or at `at`; with `waits` behind other jobs."""
        now = time.time()
        self._outbox.execute(
            "UPDATE jobs SET submitted = COALESCE(submitted, ?), queued = COALESCE(queued, ?)"
            " WHERE try = ?",
            (at or now, None if waits else now, try_id),
        )

    def queued(self, try_id: str) -> None:
        """Record that nothing but the queue keeps a try any more."""
        self._outbox.execute(
            "UPDATE jobs SET queued = COALESCE(queued, ?) WHERE try = ?", (time.time(), try_id)
        )

    def started(self, try_id: str) -> None:
        """Record that a try has been seen to run."""
        self._outbox.execute(
            "UPDATE jobs SET started = COALESCE(started, ?) WHERE try = ?", (time.time(), try_id)
        )

    def ended(
        self, try_id: str, status: str, *, ended: float | None = None, ran: float | None = None,
        waited: float | None = None, cpu: float | None = None, note: str = "",
    ) -> None:  # fmt: skip
        """Record that a try has ended: at `ended`, or now; `ran` and `waited` override the rest."""
        when = ended or time.time()
        began = when - (ran or 0.0)
        self._outbox.execute(
            "UPDATE jobs SET ended = ?, status = ?, cpu = ?, note = ?, ran = ?,"
            " started = COALESCE(?, MIN(started, ?)), queued = MIN(COALESCE(?, queued), ?),"
            " submitted = MIN(submitted, ?) WHERE try = ? AND ended IS NULL",
            (
                when, status, cpu, note, ran, began if ran is not None else None, when,
                began - waited if ran is not None and waited is not None else None, began,
                began - (waited or 0.0), try_id,
            ),
        )  # fmt: skip

    def job(self, try_id: str) -> JobRow | None:
        """Return a try; None if it belongs to no workflow."""
        row = self._db.execute("SELECT * FROM jobs WHERE try = ?", (try_id,)).fetchone()
        return _job(row) if row is not None else None

    def jobs(self, workflow: str) -> list[JobRow]:
        """Return all tries of a workflow, the oldest first."""
        wanted = "SELECT * FROM jobs WHERE workflow = ? ORDER BY rowid"
        rows = self._db.execute(wanted, (workflow,))
        return [_job(row) for row in rows]

    def open_jobs(self, workflow: str) -> list[str]:
        """Return the tries of a workflow that have not ended."""
        rows = self._db.execute(
            "SELECT try FROM jobs WHERE workflow = ? AND ended IS NULL", (workflow,)
        )
        return [row["try"] for row in rows]


def _job(row: sqlite3.Row) -> JobRow:
    values = dict(row)
    members = tuple(json.loads(values.pop("members")))
    behind = bool(values.pop("behind"))
    return JobRow(try_id=values.pop("try"), members=members, behind=behind, **values)
