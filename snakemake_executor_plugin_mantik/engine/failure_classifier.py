"""Ask the scheduler why a signal ended a job: the job cannot know who sent the signal.

Nor does the job's script notice a signal that has ended its command a moment before.
"""

import asyncio
from contextlib import suppress
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteError, SiteNotFound, SiteRejected
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site

from .attempt import runtime_of
from .evidence import read_owner

_KILLED: Final = 128 + 9
"""A shell's exit code for a command that SIGKILL ended; the kernel sends it for lack of memory,
among others."""

_ASKED: Final = frozenset({128 + 1, 128 + 2, 128 + 15})
"""The exit codes of a script or command that SIGHUP, SIGINT or SIGTERM ended."""

_LONGEST_START_S: Final = 60.0
_START_SHARE: Final = 0.02
"""How long a script may take to start, in seconds or as a share of the walltime."""

_TELLING: Final = (
    Reason.TIME_LIMIT,
    Reason.OUT_OF_MEMORY,
    Reason.NODE_FAILURE,
    Reason.PREEMPTED,
    Reason.CANCELLED,
)
"""Reasons that explain a signal; an exit code of the script does not."""


def _slack(limit: float) -> float:
    """Return the seconds before its walltime at which a job may already reach its time limit.

    A scheduler counts from the allocation of the nodes, the script from its own start. With a short
    walltime this must be less than a minute, or every end would count as reaching the limit.
    """
    return min(max(_LONGEST_START_S, _START_SHARE * limit), limit / 10)


class FailureClassifier:
    """Query one site's scheduler. Call all methods from the event loop's thread."""

    def __init__(self, site: Site, settings: SiteSettings) -> None:
        self._site = site
        self._settings = settings

    async def reason(
        self, marker: Marker, record: TryRecord, ids: list[str], limit: float | None = None
    ) -> Reason:
        """Return why a job failed that could still write its marker.

        `ids` are empty if a run was killed before it got them. `limit` is the walltime in seconds,
        where known.
        """
        if marker.go_on == "time_limit":  # its script has ended it in time
            return Reason.TIME_LIMIT
        over = limit is not None and runtime_of(marker) >= limit - _slack(limit)
        # A marker that had room for its name only does not contain the signal.
        nameless = marker.bare and marker.started is None and marker.exit_code in _ASKED
        if marker.signal or nameless:
            otherwise = Reason.TIME_LIMIT if over else Reason.CANCELLED
            return await self._scheduler_reason(record, ids) or otherwise
        if marker.failed_step:
            return Reason.SET_UP
        # A scheduler ends one process after the other: the command may have ended, with any code,
        # before the script got the signal.
        if marker.go_on:
            return Reason.EXIT_CODE
        if over or marker.exit_code == _KILLED or marker.exit_code in _ASKED:
            return await self._scheduler_reason(record, ids) or Reason.EXIT_CODE
        return Reason.EXIT_CODE

    async def _scheduler_reason(self, record: TryRecord, ids: list[str]) -> Reason | None:
        """Return the scheduler's reason for the job's end; None if it has none.

        Wait up to the marker's grace for a site that does not answer or is slow to notice the end.
        """
        state: JobState | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.timing.marker_grace_s):
                while (state := await self._last(ids or await self._found(record))) is None or (
                    state.phase is Phase.WAITING
                ):
                    await asyncio.sleep(self._settings.timing.poll_min_s)
        if state is not None and state.phase is Phase.WAITING:
            # The site put it back into the queue, where nobody cancelled it. Half a record may
            # say so for some seconds.
            return Reason.PREEMPTED if await self._ran(record, state) else None
        return state.reason if state is not None and state.reason in _TELLING else None

    async def _ran(self, record: TryRecord, state: JobState) -> bool:
        """Check whether the scheduler's job that waits is the one that ran.

        It may be another start of the same submission, of which the site knows the last one only.
        """
        with suppress(SiteError):
            owner = await read_owner(self._site, record)
            return owner is not None and owner.scheduler_job == state.scheduler_id
        return False

    async def _found(self, record: TryRecord) -> list[str]:
        with suppress(SiteError):
            found = await self._site.find({record.id: record.name})
            return found.get(record.id, [])
        return []

    async def _last(self, ids: list[str]) -> JobState | None:
        """Return the final state of the job that ran, one of `ids`; None while it may still run.

        A waiting state if the only job waits again.
        """
        if not ids:
            return None
        try:
            ended, waits = {}, None
            for job_id, reported in (await self._site.states(ids)).items():
                state = reported
                if reported.phase is Phase.ENDED or self._site.states_lag:
                    with suppress(SiteNotFound, SiteRejected):
                        explained = await self._site.explain(job_id)
                        again = explained.phase in (Phase.ENDED, Phase.WAITING)
                        state = explained if again else reported
                if state.phase is Phase.ENDED:
                    ended[job_id] = state
                if state.phase is Phase.WAITING:
                    waits = state
        except SiteError:
            return None
        explaining = [state for state in ended.values() if state.reason in _TELLING]
        if explaining or len(ended) == len(ids):
            return (explaining or list(ended.values()))[-1]
        return waits if len(ids) == 1 else None
