"""What is known of an attempt at its site, and the one judgement of it.

A marker decides. The scheduler's word counts only without one, and only if the job can write
nothing any more, or never started. An unknown, missing or unreachable state alone never ends an
attempt: without heartbeats a started attempt counts as lost after half an hour, and one without any
trace is submitted again.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..common.errors import SiteNotFound, SiteRejected, SiteUnreachable
from ..config.settings import SiteSettings
from ..jobs.paths import is_attempt_id, parse_marker_name
from ..jobs.pools import parse_job_id
from ..jobs.reasons import Reason
from ..journal import AttemptRecord, decode_identity
from ..sites.base import Entry, JobState, Phase, Site
from ..staging.transfers import read_file
from .site_retry import SiteRetry

_CLAIM_BYTES = 64 << 10
"""The first lines of a claim name its owner; the heartbeats that follow need not be read."""
LOOK = ".look"
"""A file that is written to a directory of claims before its last listing, which counts only if it
shows that file: a site may say for a moment that a directory is empty, or not there."""
_ABNORMAL_GRACE_S = 10.0
"""Longest wait for the marker of a job that the scheduler reports as ended from outside. If the
site's server does not show the marker yet, it does after writing to the directory itself: an NFS
client reads a directory again once it has changed it."""
_USUAL_ENDS = frozenset({None, Reason.SUCCESS, Reason.EXIT_CODE})
"""Ends after which a job writes its marker; the wait for it is the configured one."""
_MISSED_BEATS = 2.5
_SILENT_S = 90.0
"""That a job has ended which the site was asked to end is believed after this many missed
heartbeats, and this many seconds of silence: a site says so once it has passed on the request, and
file systems show a file's size up to a minute late."""
_LOST_S = 1800.0
"""Seconds without a heartbeat, and with the site denying the job, after which an attempt is lost.

Only seconds in which the site could be listed count: after an outage everything seems silent.
"""
_LOST_LOOKS = 5
"""Listings that must have shown no heartbeat by then: a site may deny a directory once."""
UNKNOWN = JobState(Phase.UNKNOWN)
_LOST = JobState(Phase.ENDED, detail="no heartbeat, and the site knows no such job")


class Finding(Enum):
    """What the evidence says of an attempt.

    - UNKNOWN: there is no trace of it yet.
    - WAITING: it is in the scheduler's queue.
    - RUNNING: it has started, and nothing says that it ended.
    - ENDING: the scheduler says that it ended; its marker may follow.
    - MARKER: it has ended, as its marker says.
    - ENDED: it can write nothing any more, or never started and never will, so the scheduler's
      state counts.
    - LOST: it had started; there is no heartbeat any more, and the site denies it.
    - VANISHED: there is no trace of it after all; the same attempt may be submitted again.
    - REVOKED: it never started and never will, because an earlier run or another process revoked
      it.
    """

    UNKNOWN = "unknown"
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    MARKER = "marker"
    ENDED = "ended"
    LOST = "lost"
    VANISHED = "vanished"
    REVOKED = "revoked"


@dataclass(frozen=True)
class ClaimOwner:
    """The owner of a claim, as written by the job that made it.

    Attributes:
        site_job: the site's id of the job, where the job can know it.
        scheduler_job: the scheduler's id, or node and process id.
        began: when it made the claim, in seconds since the epoch by its node's clock.
    """

    site_job: str
    scheduler_job: str
    began: float | None = None

    def is_job(self, job_id: str, state: JobState) -> bool:
        """Check whether the site's job `job_id`, whose state is `state`, holds the claim.

        A site may have started several scheduler jobs for one of its own and know only the last one
        (UNICORE with a slow sbatch), so that its id alone proves nothing.
        """
        if state.scheduler_id.isdecimal() and self.scheduler_job.isdecimal():
            return state.scheduler_id == self.scheduler_job
        ids = {self.site_job, self.scheduler_job} - {""}
        return job_id in ids or state.scheduler_id in ids


