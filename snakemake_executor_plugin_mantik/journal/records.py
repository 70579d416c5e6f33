"""The values in the journal, and its log.

The log is what happened to each attempt, in order, for readers with a cursor of their own. Each
event is written in the transaction that changes what the journal knows of its subject.
"""

import json
import sqlite3
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from ..jobs.paths import AttemptPaths

WENT_ON = "goes on"
"""Prefix of the outcome of a segment that another one follows."""
GIVEN_UP = "given up before it started"
"""How an attempt ended that was revoked."""
LEFT = "left in "
"""Prefix of the outcome of an attempt that was left behind: it may still run, unobserved."""


class AttemptState(StrEnum):
    """Progress of an attempt. The states are in the order of an attempt's life; it never goes back.

    PLANNED: it exists here only. SUBMITTING: the site may know it. SUBMITTED: the site has
    acknowledged it. ENDED: its end is known, its results may still be at the site. DONE: committed,
    nothing of it is needed any more. ABANDONED: it will never run or its results are not wanted.
    """

    PLANNED = "planned"
    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    ENDED = "ended"
    DONE = "done"
    ABANDONED = "abandoned"

    @property
    def final(self) -> bool:
        """Whether nothing is left to do for the attempt."""
        return self in (AttemptState.DONE, AttemptState.ABANDONED)


def job_name(rule: str, wildcards: Mapping[str, object]) -> str:
    """Return a job's readable name, which the journal finds it by: its rule and its wildcards."""
    details = ", ".join(f"{key}={value}" for key, value in wildcards.items())
    return f"{rule} {details}" if details else rule


@dataclass(frozen=True)
class Asked:
    """What an attempt requests of its site; None where the site's default applies.

    Attributes:
        cores: the cores that it occupies: those of whole nodes, where a job always gets them.
        memory_mib: on each node.
        memory_mib_per_cpu: for each CPU, if it is requested in that way.
        nodes, gpus: of the whole job.
    """

    cores: int | None = None
    memory_mib: int | None = None
    memory_mib_per_cpu: int | None = None
    nodes: int | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class Times:
    """How long an attempt waited and ran, and when it ended; None where it is unknown.

    Attributes:
        waited: seconds in the queue, without those that it waited there for other jobs.
        ended: in seconds since the epoch by this machine's clock; it may be long ago.
        told_by: who knows how long it ran, if its script could not report it: `scheduler`, by what
            it counts, or `heartbeat`, up to the last of these. Empty if the script did, or nobody.
        behind: seconds that it waited at its site for the jobs before it; None if for none.
    """

    waited: float | None = None
    ran: float | None = None
    ended: float | None = None
    told_by: str = ""
    behind: float | None = None

    def after(self, submitted: float, turn: float | None) -> "Times":
        """Return the times of an attempt whose turn in the queue came only at `turn`.

        Until then it waited for other jobs, whatever the scheduler did. Both are seconds since the
        epoch by this machine's clock.
        """
        if turn is None or self.waited is None:
            return self
        behind = min(max(0.0, turn - submitted), self.waited)
        return replace(self, waited=self.waited - behind, behind=behind)

    @property
    def words(self) -> str:
        """Who tells how long it ran, if not its script; empty if that did."""
        return _TOLD_BY.get(self.told_by, "")


_TOLD_BY = {"scheduler": "as the scheduler counts", "heartbeat": "until its last heartbeat"}
UNTIMED = Times()
"""The times of an attempt of which nothing is known, or which did not run."""


@dataclass(frozen=True)
class Used:
    """What an attempt has used, as its script measured it; None where it is unknown.

    Attributes:
        cpu_s: CPU seconds of all its processes.
        memory_bytes: the most memory at a time on its first node.
        ended, told_by, behind: see `Times`.
        gpu_busy: how busy its GPUs on the first node were on average, in percent.
        exit_code: of its command, or of a step that failed before it.
        failed_node: see `sites.base.JobState`.
        allocation: the scheduler's id of the pool's allocation that ran it; empty if unknown.
    """

    cpu_s: float | None = None
    memory_bytes: int | None = None
    ended: float | None = None
    gpu_busy: float | None = None
    told_by: str = ""
    behind: float | None = None
    exit_code: int | None = None
    failed_node: str = ""
    allocation: str = ""


