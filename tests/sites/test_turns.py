"""Whatever waits to be sent, there is a place for those who watch, fetch and cancel."""

import asyncio
import threading
from collections.abc import Iterator

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


@pytest.mark.parametrize("api", ["unicore", "firecrest"])
def test_submissions_without_an_answer_keep_nobody_waiting(api: str, parrot: Parrot) -> None:
    begun: list[int] = []

    async def play() -> None:
        site = opened(api, parrot)
        job = Submission("a", "job", "exit 0", Resources())
        waiting = [
            asyncio.ensure_future(site.submit(job, lambda n=n: begun.append(n)))  # type: ignore[misc]
            for n in range(MANY)
        ]
        try:
            async with asyncio.timeout(100):
                while not [method for method, _, _ in parrot.asked if method == "POST"]:
                    await asyncio.sleep(0.01)
                for _ in range(MANY):
                    await site._connection.get("list", "/x")
            assert not any(task.done() for task in waiting)
            assert len(begun) == PLACES - 1, "the others are not said to be sent"
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await site.close()

    asyncio.run(play())


def test_uploads_without_an_answer_keep_no_download_waiting(parrot: Parrot) -> None:
    async def play() -> None:
        site = opened("unicore", parrot)
        connection = site._connection

        async def upload() -> None:
            await connection.once("upload", "PUT", "/f", size=3, content=b"abc")

        async def download() -> bytes:
            async with connection.download("/f", 0) as (_, chunks):
                return b"".join([chunk async for chunk in chunks])

        waiting = [asyncio.ensure_future(upload()) for _ in range(MANY)]
        try:
            async with asyncio.timeout(100):
                while not [method for method, _, _ in parrot.asked if method == "PUT"]:
                    await asyncio.sleep(0.01)
                for _ in range(10):
                    assert await download()
            assert not any(task.done() for task in waiting)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await site.close()

    asyncio.run(play())