@dataclass
class Evidence:
    """What is known of an attempt at its site.

    Times are a monotonic clock's; durations count only seconds in which the site could be listed.

    Attributes:
        found: the judgement that ended the watch.
        exit_code: from the marker's name; None without a marker.
        size: of the marker, in bytes.
        state: the scheduler's state with which it ended, if that counts.
        claimed: whether it is known to have started.
        ids: the site's ids of it that are known so far.
        states: the scheduler's last word about each of them; None if it has said nothing since the
            last sign of life.
        owner: the owner of the claim, once it was read.
        claim_bytes: size of the claim when it was listed last; -1 before.
        beat: when claim or marker was last written, by the clock of the file system.
        revoked: whether we have revoked it.
        given_up: whether a listing has shown that somebody else has.
        may_end: how long it may take if the site was asked to end it: its command has some time,
            and writes its marker then; None if the site was not asked.
        wait_s: how long to wait for a trace of it.
        waited: seconds since the first look.
        silent: seconds since its last sign of life, or since the first look.
        seen: time of the last listing, or of the beginning.
        looked: whether it has been looked for in a listing.
        shown: whether the last listing showed what surely lies there: its claim, or `LOOK`.
        denied_since: since when the scheduler has not reported it as waiting or running, or since
            the beginning; None while the scheduler does.
        ended_since: since when the scheduler reports that it ended; None if it does not.
        job: the site's id of the job with which the scheduler reported that.
        due: when time alone changes the judgement.
    """

    found: Finding = Finding.UNKNOWN
    exit_code: int | None = None
    size: int | None = None
    state: JobState | None = None
    claimed: bool = False
    ids: list[str] = field(default_factory=list)
    states: Mapping[str, JobState] | None = None
    owner: ClaimOwner | None = None
    claim_bytes: int = -1
    beat: float | None = None
    revoked: bool = False
    given_up: bool = False
    may_end: float | None = None
    wait_s: float = math.inf
    waited: float = 0.0
    silent: float = 0.0
    seen: float = 0.0
    looked: bool = False
    shown: bool = False
    denied_since: float | None = None
    ended_since: float | None = None
    job: str = ""
    due: float = math.inf

    @property
    def last_state(self) -> JobState:
        """Return the state with which the scheduler, or its silence, ends it."""
        if self.states and self.job:
            return self.states[self.job]
        pooled = any(map(parse_job_id, self.ids))
        return replace(_LOST, reason=Reason.ALLOCATION_ENDED) if pooled else _LOST

    def see(
        self, attempt_id: str, entries: Mapping[str, Entry], now: float, longest_s: float = math.inf
    ) -> bool:
        """Note a listing of its bucket; return whether it shows a new sign of life.

        A longer time than `longest_s` between two looks was an outage.
        """
        passed = min(now - self.seen, longest_s)
        self.seen, self.looked = now, True
        self.waited, self.silent = self.waited + passed, self.silent + passed
        claim = entries.get(attempt_id)
        self.shown = claim is not None or LOOK in entries
        if claim is None:
            return False
        self.given_up = claim.directory and not self.revoked
        if claim.directory:
            return False
        self.beat = claim.modified
        if claim.size == self.claim_bytes:
            return False
        self.claim_bytes = claim.size
        self.lives()
        return True

    def mark(self, exit_code: int, marker: Entry) -> None:
        """Note its marker."""
        self.exit_code, self.size, self.beat = exit_code, marker.size, marker.modified
        self.claimed = True

    def lives(self) -> None:
        """Note a sign of life: what the scheduler has said before counts no more."""
        self.claimed, self.silent, self.ended_since, self.states = True, 0.0, None, None

    def hear(self, states: Mapping[str, JobState]) -> None:
        """Note the scheduler's states."""
        self.states = {job_id: states.get(job_id, UNKNOWN) for job_id in self.ids}


