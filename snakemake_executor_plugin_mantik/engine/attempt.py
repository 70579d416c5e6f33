"""Define the values of one try during a run: its submissions, signs of life, and end."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from enum import Enum

from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.spec import LiveDirectory
from snakemake_executor_plugin_mantik.journal import UNTIMED, Times, TryRecord, TryState, Used
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase

from . import claims
from .observer import JobExtras
from .stage import Staged

FIRST_CHECK_S = 5.0
"""Seconds from the submission to the first query about an unclaimed try."""
UNKNOWN = JobState(Phase.UNKNOWN)
SCHEDULER, HEARTBEAT = "scheduler", "heartbeat"
"""Who tells how long a job ran that could not report it (`Times.told_by`)."""


class TryEndKind(Enum):
    """How a try's end became known."""

    MARKER = "marker"
    SCHEDULER = "scheduler"
    VANISHED = "vanished"
    REVOKED = "revoked"


@dataclass(frozen=True)
class TryEnd:
    """The end of a try.

    Attributes:
        kind: MARKER: the job recorded its end. SCHEDULER: the job can write nothing any more, or
            never started and never will, so the scheduler's state counts. VANISHED: there is no
            trace of it; the same try may be submitted again. REVOKED: it never started and never
            will, because an earlier run or another process revoked it.
        exit_code: from the marker's name.
        size: of the marker, in bytes.
        state: the scheduler's state.
        claimed: whether the job is known to have started.
        ids: the site's ids of it that are known so far.
        began: when it began, by its node's clock, as its claim says.
        beat: when its claim was last written, by the clock of the file system.
    """

    kind: TryEndKind
    exit_code: int | None = None
    size: int | None = None
    state: JobState | None = None
    claimed: bool = False
    ids: tuple[str, ...] = ()
    began: float | None = None
    beat: float | None = None


@dataclass
class Watched:
    """A watched try and its signs of life.

    Times are the clock's; durations count only seconds in which the site could be listed.

    Attributes:
        sent: how often it was submitted; some ids may still be unknown.
        wait_s: how long to wait for a trace of it.
        denied_since: since when the scheduler has not reported it as waiting or running, or since
            the start of watching; None while the scheduler does.
        waited: seconds since the start of watching.
        silent: seconds since its last sign of life, or since the start of watching.
        seen: time of the last listing, or of the start of watching.
        looked: whether it has been looked for in a listing since the start of watching.
        shown: whether the last listing showed what surely lies there: its claim, or `LOOK`.
        owner: the owner of the claim, once it was read.
        beat: when the claim was last written, by the clock of the file system.
        revoked: whether we have revoked it.
        live: whether it reports what it logs while it runs.
        detailed: when the scheduler's details of it were last requested.
        waits: the scheduler's reason why it cannot start.
        pending: the scheduler's reason why it has not started.
        expected: the start that the scheduler expects (`starts_after` and `started` of its state).
        began: whether it can only have begun to run since it was watched or submitted.
        ended_since: since when the scheduler reports that it ended; None if it does not.
        word: the job id and state with which the scheduler reported its end.
    """

    record: TryRecord
    future: "asyncio.Future[TryEnd]"
    ids: list[str]
    sent: int
    wait_s: float
    denied_since: float | None
    seen: float
    next_check: float
    next_extension: float
    waited: float = 0.0
    silent: float = 0.0
    looked: bool = False
    shown: bool = False
    claimed: bool = False
    claim_bytes: int = -1
    owner: claims.ClaimOwner | None = None
    beat: float | None = None
    revoked: bool = False
    live: bool = False
    check_delay: float = FIRST_CHECK_S
    detailed: float = 0.0
    waits: str = ""
    pending: str = ""
    expected: tuple[float | None, float | None] = (None, None)
    began: bool = True
    ended_since: float | None = None
    word: tuple[str, JobState] = ("", UNKNOWN)


_CLOCKS_DIFFER_S = 60.0
"""Seconds by which the clocks of a site's server and of its nodes may differ."""