LOST = "lost"
"""In place of a place: the output does not exist."""


@dataclass(frozen=True)
class AttemptRecord:
    """An attempt in the journal; times are seconds since the epoch, durations seconds.

    Attributes:
        job: key of the job, stable over runs (rule, wildcards, outputs).
        fingerprint: of command, parameters, inputs, site and environment.
        outcome: empty until it is over, then `succeeded`, `failed: …` or `cancelled`; `WENT_ON` and
            why, if another segment follows; or `LEFT` and a workspace, if it was left behind.
        reason: why it failed, a value of `jobs.reasons.Reason`; empty if it did not, or not yet.
        log: local path of the job's log once it was downloaded.
        sent: when its submission was acknowledged, by the site's own clock.
        waits: the scheduler's reason why it cannot start; empty if there is none, or it started.
        pending: the scheduler's reason why it has not started, its turn among them, when the
            scheduler was last asked; empty if it was not.
        expected: when the scheduler expected it to start, when it was last asked; None if unknown.
        started: when it was first seen to run, by this machine's clock; 0 if it had begun earlier,
            when nothing watched it; None if it was not seen to run.
        runtime: the walltime that was requested for it; None if the site's default applies.
        logs: its rule's own log files, as a JSON list of paths in the workspace; may be empty.
        made_of: its `basis` as JSON: what it was made of, to name changes later, and what it makes
            (`engine.adopt.encode_basis`).
        after: the inputs that other attempts were still to make when it was made: as JSON, the id
            of the attempt by path; empty if it needed no such input.
        segment: its number, from 0, if it is one of several that continue a job past its walltime.
        segments: how many of these there may be; 0 if there may be no others.
        follows: the id of the attempt whose checkpoint it goes on from; empty for none.
        goes_on: how another attempt can go on from its checkpoint (`engine.machine`); empty if none
            can.
        asked, used: what it requested and used, as JSON (`what_asked`, `what_used`); empty if
            unknown.
    """

    id: str
    site: str
    bucket: int
    job: str
    rule: str
    name: str
    fingerprint: str
    state: AttemptState
    outcome: str = ""
    queue: str = ""
    log: str = ""
    created: float = 0.0
    submitted: float | None = None
    finished: float | None = None
    waited: float | None = None
    ran: float | None = None
    site_jobs: tuple[str, ...] = ()
    reason: str = ""
    made_of: str = ""
    sent: float | None = None
    waits: str = ""
    place: str = ""
    after: str = ""
    pending: str = ""
    expected: float | None = None
    started: float | None = None
    runtime: float | None = None
    logs: str = ""

    @property
    def basis(self) -> dict[str, Any]:
        return decode_basis(self.made_of)

    @property
    def log_files(self) -> tuple[str, ...]:
        """The rule's own log files: paths in the workspace."""
        return tuple(json.loads(self.logs)) if self.logs else ()

    segment: int = 0
    segments: int = 0
    follows: str = ""
    goes_on: str = ""
    asked: str = ""
    used: str = ""

    @property
    def what_asked(self) -> Asked:
        return Asked(**_known_fields(Asked, self.asked))

    @property
    def what_used(self) -> Used:
        return Used(**_known_fields(Used, self.used))

    @property
    def times(self) -> Times:
        """How long it waited and ran, and when it ended, once that is known."""
        used = self.what_used
        return Times(self.waited, self.ran, used.ended, used.told_by, used.behind)

    @property
    def before(self) -> tuple[str, ...]:
        """The ids of those that it waits for at its site: its makers, the segment before it."""
        return tuple(dict.fromkeys([*self.makers.values(), *filter(None, [self.follows])]))

    @property
    def makers(self) -> dict[str, str]:
        """The ids of those that make its inputs, by path, if it was presubmitted."""
        return dict(json.loads(self.after)) if self.after else {}

    @property
    def part(self) -> str:
        """Which segment of its job it is, in words; empty if the job consists of one attempt."""
        return f"segment {self.segment + 1} of {self.segments}" if self.segments else ""

    @property
    def may_run(self) -> bool:
        """Whether the site may know it while its end is not known here."""
        return self.state in (AttemptState.SUBMITTING, AttemptState.SUBMITTED) or self.left_behind

    @property
    def hindrance(self) -> str:
        """The scheduler's reason why it cannot start; empty once it has an outcome."""
        return "" if self.outcome else self.waits

    @property
    def left_behind(self) -> bool:
        """Whether it may still run without being observed."""
        return bool(self.left_where)

    @property
    def left_where(self) -> str:
        """The workspace in which it was left behind; empty if it was not."""
        left = self.state is AttemptState.ABANDONED and self.outcome.startswith(LEFT)
        return self.outcome.removeprefix(LEFT) if left else ""

    @property
    def paths(self) -> AttemptPaths:
        """Paths of the attempt's own files in the workspace."""
        return AttemptPaths(self.bucket, self.id)


