"""The scheduler's word on a job that a signal ended: the job itself cannot know who sent it.

Nor does it hear of one that has ended its command a moment before.
"""

import asyncio
from contextlib import suppress
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteError, SiteNotFound, SiteRejected
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine.attempt import runtime_of
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site

_KILLED: Final = 128 + 9
"""The exit code that a shell gives for a command that KILL ended; the kernel's, for want of memory,
among others."""

_ASKED: Final = frozenset({128 + 1, 128 + 2, 128 + 15})
"""The exit codes of a script, or of a command, that HUP, INT or TERM asked to end."""

_LONGEST_START_S: Final = 60.0
_START_SHARE: Final = 0.02
"""How long a script may take to start, in seconds, or as a share of the walltime."""

_TELLING: Final = (
    Reason.TIME_LIMIT,
    Reason.OUT_OF_MEMORY,
    Reason.NODE_FAILURE,
    Reason.PREEMPTED,
    Reason.CANCELLED,
)
"""What explains a signal; that the script ended with a code does not."""


def _slack(limit: float) -> float:
    """Seconds by which a job may be ended for its time before it has run for all of it.

    A scheduler counts from when it allocates the nodes, the script from its own start. Of a short
    walltime that can be no minute, or each end would be that of its time.
    """
    return min(max(_LONGEST_START_S, _START_SHARE * limit), limit / 10)


class FailureClassifier:
    """Asks one site's scheduler. All methods belong to the event loop's thread."""

    def __init__(self, site: Site, settings: SiteSettings) -> None:
        self._site = site
        self._settings = settings

    async def reason(
        self, marker: Marker, record: TryRecord, ids: list[str], limit: float | None = None
    ) -> Reason:
        """Why a job failed that could still write its marker.

        Args:
            marker: what it wrote.
            record: the try.
            ids: the site's ids of it; empty if a run that was killed did not hear them.
            limit: its walltime in seconds, where that is known.
        """
        over = limit is not None and runtime_of(marker) >= limit - _slack(limit)
        # A marker without room for more than its name cannot tell the signal.
        nameless = marker.bare and marker.started is None and marker.exit_code in _ASKED
        if marker.signal or nameless:
            otherwise = Reason.TIME_LIMIT if over else Reason.CANCELLED
            return await self._said(record, ids) or otherwise
        if marker.failed_step:
            return Reason.SET_UP
        # A scheduler ends one process after the other: the command may have gone, with any code,
        # before the script was told.
        if over or marker.exit_code == _KILLED or marker.exit_code in _ASKED:
            return await self._said(record, ids) or Reason.EXIT_CODE
        return Reason.EXIT_CODE

    async def _said(self, record: TryRecord, ids: list[str]) -> Reason | None:
        """What the scheduler says, once it says that the job ended; None if it has no reason.

        A site that does not answer, or is slow to notice the end, is waited for `MarkerGrace`.
        """
        told: JobState | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.marker_grace_s):
                while (told := await self._ended(ids or await self._found(record))) is None:
                    await asyncio.sleep(self._settings.poll_min_s)
        return told.reason if told is not None and told.reason in _TELLING else None

    async def _found(self, record: TryRecord) -> list[str]:
        with suppress(SiteError):
            found = await self._site.find({record.id: record.name})
            return found.get(record.id, [])
        return []

    async def _ended(self, ids: list[str]) -> JobState | None:
        """The state of the job, which one of `ids` ran; None while the scheduler sees it run."""
        if not ids:
            return None
        try:
            ended = {}
            for job_id, said in (await self._site.states(ids)).items():
                state = said
                if said.phase is Phase.ENDED or self._site.states_lag:
                    with suppress(SiteNotFound, SiteRejected):
                        explained = await self._site.explain(job_id)
                        state = explained if explained.phase is Phase.ENDED else said
                if state.phase is Phase.ENDED:
                    ended[job_id] = state
        except SiteError:
            return None
        told = [state for state in ended.values() if state.reason in _TELLING]
        if told or len(ended) == len(ids):
            return (told or list(ended.values()))[-1]
        return None