@dataclass
class Attempt:
    """One try that this run submits or adopts.

    Attributes:
        ids: the site's ids of it.
        submitted_at: seconds since the epoch, by the local clock.
        sent_at: time of the submission by the site's own clock, where known.
        sent: how often it was submitted at most.
        staged: the contents of each submission of this run.
        extras: an observer's additions.
        end: how it ended; None until that is known.
        turn: when the tries before it at its site had ended, by the local clock; None without any.
    """

    record: TryRecord
    ids: list[str]
    submitted_at: float
    sent: int
    sent_at: float | None = None
    staged: list[Staged] = field(default_factory=list)
    extras: JobExtras | None = None
    end: TryEnd | None = None
    turn: float | None = None

    @classmethod
    def of(cls, record: TryRecord) -> "Attempt":
        """Make the attempt of a new try, or of one that an earlier run may have submitted."""
        # That run may have died before it recorded the id of its last submission.
        sent = len(record.site_jobs) + 1 if record.state is not TryState.PLANNED else 0
        submitted_at = record.submitted or time.time()
        return cls(record, list(record.site_jobs), submitted_at, sent, record.sent)

    @property
    def live(self) -> LiveDirectory | None:
        added = self.extras
        if added is None or added.live is None:
            return None
        return LiveDirectory(added.directory, added.live.growing, added.live.metrics)

    @property
    def where(self) -> str:
        """Return the site and the ids there, for messages."""
        return f"{self.record.site}, {', '.join(self.ids) or self.record.id}"

    @property
    def joined_ids(self) -> str:
        """Return the ids at the site as one text for Snakemake."""
        return " ".join(self.ids)

    def times(self, marker: Marker | None) -> Times:
        """Return how long the job waited, for others and in the queue, and ran; when it ended.

        Its own report counts. Without one, what the scheduler counts, which is what a site bills;
        else the job ran up to its last heartbeat, whenever the end was noticed.
        """
        return self._all_times(marker).after(self.submitted_at, self.turn)

    def _all_times(self, marker: Marker | None) -> Times:
        if marker is not None and marker.started is not None and marker.ended is not None:
            return self._times(marker.started, marker.ended)
        end = self.end
        if end is None:
            return UNTIMED
        state = end.state
        if state is not None and state.ran is not None:
            waited, ended = state.starts_after, None
            if waited is None and state.started is not None and self.sent_at is not None:
                waited = max(0.0, state.started - self.sent_at)
            if waited is None and end.began is not None:
                waited = self._times(end.began, end.began + state.ran).waited
            if waited is not None:
                ended = min(time.time(), self.submitted_at + waited + state.ran)
            return Times(waited, state.ran, ended, SCHEDULER)
        if end.began is not None and end.beat is not None:
            return replace(self._times(end.began, end.beat), told_by=HEARTBEAT)
        return UNTIMED

    def _times(self, started: float, ended: float) -> Times:
        """Return the times of a job that began and ended at these times at its site.

        It waited from its submission, by the clock of the site's server, to its start, by the
        node's clock. The time to notice and fetch it is no part of that. If the two clocks
        evidently differ, the waiting time is unknown, and so is when it ended by the clock here.
        """
        ran, now = max(0.0, ended - started), time.time()
        if self.sent_at is None:
            return Times(ran=ran)
        waited, longest = started - self.sent_at, now - self.submitted_at - ran
        if not -_CLOCKS_DIFFER_S <= waited <= longest + _CLOCKS_DIFFER_S:
            return Times(ran=ran)
        return Times(max(0.0, waited), ran, min(now, ended + self.submitted_at - self.sent_at))


def used_of(marker: Marker | None, times: Times) -> Used:
    """Return what a job has used, as far as its marker reports it, and when it ended."""
    used = Used(ended=times.ended, told_by=times.told_by, behind=times.behind)
    if marker is None:
        return used
    return replace(used, cpu_s=marker.cpu, memory_bytes=marker.memory, gpu_busy=marker.gpu_busy)


def runtime_of(marker: Marker) -> float:
    """Return the seconds that the job ran, by the node's own clock; 0 if unknown."""
    if marker.started is None or marker.ended is None:
        return 0.0
    return max(0.0, marker.ended - marker.started)
