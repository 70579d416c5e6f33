"""What is seen of a try while it is watched, and how it ended: values."""

import asyncio
from dataclasses import dataclass
from enum import Enum

from snakemake_executor_plugin_mantik.engine import claims
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
