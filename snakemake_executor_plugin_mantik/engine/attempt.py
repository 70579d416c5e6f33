"""Values of one try while a run watches it: its submissions, what was seen of it, how it ended."""

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum

from snakemake_executor_plugin_mantik.engine import claims
from snakemake_executor_plugin_mantik.engine.observer import JobExtras
from snakemake_executor_plugin_mantik.engine.stage import Staged
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.spec import LiveDirectory
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase

FIRST_CHECK_S = 5.0
"""Seconds after submission when an unclaimed try is first asked about."""
UNKNOWN = JobState(Phase.UNKNOWN)


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
        kind: MARKER: the job wrote how it ended. SCHEDULER: it can write nothing any more, or never
            started and never will: the scheduler's word counts. VANISHED: no trace of it; the same
            try may be submitted again. REVOKED: it never started and never will, because an earlier
            run, or somebody else, gave it up.
        exit_code: from the marker's name.
        size: of the marker, bytes.
        state: the scheduler's word.
        claimed: whether the job is known to have started.
        ids: the site's ids of it that are known by now.
    """

    kind: TryEndKind
    exit_code: int | None = None
    size: int | None = None
    state: JobState | None = None
    claimed: bool = False
    ids: tuple[str, ...] = ()


@dataclass
class Watched:
    """A try and what was seen of it.

    Times are the clock's; durations count only seconds in which the site could be looked at.

    Attributes:
        sent: how often it was submitted; there may be ids that are not known yet.
        wait_s: how long to wait for a trace of it.
        denied_since: since when the scheduler has known nothing of it.
        waited: since it was submitted.
        silent: since it showed a sign of life.
        seen: when it was last looked for, or began to be watched.
        looked: whether it was looked for since then.
        owner: who holds the claim, once that was asked.
        revoked: whether we have revoked it.
        live: whether what it logs is told while it runs.
        detailed: when the scheduler's details of it were last asked for.
        waits: the scheduler's word for why it cannot start.
        ended_since: since when the scheduler says that it ended.
        word: the scheduler's word that it ended.
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
    claimed: bool = False
    claim_bytes: int = -1
    owner: claims.ClaimOwner | None = None
    revoked: bool = False
    live: bool = False
    check_delay: float = FIRST_CHECK_S
    detailed: float = 0.0
    waits: str = ""
    ended_since: float | None = None
    word: tuple[str, JobState] = ("", UNKNOWN)


_CLOCKS_DIFFER_S = 60.0
"""Seconds by which the clocks of a site's server and of its nodes may differ."""


@dataclass
class Attempt:
    """One try that this run has to do with.

    Attributes:
        ids: the site's ids of it.
        submitted_at: seconds since the epoch, by the clock here.
        sent_at: when it was submitted, by the site's own clock, where that is known.
        sent: how often it was submitted, at most.
        staged: what each script that this run submitted carried.
        extras: what an observer adds to it.
    """

    record: TryRecord
    ids: list[str]
    submitted_at: float
    sent: int
    sent_at: float | None = None
    staged: list[Staged] = field(default_factory=list)
    extras: JobExtras | None = None

    @property
    def live(self) -> LiveDirectory | None:
        """What is shown of it while it runs."""
        added = self.extras
        if added is None or added.live is None:
            return None
        return LiveDirectory(added.directory, added.live.growing)

    @property
    def where(self) -> str:
        """The site and the ids there, for messages."""
        return f"{self.record.site}, {', '.join(self.ids) or self.record.id}"

    @property
    def joined_ids(self) -> str:
        """The ids at the site, as Snakemake is told them."""
        return " ".join(self.ids)

    def times(self, marker: Marker) -> tuple[float | None, float]:
        """Seconds waited, where that is known, and run.

        It waited from its submission, by the clock of the site's server, to its start, by the
        node's. How long it took to be seen and fetched here is no part of that. Where the two
        clocks cannot be the same, nothing is known.
        """
        if self.sent_at is None or marker.started is None:
            return None, runtime_of(marker)
        waited = marker.started - self.sent_at
        longest = time.time() - self.submitted_at - runtime_of(marker)
        plausible = -_CLOCKS_DIFFER_S <= waited <= longest + _CLOCKS_DIFFER_S
        return (max(0.0, waited) if plausible else None), runtime_of(marker)


def runtime_of(marker: Marker) -> float:
    """Seconds that the job ran, by the node's own clock."""
    if marker.started is None or marker.ended is None:
        return 0.0
    return max(0.0, marker.ended - marker.started)
