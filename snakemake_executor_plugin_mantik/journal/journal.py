"""Every step of every attempt, written before it is taken."""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..common.errors import JournalError
from ..jobs.pools import Allocation
from ..jobs.reasons import Reason
from . import backup
from .backup import JournalBackup
from .database import Database, fill, insert, lost_facts_message
from .files import FileLedger, mark_landed
from .history import read_attempts, read_sites
from .records import (
    GIVEN_UP,
    IDENTITY,
    LEFT,
    LOST,
    UNTIMED,
    Asked,
    AttemptRecord,
    AttemptState,
    EventKind,
    FileRecord,
    SiteRecord,
    Times,
    Used,
    add_event,
    encode_fields,
    is_utf8,
)
from .tracked import TrackedLedger, end_tracked, end_workflow
from .uses import SegmentLedger, UseLedger, end_uses

BUCKET_SIZE = 500
"""Attempts per bucket: small enough for one listing, large enough that few buckets are open."""

_WAITS_S = 7 * 86400.0
_MOST_WAITS = 50
"""Age and number of the jobs whose waits tell how long others will wait."""

_OPEN_PRESUBMITTED = (
    "INDEXED BY attempts_after WHERE after <> '' AND state NOT IN ('done', 'abandoned')"
)
"""The open attempts that were presubmitted; without the index, SQLite would read all of them."""

_ORDER = {state: rank for rank, state in enumerate(AttemptState)}


