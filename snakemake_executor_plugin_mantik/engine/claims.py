"""Claims as the controller sees them: a try is revoked here, and its owner told from others."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from snakemake_executor_plugin_mantik.common.errors import SiteNotFound, SiteRejected
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.jobs.paths import parse_marker_name
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import Entry, JobState, Site
from snakemake_executor_plugin_mantik.staging.transfers import read_file

_CLAIM_BYTES = 64 << 10
"""A claim says who holds it in its first lines; the heartbeats that follow need not be read."""

_FRESH_S = 1.0
"""Seconds for which a listing of a directory of claims serves others who look."""


@dataclass(frozen=True)
class ClaimOwner:
    """Who holds a claim, in the words of the job that made it.

    Attributes:
        site_job: the site's id of the job, where the job can know it.
        scheduler_job: the scheduler's id, or node and process id.
    """

    site_job: str
    scheduler_job: str

    def is_job(self, job_id: str, state: JobState) -> bool:
        """Whether the site's job `job_id`, whose state is `state`, holds the claim.

        A site may have started several scheduler jobs for one of its own and know the last only
        (UNICORE with a slow sbatch), so that its id alone proves nothing.
        """
        if state.scheduler_id.isdecimal() and self.scheduler_job.isdecimal():
            return state.scheduler_id == self.scheduler_job
        told = {self.site_job, self.scheduler_job} - {""}
        return job_id in told or state.scheduler_id in told


async def list_claims(site: Site, retry: SiteRetry, directory: str) -> dict[str, Entry]:
    """What lies in a directory of claims; nothing if the site says twice that there is none.

    That is no small thing: who is not seen there has given no sign of life. A denial that comes
    between answers, of a proxy, say, must not count as one.

    Raises:
        SiteError: it is not known.
    """
    for _ in range(2):
        try:
            return await site.list(directory)
        except SiteNotFound as error:
            if not await retry.believed(error):
                raise
    return {}


@dataclass(frozen=True)
class ClaimSeen:
    """What a listing of a directory of claims showed.

    Attributes:
        at: when it was asked for, in seconds of the loop's clock.
        entries: what lay there, by name.
        codes: the exit codes that markers tell, by try.
    """

    at: float
    entries: Mapping[str, Entry]
    codes: Mapping[str, int]


class ClaimLooks:
    """Lists directories of claims for many who look: one listing serves all of a second."""

    def __init__(self, site: Site, retry: SiteRetry) -> None:
        self._site = site
        self._retry = retry
        self._last: dict[str, tuple[float, asyncio.Task[ClaimSeen]]] = {}

    async def look(self, directory: str) -> ClaimSeen:
        """What lies in a directory, as it was less than a second ago.

        Raises:
            SiteError: it is not known.
        """
        now = asyncio.get_running_loop().time()
        at, task = self._last.get(directory, (-_FRESH_S, None))
        if task is None or now - at >= _FRESH_S or _failed(task):
            task = asyncio.create_task(self._list(directory, now))
            task.add_done_callback(_failed)  # nobody may be left who hears of it
            self._last[directory] = now, task
        return await asyncio.shield(task)

    async def _list(self, directory: str, now: float) -> ClaimSeen:
        found = await list_claims(self._site, self._retry, directory)
        markers = filter(None, map(parse_marker_name, found))
        return ClaimSeen(now, found, dict(markers))


def _failed(task: asyncio.Task[ClaimSeen]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def read_owner(site: Site, record: TryRecord) -> ClaimOwner | None:
    """Who holds the claim of a try; None if there is no claim, or nobody's name in it."""
    try:
        content = await read_file(site, record.paths.claim, _CLAIM_BYTES)
    except SiteNotFound:
        return None
    *lines, _ = content.decode(errors="replace").split("\n")
    told = dict(line.split("=", 1) for line in lines if "=" in line)
    if "host" not in told:  # its last line: a slow file system shows no more than a part yet
        return None
    found = ClaimOwner(told.get("site_job", ""), told.get("scheduler_job", ""))
    return found if found.site_job or found.scheduler_job else None


async def revoke_try(site: Site, record: TryRecord) -> bool:
    """See to it that a try never runs; False if it does already, or has run.

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
