"""Jobs through UNICORE's job API."""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import quote

from snakemake_executor_plugin_mantik.common.errors import (
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
)
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.answers import server_time
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, do_nothing
from snakemake_executor_plugin_mantik.sites.request_policy import RateLimiter, ask_all
from snakemake_executor_plugin_mantik.sites.slurm import memory_message
from snakemake_executor_plugin_mantik.sites.unicore import states
from snakemake_executor_plugin_mantik.sites.unicore.connection import UnicoreConnection
from snakemake_executor_plugin_mantik.sites.unicore.opening import (
    format_server_time,
    parse_server_time,
)

_PAGE: Final = 200
"""Jobs in one answer; servers list no more by default."""
_STDERR_BYTES: Final = 16_384
"""Bytes of a job's standard error that are read to explain its end."""

_MOST_FOUND: Final = 10_000
"""Maximum number of jobs listed for one tag, page by page; a try has about three."""

_BEYOND_DOUBT: Final = (Reason.TIME_LIMIT, Reason.NODE_FAILURE, Reason.PREEMPTED)
"""Ends unrelated to memory, whatever a job's standard error holds."""

_ID: Final = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_TAG: Final = re.compile(r"[A-Za-z0-9-]+")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class UnicoreJobs:
    """The user's jobs at a server."""

    def __init__(
        self, connection: UnicoreConnection, site: str, submissions_per_second: float
    ) -> None:
        self._connection = connection
        self._site = site
        self._turns = RateLimiter(1 / submissions_per_second, connection.max_concurrency)

    async def submit(
        self, description: dict[str, Any], begin: Callable[[], None] = do_nothing
    ) -> str:
        """Submit a job: one request, not repeated; call `begin` when it is its turn."""
        for tag in description.get("Tags", ()):
            self._check_tag(tag)
        async with self._turns.turn():
            begin()
            response = await self._connection.once("submit", "POST", "/jobs", json=description)
        job_id = response.headers.get("Location", "").rstrip("/").rsplit("/", 1)[-1]
        if response.status_code != 201 or not _ID.fullmatch(job_id):
            raise self._connection.nonsense("/jobs")
        return str(job_id)

    async def find(self, tags: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for tag, answer in (await self._all(list(tags), self._find)).items():
            if isinstance(answer, SiteError):
                raise answer
            found[tag] = answer
        return found

    async def _find(self, tag: str) -> list[str]:
        self._check_tag(tag)
        found: list[str] = []
        while True:
            params: dict[str, str | int] = {"tags": tag, "num": _PAGE, "offset": len(found)}
            answer = await self._connection.get("find", "/jobs", params)
            urls = answer.get("jobs")
            if not isinstance(urls, list):
                raise self._connection.nonsense("/jobs")
            found += [str(url).rstrip("/").rsplit("/", 1)[-1] for url in urls]
            if len(urls) < _PAGE or len(found) > _MOST_FOUND:
                return [job_id for job_id in dict.fromkeys(found) if _ID.fullmatch(job_id)]

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        answers = await self._all(ids, self._state)
        errors = [answer for answer in answers.values() if isinstance(answer, SiteError)]
        for error in errors:
            if isinstance(error, SiteUnauthorized):
                raise error
        if errors and len(errors) == len(answers):
            raise errors[0]
        return {
            job_id: JobState(Phase.UNKNOWN, detail=answer.what)
            if isinstance(answer, SiteError)
            else answer
            for job_id, answer in answers.items()
        }

    async def _state(self, job_id: str) -> JobState:
        try:
            fields = {"fields": states.STATUS_FIELDS}
            return states.unicore_state(await self._connection.get("status", _url(job_id), fields))
        except SiteNotFound:
            return JobState(Phase.UNKNOWN, detail="the server knows no such job (just now)")

    async def explain(self, job_id: str) -> JobState:
        try:
            fields = {"fields": states.EXPLAIN_FIELDS}
            answer = await self._connection.get("explain", _url(job_id), fields)
        except SiteNotFound:
            return JobState(Phase.UNKNOWN, detail="the server knows no such job (just now)")
        found = answer.get("log")
        log = found if isinstance(found, list) else []
        state = states.state_of_log(states.unicore_state(answer), log)
        if state.later or state.reason not in (None, Reason.UNKNOWN, Reason.EXIT_CODE):
            return state
        if state.phase is not Phase.ENDED and not state.scheduler_id:
            return state
        return await self._as_scheduler_says(job_id, state, states.logged_details(log))

    async def _as_scheduler_says(
        self, job_id: str, state: JobState, logged: Mapping[str, str]
    ) -> JobState:
        """Complete the state from the scheduler's details and the job's standard error.

        Slurm's state does not always show that a job ran out of memory; its standard error does.
        """
        known = states.slurm_state(logged or await self._details(job_id), state)
        if known.phase is not Phase.ENDED or known.reason in _BEYOND_DOUBT:
            return known
        words = memory_message(await self._stderr(job_id))
        return replace(known, reason=Reason.OUT_OF_MEMORY, detail=words) if words else known

    async def _details(self, job_id: str) -> dict[str, str]:
        try:
            answer = await self._connection.get("explain", f"{_url(job_id)}/details")
        except SiteNotFound:
            return {}
        return states.slurm_details(answer)

    async def _stderr(self, job_id: str) -> str:
        """Return the beginning of the job's standard error, as far as it can be read."""
        path = f"/storages/{quote(job_id, safe='')}-uspace/files/stderr"
        text = b""
        try:
            async with self._connection.download(path, 0) as (_, chunks):
                async for chunk in chunks:
                    text += chunk
                    if len(text) >= _STDERR_BYTES:
                        break
        except SiteError as error:
            _log.debug("standard error of job %s cannot be read: %s", job_id, error)
        return text.decode(errors="replace")

    async def cancel(self, ids: Sequence[str]) -> None:
        await self._each(ids, lambda job: self._post(f"{_url(job)}/actions/abort"))

    async def _post(self, path: str) -> None:
        await self._connection.ask("cancel", "POST", path, json={})

    async def forget(self, ids: Sequence[str]) -> None:
        await self._each(ids, lambda job: self._connection.ask("forget", "DELETE", _url(job)))

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        await self._each(ids, lambda job: self._extend(job, seconds))

    async def _extend(self, job_id: str, seconds: float) -> None:
        got = await self._connection.ask(
            "extend", "GET", _url(job_id), params={"fields": "terminationTime"}
        )
        answer = self._connection.json_of(got)
        # The server's current clock: it may differ from ours, and either may be set.
        now = server_time(got)
        until = (time.time() if now is None else now) + seconds
        try:
            if parse_server_time(str(answer.get("terminationTime"))) >= until:
                return
        except ValueError:
            pass  # an unknown format: set it
        wanted = {"terminationTime": format_server_time(until)}
        response = await self._connection.ask("extend", "PUT", _url(job_id), json=wanted)
        result = self._connection.json_of(response).get("terminationTime")
        if result != "OK":  # the status is 200 all the same
            raise SiteRejected(
                f"the retention time of job {job_id} could not be extended: {result}",
                where=f"site {self._site}",
            )

    async def _each(self, ids: Sequence[str], act: Callable[[str], Awaitable[object]]) -> None:
        """Call `act` for all jobs concurrently; ignore missing jobs, raise the first error."""
        for answer in (await self._all(ids, act)).values():
            if isinstance(answer, SiteError) and not isinstance(answer, SiteNotFound):
                raise answer

    async def _all(
        self, ids: Sequence[str], act: Callable[[str], Awaitable[_T]]
    ) -> dict[str, _T | SiteError]:
        return await ask_all(ids, act, self._connection.max_concurrency)

    def _check_tag(self, tag: str) -> None:
        """Refuse all but letters, digits, `-`: `_` is a wildcard, a blank makes two tags of one."""
        if not _TAG.fullmatch(tag):
            raise SiteRejected(f"{tag!r} cannot be a tag", where=f"site {self._site}")


def _url(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"