class Journal(Database):
    """Reads and writes the journal. Not thread-safe: it belongs to one thread at a time.

    Attributes:
        noted: how many facts it has noted in its spare since it was opened, without numbers.
        files: its part on files.
        segments: its part on jobs that go on past their walltime.
        uses: its part on what must stay at the places.
        tracked: its part on MLflow runs.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        """Open or create the journal and its spare; see `Database`, for what is raised, too."""
        super().__init__(directory, shared=shared)
        self.files = FileLedger(self, self._note)
        self.segments = SegmentLedger(self)
        self.uses = UseLedger(self)
        self.tracked = TrackedLedger(self)
        self.noted = 0
        self._spared: set[str] = set()
        try:
            self._forget_made()
            self._backup = JournalBackup(directory, self._facts())
        except OSError as error:
            super().close()
            raise self._full(error) from error

    def close(self) -> None:
        self._backup.close()
        super().close()

    # The spare

    def _facts(self) -> Iterator[tuple[backup.Subject, Iterable[backup.Row]]]:
        yield backup.WORKFLOW, self._rows("workflow")
        for site in self.sites():
            yield ("site", site), self._rows("sites", "site = ?", site)
        for place in self.column("SELECT place FROM places"):
            yield self._number(place, self.number(place))
        yield from self._attempt_facts("state NOT IN ('planned', 'done', 'abandoned')")
        yield from self.files.stored_facts()

    def _rows(
        self, table: str, which: str = "TRUE", *values: str, columns: str = "*"
    ) -> list[backup.Row]:
        found = f"SELECT {columns} FROM {table} WHERE {which}"  # noqa: S608
        return [(table, dict(row)) for row in self.db.execute(found, values)]

    def _number(self, place: str, number: int) -> tuple[backup.Subject, list[backup.Row]]:
        return ("number", place), [("places", {"place": place, "number": number})]

    def _attempt_facts(
        self, which: str, *values: str, tracked: bool = True
    ) -> Iterator[tuple[backup.Subject, list[backup.Row]]]:
        columns = "'submitting' AS state, id, place, bucket, " + ", ".join(IDENTITY)
        found = f"SELECT id FROM attempts WHERE {which} ORDER BY created"  # noqa: S608
        for attempt_id in self.column(found, *values):
            rows = self._rows("attempts", "id = ?", attempt_id, columns=columns)
            for table in ("members", "uses"):
                rows += self._rows(table, "attempt = ?", attempt_id)
            if tracked:
                rows += self._rows("tracked", "attempt = ?", attempt_id)
                rows += self._rows(
                    "workflows", "id = (SELECT workflow FROM tracked WHERE attempt = ?)",
                    attempt_id,
                    # The runs of Snakemake that it refers to are not in the spare.
                    columns="id, identity, created, ended, data",
                )  # fmt: skip
            yield ("attempt", attempt_id), rows

    # What the place knows

    def number(self, place: str) -> int:
        """Return the last number that was taken at a place; 0 if none is known.

        A greater one there shows that runs have been there of which this journal knows nothing: it
        is new, or an older copy was put back in place.
        """
        return self.value("SELECT number FROM places WHERE place = ?", place) or 0

    def was_restored(self, place: str) -> bool:
        """Return whether what was uploaded to a place is unknown, since only the spare was left.

        It is so until the next number is taken there.
        """
        return bool(self.value("SELECT restored FROM places WHERE place = ?", place))

    def take_number(self, place: str, number: int) -> None:
        """Record that a number is about to be taken. On disk when the method returns."""
        self._note(*self._number(place, number), lasting=True)
        with self.lasting():
            self.change(
                "INSERT INTO places (place, number) VALUES (?, ?)"
                " ON CONFLICT (place) DO UPDATE SET number = excluded.number, restored = 0",
                place, number,
            )  # fmt: skip

    def lock(self, place: str, lease: str, about: str) -> None:
        """Record that another controller leads a place, with this lease, until `unlock`."""
        self.change("INSERT OR REPLACE INTO locks VALUES (?, ?, ?, FALSE)", place, lease, about)

    def locked(self) -> list[str]:
        """Return what is known of the controllers because of which runs here were refused."""
        return self.column("SELECT about FROM locks WHERE NOT unlocked ORDER BY about")

    def unlock(self) -> None:
        """Record that these controllers have ended, so that the next run here may lead."""
        self.change("UPDATE locks SET unlocked = TRUE")

    def is_unlocked(self, place: str, lease: str) -> bool:
        """Return whether the controller with this very lease has ended, as the user has said."""
        known = "SELECT unlocked FROM locks WHERE place = ? AND lease = ?"
        return bool(self.value(known, place, lease))

    def spare_of(self, place: str) -> bytes:
        """Return the facts that the place itself keeps, so that a lost journal is no loss."""
        sent = "state NOT IN ('planned', 'done', 'abandoned') AND place = ?"
        attempts = self._attempt_facts(sent, place, tracked=False)
        facts = [*attempts, *self.files.stored_facts(place)]
        return b"".join(backup.as_line(*fact) for fact in facts)

    def doubt(self, place: str) -> None:
        """Forget what was uploaded to a place: it may have been replaced or removed meanwhile."""
        with self.write() as db:
            db.execute("DELETE FROM remote_files WHERE place = ? AND modified = 0", (place,))
            db.execute(
                "DELETE FROM bundle_files WHERE bundle IN"
                " (SELECT id FROM bundles WHERE place = ? AND state <> 'carried')",
                (place,),
            )
            db.execute("DELETE FROM bundles WHERE place = ? AND state <> 'carried'", (place,))

    def catch_up(self, place: str, spare: bytes) -> str:
        """Learn what the place's own spare (`spare_of`) knows; return what of it is damaged."""
        known: backup.Facts = {}
        facts, damaged = backup.read_facts(spare)
        for (kind, name), rows in facts.items():
            if kind == "attempt":
                known[kind, name] = [
                    (table, {**columns, "place": place} if table == "attempts" else columns)
                    for table, columns in rows
                ]
            elif kind == "stored" and self._is_news(name, rows[0][1], place):
                known[kind, name] = rows
        paths = [name for kind, name in known if kind == "stored"]
        before = {path: self.files.stored(path) for path in paths}
        with self.write() as db:
            fill(db, known)
            db.execute(
                "INSERT OR IGNORE INTO buckets SELECT place, bucket FROM attempts WHERE place = ?"
                " AND state = 'submitting'",
                (place,),
            )
        for fact in self._facts():  # if this journal is lost in turn, its spare knows as much
            self._note(*fact)
        now = {path: self.files.stored(path) for path in paths}
        self.learned |= {path for path in paths if now[path] not in (None, before[path])}
        return lost_facts_message(damaged).strip()

    def _is_news(self, path: str, columns: Mapping[str, Any], place: str) -> bool:
        """Return whether a spare at a place knows better than the journal where an output is."""
        mine = self.db.execute("SELECT place, made FROM stored WHERE path = ?", (path,)).fetchone()
        if mine is None or mine["place"] in (LOST, place):
            return True
        return bool(columns.get("place") != LOST and columns.get("made", 0) > mine["made"])

    def find_out(self, attempts: Iterable[Mapping[str, Any]]) -> list[AttemptRecord]:
        """Learn of attempts that were found at a place; return them.

        Each has the columns of `IDENTITY`, with `place`, `bucket`, `id`, `members` and `uses`.
        """
        known: backup.Facts = {}
        for facts in attempts:
            attempt_id = facts["id"]
            use = {"place": facts["place"], "attempt": attempt_id, "checkpoint": False}
            known["attempt", attempt_id] = [
                ("attempts", {"state": AttemptState.SUBMITTING, **facts}),
                *(("members", {"attempt": attempt_id, "job": job, "name": name})
                  for job, name in facts["members"].items()),
                *(("uses", {**use, "path": path}) for path in facts["uses"] if is_utf8(path)),
            ]  # fmt: skip
        ids = [name for _, name in known]
        each = [(attempt_id,) for attempt_id in ids]
        with self.write() as db:  # they are another's now
            db.executemany("DELETE FROM attempts WHERE id = ?", each)
            db.executemany("DELETE FROM members WHERE attempt = ?", each)
            fill(db, known)
            db.executemany(
                "INSERT OR IGNORE INTO buckets SELECT place, bucket FROM attempts WHERE id = ?",
                each,
            )
        for attempt_id in ids:
            for fact in self._attempt_facts("id = ?", attempt_id):
                self._note(*fact)
        return self.attempts(ids)

    def _full(self, error: OSError) -> JournalError:
        return JournalError(
            f"the journal's spare cannot be written ({error.strerror})",
            where=str(self.path.parent),
            do="Free disk space here and start again: running jobs are reattached",
        )

    # Runs of Snakemake

    def begin_run(self, about: Mapping[str, str], pipeline: Mapping[str, object]) -> None:
        """Record that a Snakemake starts here (`SnakemakeRun`). Only the last pipeline is kept."""
        with self.write() as db:
            db.execute("UPDATE runs SET pipeline = ''")
            db.execute(
                "INSERT INTO runs (began, about, pipeline) VALUES (?, ?, ?)",
                (time.time(), json.dumps(dict(about)), json.dumps(pipeline)),
            )

    def end_run(self, ending: str, pipeline: Mapping[str, object]) -> None:
        """Record how the Snakemake that started last has ended, and its final pipeline."""
        with self.write() as db:
            db.execute(
                "UPDATE runs SET ended = ?, ending = ?, pipeline = ?"
                " WHERE rowid = (SELECT MAX(rowid) FROM runs)",
                (time.time(), ending, json.dumps(pipeline)),
            )
            end_workflow(db, ending)

    # Sites

    def sites(self) -> dict[str, SiteRecord]:
        return read_sites(self.db)

    @property
    def workflow(self) -> str:
        """The workflow's name: that of the machine and the directory in which it began."""
        return str(self.value("SELECT id FROM workflow"))

    @property
    def seat(self) -> str:
        """A name of the directory in which the journal lies: nobody else can lead from there."""
        return self._seat.digest

    def set_site(
        self, site: str, url: str, workspace: str, place: str, config: str = ""
    ) -> list[AttemptRecord]:
        """Record the place at which the jobs of `site` run, and the site's backend config.

        If the name meant another place before, the open attempts there are left behind and
        returned, to be reported. If only the identity of the same workspace at the same URL is new,
        they get the new one instead. If the URL differs, the site's ids of jobs that may still run
        are deleted: on another server they may mean other jobs. Those of jobs that are over stay,
        to be shown.
        """
        known = self.sites().get(site)
        left: list[AttemptRecord] = []
        if known is not None and known.place != place:
            if (known.workspace, known.url) == (workspace, url):
                self._unite(known, place)
            else:
                left = [r for r in self.all_open_attempts() if r.site == site]
            for record in left:
                self.left_behind(record.id, known.workspace)
        with self.write() as db:
            if known is not None and known.url != url:
                db.execute(
                    "DELETE FROM submissions WHERE attempt IN (SELECT id FROM attempts"
                    " WHERE site = ? AND (state NOT IN ('done', 'abandoned') OR outcome LIKE ?))",
                    (site, f"{LEFT}%"),
                )
            db.execute(
                "INSERT INTO sites (site, url, workspace, config, place) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (site) DO UPDATE SET url = excluded.url, place = excluded.place,"
                " workspace = excluded.workspace, config = excluded.config",
                (site, url, workspace, config, place),
            )
            db.execute("INSERT OR IGNORE INTO places (place) VALUES (?)", (place,))
        self._note(("site", site), self._rows("sites", "site = ?", site))
        return left

    def record_allocation(self, known: Allocation) -> None:
        """Record what is known of an allocation of a pool; a full disk loses it."""
        with suppress(JournalError), self.write() as db:
            db.execute(
                "INSERT INTO allocations VALUES (:tag, :site, :pool, :site_job, :cores, :submitted,"
                " :started, :ended, :seconds, :used) ON CONFLICT (tag) DO UPDATE SET"
                " site_job = excluded.site_job, seconds = MAX(seconds, excluded.seconds),"
                " used = MAX(used, excluded.used), started = COALESCE(started, excluded.started),"
                " ended = COALESCE(ended, excluded.ended)",
                asdict(known),
            )

    def _unite(self, known: SiteRecord, place: str) -> None:
        """Record that `place` identifies a site's workspace, under all names it was known by."""
        with self.write() as db:
            db.execute(
                "UPDATE attempts SET place = ? WHERE place = ? AND outcome NOT LIKE ?",
                (place, known.place, f"{LEFT}%"),
            )
            for table in ("sites", "remote_files", "bundles", "numbered", "uses"):
                db.execute(
                    f"UPDATE OR REPLACE {table} SET place = ? WHERE place = ?",  # noqa: S608
                    (place, known.place),
                )
            db.execute(
                "INSERT OR IGNORE INTO buckets SELECT DISTINCT place, bucket FROM attempts"
                " WHERE place = ? AND state NOT IN ('planned', 'done', 'abandoned')",
                (place,),
            )

    # Buckets

    def bucket(self, place: str) -> int:
        """Return the bucket that is being filled at a place; begin a new one if it is full.

        Its number is random, so that a removed bucket is never used again: a job that the site
        starts late finds no directory for its claim. Random numbers also keep the buckets of two
        copies of a journal apart.
        """
        known: int | None = self.value("SELECT bucket FROM places WHERE place = ?", place)
        used = "SELECT COUNT(*) FROM attempts WHERE place = ? AND bucket = ?"
        if known is not None and self.value(used, place, known) < BUCKET_SIZE:
            return known
        bucket = uuid.uuid4().int >> 88
        with self.write() as db:
            db.execute(
                "INSERT INTO places (place, bucket) VALUES (?, ?)"
                " ON CONFLICT (place) DO UPDATE SET bucket = excluded.bucket",
                (place, bucket),
            )
            db.execute("INSERT INTO buckets VALUES (?, ?)", (place, bucket))
        return bucket

    def retire_buckets(self, place: str) -> list[int]:
        """Stop filling any bucket of a place; return those that may exist there."""
        self.change("UPDATE places SET bucket = NULL WHERE place = ?", place)
        return self.buckets(place)

    def buckets(self, place: str) -> list[int]:
        """Return the buckets that may exist at a place."""
        return self.column("SELECT bucket FROM buckets WHERE place = ?", place)

    def bucket_gone(self, place: str, bucket: int) -> None:
        self.change("DELETE FROM buckets WHERE place = ? AND bucket = ?", place, bucket)

    # Attempts

    def new_attempt(
        self,
        *,
        site: str,
        job: str,
        rule: str,
        name: str,
        fingerprint: str,
        members: Mapping[str, str] | None = None,
        made_of: str = "",
        makers: Mapping[str, str] | None = None,
        logs: Sequence[str] = (),
        segment: int = 0,
        segments: int = 0,
        follows: str = "",
    ) -> AttemptRecord:
        """Decide to run a job: make an attempt with a new UUID in the bucket that is being filled.

        The arguments are those of `AttemptRecord`; `members` maps the jobs of a group to their
        names.
        """
        place = self.value("SELECT place FROM sites WHERE site = ?", site) or site
        bucket = self.bucket(place)
        with self.write() as db:
            record = AttemptRecord(
                id=str(uuid.uuid4()), site=site, bucket=bucket, job=job, rule=rule, name=name,
                fingerprint=fingerprint, state=AttemptState.PLANNED, created=time.time(),
                made_of=made_of, place=place, after=json.dumps(makers) if makers else "",
                logs=json.dumps(list(logs)) if logs else "", segment=segment,
                segments=segments, follows=follows,
            )  # fmt: skip
            columns = ("id", "place", "bucket", "state", *IDENTITY)
            insert(db, "attempts", {column: getattr(record, column) for column in columns})
            rows = [(record.id, *member) for member in (members or {}).items()]
            db.executemany("INSERT INTO members VALUES (?, ?, ?)", rows)
        return record

    def dependents(self, attempt_id: str) -> list[AttemptRecord]:
        """Return the open attempts that were presubmitted and wait for an attempt."""
        return self._attempts(f"{_OPEN_PRESUBMITTED} AND after LIKE ?", (f'%"{attempt_id}"%',))

    def all_dependents(self, ids: Iterable[str]) -> list[AttemptRecord]:
        """Return the open attempts that wait for some attempts, or for others that do."""
        found: dict[str, AttemptRecord] = {}
        left = list(ids)
        while left:
            more = [r for r in self.dependents(left.pop()) if r.id not in found]
            found |= {record.id: record for record in more}
            left += [record.id for record in more]
        return list(found.values())

    def open_presubmitted(self) -> list[AttemptRecord]:
        """Return the open attempts that were presubmitted."""
        return self._attempts(_OPEN_PRESUBMITTED, ())

    def note_made(self, attempt_id: str, files: Iterable[FileRecord]) -> None:
        """Record what an attempt has made, if attempts that were presubmitted read it."""
        if self.dependents(attempt_id):
            self.change_each(
                "INSERT OR REPLACE INTO made VALUES (?, ?, ?)",
                [(attempt_id, f.path, f.sha256) for f in files if is_utf8(f.path)],
            )

    def made(self, attempt_id: str) -> dict[str, str]:
        """Return the checksums of the files that an attempt has made, by path; see `note_made`."""
        found = self.db.execute("SELECT path, sha256 FROM made WHERE attempt = ?", (attempt_id,))
        return {row["path"]: row["sha256"] for row in found}

    def _forget_made(self) -> None:
        """Delete the records of `note_made` once no attempt, or next segment of one, needs them."""
        if not self.value("SELECT 1 FROM made") or self.open_presubmitted():
            return
        goes_on = self.value(
            "SELECT 1 FROM attempts WHERE after <> '' AND goes_on <> '' AND NOT EXISTS"
            " (SELECT 1 FROM attempts next WHERE next.follows = attempts.id"
            " AND next.outcome = 'succeeded')"
        )
        if not goes_on:
            self.change("DELETE FROM made")

    def secrets_sent(self, attempt_id: str) -> None:
        """Record that the attempt's secrets are about to be uploaded, and count from now."""
        self.change("INSERT OR IGNORE INTO secrets VALUES (?)", attempt_id)

    def secrets_gone(self, attempt_id: str) -> None:
        """Record that the attempt's secrets, if it had any, are no longer at the site."""
        if self.has_secrets(attempt_id):  # else a transaction for each job would cost more
            self.change("DELETE FROM secrets WHERE attempt = ?", attempt_id)

    def has_secrets(self, attempt_id: str) -> bool:
        return bool(self.value("SELECT 1 FROM secrets WHERE attempt = ?", attempt_id))

    def forgotten_secrets(self, site: str) -> list[AttemptRecord]:
        """Return the final attempts of a site whose secrets may still be at its present place."""
        return self._attempts(
            "WHERE site = ? AND state IN ('done', 'abandoned')"
            " AND id IN (SELECT attempt FROM secrets)"
            " AND place = (SELECT place FROM sites WHERE site = ?)",
            (site, site),
        )

    def submitting(
        self, attempt_id: str, queue: str, runtime: float | None = None, asked: Asked | None = None
    ) -> None:
        """Record that the attempt is about to be submitted. On disk when the method returns.

        `runtime` is the walltime that it requests, in seconds, and `asked` what else it does.
        """
        if attempt_id not in self._spared:
            for fact in self._attempt_facts("id = ?", attempt_id):
                self._note(*fact, lasting=True)
            self._spared.add(attempt_id)
        with self.lasting():
            self._advance(
                attempt_id, AttemptState.SUBMITTING, queue=queue, runtime=runtime,
                asked=encode_fields(asked or Asked()),
            )  # fmt: skip

    def submitted(self, attempt_id: str, site_job: str, sent: float | None = None) -> None:
        """Record that the site has acknowledged the attempt as `site_job`, at `sent` by its clock.

        Of several submissions it keeps all ids, and the times of the first.
        """
        with self.write() as db:
            db.execute("INSERT OR IGNORE INTO submissions VALUES (?, ?)", (attempt_id, site_job))
            db.execute(
                "UPDATE attempts SET state = ?, submitted = COALESCE(submitted, ?),"
                " sent = COALESCE(sent, ?) WHERE id = ? AND state IN (?, ?, ?)",
                (AttemptState.SUBMITTED, time.time(), sent, attempt_id, *list(AttemptState)[:3]),
            )
            add_event(db, attempt_id, EventKind.SUBMITTED, job=site_job)

    def waiting(self, attempt_id: str, why: str) -> None:
        """Record the scheduler's reason why it cannot start; empty if it waits its turn."""
        with self.write() as db:
            db.execute("UPDATE attempts SET waits = ? WHERE id = ?", (why, attempt_id))
            add_event(db, attempt_id, EventKind.WAITING, why=why)

    def pending(
        self,
        attempt_id: str,
        reason: str,
        starts_after: float | None = None,
        *,
        expected: float | None = None,
    ) -> None:
        """Record the scheduler's reason why the attempt has not started, its turn among them.

        `starts_after` are the seconds between the submission and the start that it expects, or
        `expected` is that start by this machine's clock.
        """
        self.change(
            "UPDATE attempts SET pending = ?, expected = COALESCE(?, submitted + ?) WHERE id = ?",
            reason, expected, starts_after, attempt_id,
        )  # fmt: skip

    def started(self, attempt_id: str, at: float) -> None:
        """Record when the attempt was first seen to run; 0 if it began before it was watched."""
        with self.write() as db:
            db.execute(
                "UPDATE attempts SET started = COALESCE(started, ?), pending = '', expected = NULL"
                " WHERE id = ?",
                (at, attempt_id),
            )
            add_event(db, attempt_id, EventKind.STARTED)

    def ended(
        self,
        attempt_id: str,
        outcome: str,
        *,
        waited: float | None,
        ran: float | None,
        log: str,
        reason: str = "",
        used: Used | None = None,
        end: Mapping[str, Any] | None = None,
    ) -> None:
        """Record how the attempt ended; it stays open, and its results may still be at the site.

        `end` is what the log says of it (`engine.observer.JobEnd.facts`); None if it may go on.
        """
        self._advance(
            attempt_id, AttemptState.ENDED, end, outcome=outcome, waited=waited, ran=ran, log=log,
            reason=reason, finished=time.time(), used=encode_fields(used or Used()),
        )  # fmt: skip

    def spoiled(self, attempt_id: str) -> None:
        """Record that an attempt failed after all: its outputs are not what its rule wants."""
        self._advance(
            attempt_id, AttemptState.ENDED, outcome="failed: Snakemake did not take its outputs",
            reason=Reason.OUTPUTS,
        )  # fmt: skip

    def done(self, attempt_id: str) -> None:
        """Record that Snakemake has taken the results: nothing at the site is needed any more."""
        self._advance(attempt_id, AttemptState.DONE)
        self._over(attempt_id)

    def abandoned(
        self,
        attempt_id: str,
        outcome: str,
        *,
        times: Times = UNTIMED,
        end: Mapping[str, Any] | None = None,
    ) -> None:
        """Record that the attempt will never run, or has ended and is not wanted.

        What is known of its `times` replaces what was recorded. For `end`, see `ended`.
        """
        more: dict[str, object] = {"waited": times.waited, "ran": times.ran}
        if times != UNTIMED:
            used = Used(ended=times.ended, told_by=times.told_by, behind=times.behind)
            more["used"] = encode_fields(used)
        known = {name: value for name, value in more.items() if value is not None}
        self._advance(
            attempt_id, AttemptState.ABANDONED, end, outcome=outcome, finished=time.time(), **known
        )
        self._over(attempt_id)

    def left_behind(self, attempt_id: str, where: str) -> None:
        """Record that the attempt is no longer observed and may still run in the workspace `where`.

        It does not affect the place that the site's name means now.
        """
        self.abandoned(attempt_id, f"{LEFT}{where}")

    def _over(self, attempt_id: str) -> None:
        with suppress(JournalError):  # then it is looked for once more, in vain
            self._note(("attempt", attempt_id))
        self._spared.discard(attempt_id)

    def _note(
        self, subject: backup.Subject, rows: Iterable[backup.Row] = (), *, lasting: bool = False
    ) -> None:
        self.noted += subject[0] != "number"
        try:
            self._backup.add(subject, rows, lasting=lasting)
        except OSError as error:
            raise self._full(error) from error

    def _advance(
        self,
        attempt_id: str,
        state: AttemptState,
        end: Mapping[str, Any] | None = None,
        **values: object,
    ) -> None:
        names = ", ".join(["state = ?", *(f"{name} = ?" for name in values)])
        before = [earlier for earlier in AttemptState if _ORDER[earlier] <= _ORDER[state]]
        marks = ", ".join("?" * len(before))
        left = str(values.get("outcome", "")).startswith(LEFT)
        with self.write() as db:
            db.execute(
                f"UPDATE attempts SET {names} WHERE id = ? AND state IN ({marks})",  # noqa: S608
                (state, *values.values(), attempt_id, *before),
            )
            if state in (AttemptState.ENDED, AttemptState.ABANDONED):
                mark_landed(db, attempt_id)
            if state is AttemptState.ENDED or (state.final and not left):
                end_uses(db, attempt_id)
            last = db.execute(
                "SELECT kind FROM events WHERE subject = ? AND kind IN (?, ?)"
                " ORDER BY seq DESC LIMIT 1",
                (attempt_id, EventKind.TRACKED, EventKind.ENDED),
            ).fetchone()
            # One whose results are given up after its end does not end once more.
            if end is not None and not (last and last["kind"] == EventKind.ENDED):
                end_tracked(db, attempt_id, end["how"], end["successor"])
                add_event(db, attempt_id, EventKind.ENDED, **end)

    def open_attempts(self, *jobs: str) -> list[AttemptRecord]:
        """Return the open attempts of jobs, and of groups that these are members of, oldest first.

        Two groups may share a member: Snakemake may group jobs differently in each run, and rules
        may get or lose their group.
        """
        return self._of_jobs(jobs, "state NOT IN ('done', 'abandoned')")

    def left_attempts(self, jobs: Sequence[str], place: str) -> list[AttemptRecord]:
        """Return the attempts of jobs that were left behind at a place and may still run there."""
        left = "state = 'abandoned' AND outcome LIKE ? AND place = ?"
        return self._of_jobs(jobs, left, f"{LEFT}%", place)

    def tried_sites(self, *jobs: str) -> list[str]:
        """Return the sites that jobs have left since they last ended or were cancelled."""
        over = reversed(self._of_jobs(jobs, "state IN ('done', 'abandoned')"))
        vain = takewhile(lambda r: r.state == "abandoned" and r.outcome.startswith("failed"), over)
        return [record.site for record in vain if record.outcome == f"failed: {GIVEN_UP}"]

    def _of_jobs(self, jobs: Sequence[str], which: str, *values: str) -> list[AttemptRecord]:
        """Return the attempts of jobs and groups with them that match in SQL, oldest first."""
        of_job = "WHERE (job = ? OR id IN (SELECT attempt FROM members WHERE job = ?)) AND "
        where = of_job + which
        found = {r.id: r for job in jobs for r in self._attempts(where, (job, job, *values))}
        return sorted(found.values(), key=lambda record: record.created)

    def attempts(self, ids: Iterable[str]) -> list[AttemptRecord]:
        return [record for one in ids for record in self._attempts("WHERE id = ?", (one,))]

    def failed_nodes(self, site: str) -> dict[str, AttemptRecord]:
        """Return the nodes that failed in this run at a site, each with the last job it ended.

        The node that failed last comes last. What runs did that were killed since one ended belongs
        to this run.
        """
        ended = self._attempts(
            "WHERE site = ? AND used LIKE '%\"failed_node\"%'"
            " AND finished > (SELECT COALESCE(MAX(ended), 0) FROM runs)",
            (site,),
        )
        found: dict[str, AttemptRecord] = {}
        for record in sorted(ended, key=lambda record: record.finished or 0.0):
            found.pop(record.what_used.failed_node, None)
            found[record.what_used.failed_node] = record
        return found

    def waits(self, site: str) -> list[tuple[float, int | None]]:
        """Return how long the last jobs at a site waited at least in its queue, and their cores.

        Those count that were submitted within the last days and waited for nothing else.
        """
        now, found = time.time(), []
        where = (
            "WHERE id IN (SELECT id FROM attempts WHERE site = ? AND submitted > ? AND after = ''"
            " AND follows = '' ORDER BY submitted DESC LIMIT ?)"
        )
        for record in self._attempts(where, (site, now - _WAITS_S, _MOST_WAITS)):
            until, waited = record.started, record.waited
            if until is None:  # it has not started, or was withdrawn
                until = record.finished or now
            if waited is None and until and record.submitted is not None:
                waited = until - record.submitted
            if waited is not None:
                found.append((max(0.0, waited), record.what_asked.cores))
        return found

    def all_open_attempts(self) -> list[AttemptRecord]:
        """Return all attempts that are not final, the oldest first."""
        return self._attempts("WHERE state NOT IN ('done', 'abandoned')", ())

    def _attempts(self, where: str, values: Sequence[object]) -> list[AttemptRecord]:
        return read_attempts(self.db, where, values)