def judge(known: Evidence, now: float, settings: SiteSettings) -> Finding:
    """Return what the evidence says of an attempt, and note since when it says so.

    A job that the site does not know proves nothing: of several submissions, it may be the one that
    runs. Wait, and longer if the attempt has started.
    """
    known.due = math.inf
    if known.exit_code is not None or known.given_up:
        return Finding.REVOKED if known.exit_code is None else Finding.MARKER
    if known.states is None:
        return Finding.RUNNING if known.claimed else Finding.UNKNOWN
    timing, owner = settings.timing, known.owner if known.claimed else None
    states = {i: s for i, s in known.states.items() if owner is None or owner.is_job(i, s)}
    if known.claimed:  # by another submission than one that the site has rejected
        states = {i: s for i, s in states.items() if s.reason is not Reason.REJECTED}
    phases = {state.phase for state in states.values()}
    if phases & {Phase.WAITING, Phase.RUNNING}:
        known.ended_since = known.denied_since = None
        started = known.claimed or Phase.RUNNING in phases
        return Finding.RUNNING if started else Finding.WAITING
    if known.denied_since is None:
        known.denied_since = now
    limit, passed = known.wait_s, known.waited
    if known.claimed:
        limit, passed = max(_LOST_S, _LOST_LOOKS * settings.poll_s), known.silent
    left = limit - min(passed, now - known.denied_since)
    if Phase.ENDED in phases and (Phase.UNKNOWN not in phases or left <= 0):
        known.job = [i for i, state in states.items() if state.phase is Phase.ENDED][-1]
        known.ended_since = now if known.ended_since is None else known.ended_since
        grace = timing.marker_grace_s
        usual = known.last_state.reason in _USUAL_ENDS
        known.due = known.ended_since + (grace if usual else min(grace, _ABNORMAL_GRACE_S))
        # A pool's job is no process of the scheduler's: it may outlive the one that has started it.
        freed = known.last_state.reason is Reason.ALLOCATION_ENDED
        if known.may_end is not None or freed:
            silence = max(_MISSED_BEATS * timing.script.heartbeat_s, _SILENT_S)
            known.due = max(known.due, known.may_end or now, now + silence - known.silent)
        return Finding.ENDED if now >= known.due else Finding.ENDING
    known.ended_since, known.job = None, ""
    if left > 0:
        known.due = now + left
        return Finding.RUNNING if known.claimed else Finding.UNKNOWN
    return Finding.LOST if known.claimed else Finding.VANISHED


async def list_claims(site: Site, retry: SiteRetry, directory: str) -> dict[str, Entry]:
    """List a directory of claims; return {} if the site answers twice that it does not exist.

    A missing claim counts as a missing sign of life, so that a single false "not found", for
    example from a proxy, must not count.

    Raises:
        SiteUnreachable: the site gives that answer to all requests.
        SiteError: the directory cannot be listed.
    """
    for _ in range(2):
        try:
            return await site.list(directory)
        except SiteNotFound as error:
            if not await retry.believed(error):
                raise SiteUnreachable(error.what, where=error.where, do=error.do) from error
    return {}


def find_claims(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the claims in a listing, by their attempts; an attempt that was revoked has none."""
    return {name: e for name, e in entries.items() if is_attempt_id(name) and not e.directory}


def find_markers(entries: Mapping[str, Entry]) -> dict[str, tuple[int, Entry]]:
    """Return the exit codes and entries of the markers in a listing, by their attempts."""
    files = {name: entry for name, entry in entries.items() if not entry.directory}
    named = ((parse_marker_name(name), entry) for name, entry in files.items())
    return {marker[0]: (marker[1], entry) for marker, entry in named if marker is not None}


async def read_beginning(site: Site, path: str) -> bytes:
    """Read the lines of a claim that its job wrote when it made it.

    Raises:
        SiteNotFound: there is no claim, or the attempt is revoked.
    """
    return await read_file(site, path, _CLAIM_BYTES)


def _fields(content: bytes) -> dict[str, str] | None:
    """Return the lines of a claim by their names; None if they are not all there.

    A slow file system may show a part of it.
    """
    *lines, _ = content.decode(errors="replace").split("\n")
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields if "host" in fields else None  # its last line


async def read_owner(site: Site, record: AttemptRecord) -> ClaimOwner | None:
    """Read the owner of an attempt's claim; return None if there is no claim, or no owner in it."""
    try:
        fields = _fields(await read_beginning(site, record.paths.claim))
    except SiteNotFound:
        return None
    if fields is None:
        return None
    began = re.fullmatch(r"[0-9]+(\.[0-9]+)?", fields.get("began", ""))
    found = ClaimOwner(
        fields.get("site_job", ""),
        fields.get("scheduler_job", ""),
        float(began[0]) if began else None,
    )
    return found if found.site_job or found.scheduler_job else None


def read_identity(content: bytes) -> dict[str, Any] | None:
    """Return what a claim says of its attempt (`journal.encode_identity`); None if it does not."""
    fields = _fields(content)
    return decode_identity(fields["identity"]) if fields and "identity" in fields else None


async def revoke_attempt(site: Site, record: AttemptRecord) -> bool:
    """Make certain that an attempt never runs; return False if it has started already.

    Raises:
        SiteRejected: neither is certain: the site cannot make the directory that revokes it.
    """
    try:
        await site.make_directory(record.paths.claim)
    except SiteRejected:
        entry = await site.stat(record.paths.claim)
        if entry is None:
            raise
        return entry.directory
    return True
