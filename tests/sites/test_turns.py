"""Whatever waits to be sent, there is a place for those who watch, fetch and cancel."""

import asyncio
import threading
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.authentication import Bearer
from snakemake_executor_plugin_mantik.sites.base import Submission
from snakemake_executor_plugin_mantik.sites.firecrest import FirecrestSite
from snakemake_executor_plugin_mantik.sites.unicore import UnicoreSite
from tests.support.benches import firecrest_site_at, site_at
from tests.support.parrot import Parrot, Say

PLACES = 4
MANY = 60


@pytest.fixture
def parrot() -> Iterator[Parrot]:
    parrot = Parrot("/rest/core")
    parrot.held = {"POST": threading.Event(), "PUT": threading.Event()}
    parrot.answers = [Say(body=b'{"children": [], "jobs": []}')]
    parrot.thread.start()
    yield parrot
    for event in parrot.held.values():
        event.set()
    parrot.stop()


def opened(api: str, parrot: Parrot) -> UnicoreSite | FirecrestSite:
    make = site_at if api == "unicore" else firecrest_site_at
    return make(
        parrot.url, Bearer("t0ken"), concurrent_requests=PLACES, submissions_per_second=1000.0
    )


async def none_waits_for(
    parrot: Parrot, method: str, waiting: Sequence[asyncio.Future[Any]], look: Awaitable[object]
) -> None:
    """What is asked when a request of that method is held gets its answer before it."""
    try:
        async with asyncio.timeout(100):
            while method not in [asked for asked, _, _ in parrot.asked]:
                await asyncio.sleep(0.01)
            await look
        assert not any(task.done() for task in waiting)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("api", ["unicore", "firecrest"])
async def test_submissions_without_an_answer_keep_nobody_waiting(api: str, parrot: Parrot) -> None:
    begun: list[int] = []
    site = opened(api, parrot)
    job = Submission("a", "job", "exit 0", Resources())
    waiting = [
        asyncio.ensure_future(site.submit(job, lambda n=n: begun.append(n)))  # type: ignore[misc]
        for n in range(MANY)
    ]

    async def look() -> None:
        for _ in range(MANY):
            await site._connection.get("list", "/x")

    await none_waits_for(parrot, "POST", waiting, look())
    assert len(begun) == PLACES - 1, "the others are not said to be sent"
    await site.close()


async def test_uploads_without_an_answer_keep_no_download_waiting(parrot: Parrot) -> None:
    site = opened("unicore", parrot)
    connection = site._connection

    async def upload() -> None:
        await connection.once("upload", "PUT", "/f", size=3, content=b"abc")

    async def download() -> None:
        for _ in range(10):
            async with connection.download("/f", 0) as (_, chunks):
                assert b"".join([chunk async for chunk in chunks])

    waiting = [asyncio.ensure_future(upload()) for _ in range(MANY)]
    await none_waits_for(parrot, "PUT", waiting, download())
    await site.close()