def decode_basis(made_of: str) -> dict[str, Any]:
    """Return an attempt's basis; empty if it has none, or a damaged one."""
    try:
        found = json.loads(made_of)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


IDENTITY = (
    "site", "job", "rule", "name", "fingerprint", "made_of", "created", "after", "logs",
    "segment", "segments", "follows",
)  # fmt: skip
"""What a place has to know of an attempt, so that a journal that does not can take it up."""
_IDENTITY_BYTES = 16 << 10


def encode_identity(record: AttemptRecord, members: Mapping[str, str]) -> str:
    """Return an attempt's identity as one line of JSON, for its claim.

    What changed since its submission cannot be told later if that line would be too long for a
    script; empty if it is too long even so.
    """
    facts = {name: getattr(record, name) for name in IDENTITY} | {"members": dict(members)}
    basis = record.basis
    while len(line := json.dumps(facts)) > _IDENTITY_BYTES:
        if not facts["made_of"]:
            return ""
        # First the names of its outputs, of which there may be many.
        facts["made_of"] = json.dumps(basis) if basis.pop("makes", None) else ""
    return line


def turn_of(before: Iterable[AttemptRecord]) -> float | None:
    """Return when the last of some attempts ended, by this machine's clock; None if one may run."""
    ends = [record.times.ended or record.finished for record in before]
    known = [end for end in ends if end is not None]
    return max(known, default=None) if len(known) == len(ends) else None


def encode_fields(values: Asked | Used) -> str:
    """Return the known fields of a value as JSON, for the journal."""
    return json.dumps(
        {name: value for name, value in asdict(values).items() if value not in (None, "")}
    )


def _known_fields(kind: type[Asked | Used], text: str) -> dict[str, Any]:
    """Return the fields of a value from its JSON, without those of a newer version."""
    names = {each.name for each in fields(kind)}
    values = json.loads(text) if text else {}
    return {name: value for name, value in values.items() if name in names}


def sent_attempt_ids(records: Iterable[AttemptRecord]) -> list[str]:
    """Return the ids of the attempts that a site may know and that are not final."""
    return [r.id for r in records if r.state is not AttemptState.PLANNED and not r.state.final]


@dataclass(frozen=True)
class SnakemakeRun:
    """A run of Snakemake with jobs at sites; times are seconds since the epoch.

    Attributes:
        ended: None while it goes on, or if it was killed.
        ending: how it ended, in a word; empty until then.
        about: facts by their names, such as its command and versions, without secrets.
        pipeline: of the last run, as `adapter.workflow_metadata` describes it; else empty.
    """

    began: float
    ended: float | None = None
    ending: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteRecord:
    """The API and workspace that the records of a site refer to.

    Attributes:
        site: its name in the workflow.
        url: of its API, and the machine behind it where that has several.
        workspace: absolute path at the site.
        config: absolute path of the backend config that described it last; empty if not known.
        place: identity of its workspace; empty if no version that knows places has opened it.
    """

    site: str
    url: str
    workspace: str
    config: str = ""
    place: str = ""


