"""List, read and revoke the claims of tries, as the controller."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from snakemake_executor_plugin_mantik.common.errors import (
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.paths import parse_marker_name
from snakemake_executor_plugin_mantik.journal import TryRecord, decode_identity
from snakemake_executor_plugin_mantik.sites.base import Entry, JobState, Site
from snakemake_executor_plugin_mantik.staging.transfers import read_file

from .site_retry import SiteRetry

_CLAIM_BYTES = 64 << 10
"""The first lines of a claim name its owner; the heartbeats that follow need not be read."""

_FRESH_S = 1.0
"""Seconds for which one listing of a directory of claims serves all callers."""


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


def exit_codes(names: Iterable[str]) -> dict[str, int]:
    """Return the exit codes of the tries whose markers are among the names in a directory."""
    return dict(filter(None, map(parse_marker_name, names)))


@dataclass(frozen=True)
class ClaimSeen:
    """A listing of a directory of claims.

    Attributes:
        at: time of the request, in seconds of the loop's clock.
        entries: its entries, by name.
        codes: exit codes from the markers, by try.
    """

    at: float
    entries: Mapping[str, Entry]
    codes: Mapping[str, int]


class ClaimLooks:
    """List directories of claims; one listing serves all callers within a second."""

    def __init__(self, site: Site, retry: SiteRetry) -> None:
        self._site = site
        self._retry = retry
        self._last: dict[str, tuple[float, asyncio.Task[ClaimSeen]]] = {}

    async def look(self, directory: str) -> ClaimSeen:
        """Return a listing of a directory that was requested less than a second ago.

        Raises:
            SiteError: the directory cannot be listed.
        """
        now = asyncio.get_running_loop().time()
        at, task = self._last.get(directory, (-_FRESH_S, None))
        if task is None or now - at >= _FRESH_S or _failed(task):
            task = asyncio.create_task(self._list(directory, now))
            task.add_done_callback(_failed)  # retrieve its exception even if no caller awaits it
            self._last[directory] = now, task
        return await asyncio.shield(task)

    async def _list(self, directory: str, now: float) -> ClaimSeen:
        found = await list_claims(self._site, self._retry, directory)
        return ClaimSeen(now, found, exit_codes(found))


def _failed(task: asyncio.Task[ClaimSeen]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def read_beginning(site: Site, path: str) -> bytes:
    """Read the lines of a claim that its job wrote when it made it.

    Raises:
        SiteNotFound: there is no claim, or the try is revoked.
    """
    return await read_file(site, path, _CLAIM_BYTES)


def _fields(content: bytes) -> dict[str, str] | None:
    """Return the lines of a claim by their names; None if they are not all there.

    A slow file system may show a part of it.
    """
    *lines, _ = content.decode(errors="replace").split("\n")
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields if "host" in fields else None  # its last line


async def read_owner(site: Site, record: TryRecord) -> ClaimOwner | None:
    """Read the owner of a try's claim; return None if there is no claim, or no owner in it."""
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
    """Return what a claim says of its try (`journal.encode_identity`); None if it does not."""
    fields = _fields(content)
    return decode_identity(fields["identity"]) if fields and "identity" in fields else None


async def revoke_try(site: Site, record: TryRecord) -> bool:
    """Make certain that a try never runs; return False if it has started already.

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
