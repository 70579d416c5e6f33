"""What tests of the contract do with a site."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site, SiteFacts, Submission

NAME = "rule: a=1,b"
"""What jobs are called."""
STARTS_S = 600.0
"""How long a job may take to start, to end after it was asked to, or to be listed, seconds."""
T = TypeVar("T")


def a_job(script: str, resources: Resources | None = None) -> Submission:
    tag = str(uuid.uuid4())
    return Submission(tag, NAME, script, resources or Resources(runtime_s=600))


async def content(site: Site, path: str, offset: int = 0) -> bytes:
    return b"".join([chunk async for chunk in site.get(path, offset=offset)])


async def until(site: Site, job: str, wanted: Callable[[JobState], bool]) -> JobState:
    async def ask() -> JobState:
        return (await site.states([job]))[job]

    return await _until(ask, wanted)


async def until_explained(site: Site, job: str) -> JobState:
    """What the site explains of a job, as soon as that is its end.

    It may be long before `states` tells it: UNICORE says RUNNING for two minutes and more of a job
    that was killed.
    """
    return await _until(lambda: site.explain(job), ended)


async def _until(ask: Callable[[], Awaitable[T]], wanted: Callable[[T], bool]) -> T:
    """Ask again whenever a site says that its scheduler is too slow, as the engine does."""
    deadline, found = time.monotonic() + STARTS_S, None
    while True:
        with suppress(SiteBusy, SiteUnreachable):
            if wanted(found := await ask()):
                return found
        assert time.monotonic() < deadline, f"it is still {found}"
        await asyncio.sleep(0.1)


async def fate(site: Site, submission: Submission) -> JobState | SiteError:
    """What becomes of a job that may be refused at once or after it was accepted."""
    try:
        job = await site.submit(submission)
    except SiteError as error:
        return error
    return await until_explained(site, job)


def held_job(facts: SiteFacts, code: int) -> Submission:
    """A job that ends with this exit code once it may (`until_let_end`)."""
    return a_job(f"until [ -e '{facts.workspace}/end-{code}' ]; do sleep 0.1; done; exit {code}")


async def until_let_end(site: Site, job: str, code: int) -> JobState:
    """The last state of a `held_job`."""
    await until(site, job, running)
    await site.put(f"end-{code}", b"")
    return await until(site, job, ended)


async def until_found(site: Site, wanted: Mapping[str, set[str]]) -> None:
    """The list of a scheduler may lack a job for some seconds; it never tells one that is not."""

    async def ask() -> dict[str, set[str]]:
        listed = await site.find(dict.fromkeys(wanted, NAME))
        found = {tag: set(ids) for tag, ids in listed.items()}
        assert found.keys() == wanted.keys()
        assert all(found[tag] <= wanted[tag] for tag in wanted)
        return found

    await _until(ask, lambda found: found == wanted)


async def until_there(site: Site, path: str) -> None:
    await _until(lambda: site.stat(path), bool)


async def refused(*acts: Awaitable[object]) -> None:
    """Each act is one that the site refuses to do."""
    for result in await asyncio.gather(*acts, return_exceptions=True):
        assert isinstance(result, SiteRejected), result


def ended(state: JobState) -> bool:
    return state.phase is Phase.ENDED


def running(state: JobState) -> bool:
    return state.phase is Phase.RUNNING


def waiting(state: JobState) -> bool:
    return state.phase is Phase.WAITING and bool(state.scheduler_id)