@dataclass(frozen=True)
class FileRecord:
    """A file's content.

    Attributes:
        path: relative to the workflow's directory.
        project: whether it was uploaded as one of the project files.
        modified: of a remote output, when the file was modified, by the clock of the site; else 0.
        mode: of a remote output, the file's permission bits.
    """

    path: str
    size: int
    sha256: str
    project: bool = False
    modified: float = field(default=0.0, compare=False)
    mode: int = field(default=0, compare=False)

    @property
    def stored(self) -> bool:
        """Whether it belongs to a remote output."""
        return bool(self.modified)


@dataclass(frozen=True)
class RemoteOutput:
    """An output that stays at the place where a job made it.

    Attributes:
        path: of the file or directory, relative to the workspace.
        place: the identity of the place; empty for this machine, where local rules store theirs.
        directory: whether the rule declares it as a directory.
        made: when its job was seen to have succeeded, in seconds since the epoch by this machine's
            clock: the time that Snakemake compares.
        job: the rule and its wildcards, for messages.
        files: the file, or the files and empty directories below the directory, or itself if it is
            empty; an empty directory has no checksum.
        links: path and target of the symbolic links below the directory.
    """

    path: str
    place: str
    directory: bool
    made: float
    job: str
    files: tuple[FileRecord, ...]
    links: tuple[tuple[str, str], ...] = ()

    def part(self, path: str) -> "RemoteOutput | None":
        """Return what lies at `path` in a directory, as an output; None if there is nothing."""
        below = f"{path}/"
        files = tuple(f for f in self.files if f.path == path or f.path.startswith(below))
        directory = not any(file.path == path and file.sha256 for file in files)
        links = tuple(link for link in self.links if link[0].startswith(below))
        return (
            replace(self, path=path, directory=directory, files=files, links=links)
            if files
            else None
        )

    def without(self, paths: Collection[str]) -> "RemoteOutput | None":
        """Return the output without some of its files; None if nothing is left."""
        files = tuple(file for file in self.files if file.path not in paths)
        return replace(self, files=files) if files else None

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        return not self.place

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class UndeclaredFile:
    """A file that a job left in its workspace and that no rule declares.

    Attributes:
        path: relative to the workspace.
        place: the identity of the place.
        size: in bytes.
        modified: when it was modified, by the clock of the site.
        mode: its permission bits.
        job: the rule and its wildcards, for messages. Another job that ran at the same time may
            have made the file.
    """

    path: str
    place: str
    size: int
    modified: float
    mode: int
    job: str


def is_checksum(sha256: str) -> bool:
    """Return whether a record names a content by its checksum; see `content_name`."""
    return " " not in sha256


def content_name(sha256: str, size: int, modified: float) -> str:
    """Return a name for a remote file's content: its checksum, else what else is known of it."""
    return sha256 or f"{size} bytes, modified {modified:.0f}"


def is_utf8(path: str) -> bool:
    """Check that the journal can hold a path: it must be UTF-8, without surrogate escapes."""
    return path.isascii() or not any("\ud800" <= c <= "\udfff" for c in path)


class EventKind(StrEnum):
    """What happened to an attempt; `TRACKED` and those after it happen to a workflow as well.

    REATTACHED: a segment's turn has come. CONCLUDED: its job does not go on after it. TRACKED: it
    has an MLflow run from now on. BEGUN: another Snakemake goes on with the workflow. SETTLED: it
    was found to be over when no Snakemake was there any more.
    """

    SUBMITTED = "submitted"
    WAITING = "waiting"
    STARTED = "started"
    REATTACHED = "reattached"
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
        subject: the id of an attempt or of a workflow.
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
