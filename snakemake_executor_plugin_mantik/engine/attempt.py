"""Define the value of one attempt during a run: its submissions and its end."""

import time
from dataclasses import dataclass, field, replace

from ..jobs.markers import Marker
from ..jobs.pools import parse_job_id
from ..jobs.spec import LiveDirectory
from ..journal import UNTIMED, AttemptRecord, AttemptState, Times, Used
from ..staging.local import LocalFile
from .evidence import Evidence
from .observer import JobExtras
from .request import JobRequest
from .stage import Staged

SCHEDULER, HEARTBEAT = "scheduler", "heartbeat"
"""Who tells how long a job ran that could not report it (`Times.told_by`)."""
_CLOCKS_DIFFER_S = 60.0
"""Seconds by which the clocks of a site's server and of its nodes may differ."""


@dataclass(eq=False)
class Attempt:
    """One attempt that this run submits or adopts.

    Attributes:
        ids: the site's ids of it.
        submitted_at: seconds since the epoch, by the local clock.
        sent_at: time of the submission by the site's own clock, where known.
        sent: how often it was submitted at most.
        staged: the contents of each submission of this run.
        extras: an observer's additions.
        end: how it ended; None until that is known.
        turn: when the attempts before it at its site had ended, by the local clock; None without
            any.
        files: the files that the job needs.
        whole: the request with the observer's additions.
        own: the observer's files.
        withdrawn: whether it had not started in time and certainly never will.
    """

    record: AttemptRecord
    ids: list[str]
    submitted_at: float
    sent: int
    sent_at: float | None = None
    staged: list[Staged] = field(default_factory=list)
    extras: JobExtras | None = None
    end: Evidence | None = None
    turn: float | None = None
    files: list[LocalFile] = field(default_factory=list)
    whole: JobRequest = field(init=False)
    own: list[LocalFile] = field(default_factory=list)
    withdrawn: bool = False

    @classmethod
    def of(cls, record: AttemptRecord, files: list[LocalFile] | None = None) -> "Attempt":
        """Make the attempt of a new attempt, or of one that an earlier run may have submitted."""
        # That run may have died before it recorded the id of its last submission.
        sent = len(record.site_jobs) + 1 if record.state is not AttemptState.PLANNED else 0
        submitted_at = record.submitted or time.time()
        ids = list(record.site_jobs)
        return cls(record, ids, submitted_at, sent, record.sent, files=files or [])

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
        state, began = end.state, end.owner.began if end.owner is not None else None
        if state is not None and state.ran is not None:
            waited, ended = state.starts_after, None
            if waited is None and state.started is not None and self.sent_at is not None:
                waited = max(0.0, state.started - self.sent_at)
            if waited is None and began is not None:
                waited = self._times(began, began + state.ran).waited
            if waited is not None:
                ended = min(time.time(), self.submitted_at + waited + state.ran)
            return Times(waited, state.ran, ended, SCHEDULER)
        if began is not None and end.beat is not None:
            return replace(self._times(began, end.beat), told_by=HEARTBEAT)
        return UNTIMED

    def _times(self, started: float, ended: float) -> Times:
        """Return the times of a job that began and ended at these times at its site.

        It waited from its submission, by the clock of the site's server, to its start, by the
        node's clock, but no longer than the clock here allows: the server tells whole seconds, and
        old ones. The time to notice and fetch it is no part of that. If the two clocks evidently
        differ, the waiting time is unknown, and so is when it ended by the clock here.
        """
        ran, now = max(0.0, ended - started), time.time()
        if self.sent_at is None:
            return Times(ran=ran)
        waited, longest = started - self.sent_at, now - self.submitted_at - ran
        if not -_CLOCKS_DIFFER_S <= waited <= longest + _CLOCKS_DIFFER_S:
            return Times(ran=ran)
        waited = max(0.0, min(waited, longest))
        return Times(waited, ran, min(now, self.submitted_at + waited + ran))


def used_of(marker: Marker | None, times: Times, failed_node: str = "") -> Used:
    """Return what a job has used, as far as its marker reports it, and how and when it ended."""
    used = Used(
        ended=times.ended, told_by=times.told_by, behind=times.behind, failed_node=failed_node
    )
    if marker is None:
        return used
    return replace(
        used, cpu_s=marker.cpu, memory_bytes=marker.memory, gpu_busy=marker.gpu_busy,
        exit_code=marker.exit_code,
        allocation=marker.scheduler_job if parse_job_id(marker.site_job) else "",
    )  # fmt: skip
