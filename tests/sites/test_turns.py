"""Whatever waits to be sent, there is a place for those who watch, fetch and cancel."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.sites.authentication import Bearer
from snakemake_executor_plugin_mantik.sites.firecrest import connection as of_firecrest
from snakemake_executor_plugin_mantik.sites.firecrest import jobs as firecrest_jobs
from snakemake_executor_plugin_mantik.sites.unicore import connection as of_unicore
from snakemake_executor_plugin_mantik.sites.unicore import jobs as unicore_jobs
from tests.support.parrot import Parrot, Say

PLACES = 4
MANY = 60

Submit = Callable[[Callable[[], None]], Awaitable[object]]
Ask = Callable[[], Awaitable[object]]


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


def opened(api: str, parrot: Parrot) -> tuple[Any, Submit, Ask]:
    """A connection, how to submit a job through it, and how to ask something small."""
    options: Any = {
        "ca_file": None, "proxy": None, "timeout_s": 60.0, "concurrent_requests": PLACES,
    }  # fmt: skip
    if api == "unicore":
        unicore_site = of_unicore.UnicoreConnection(
            "parrot", parrot.url, Bearer("t0ken"), **options
        )
        of_user = unicore_jobs.UnicoreJobs(unicore_site, "parrot", 1000.0)
        return (
            unicore_site,
            lambda begin: of_user.submit({"Tags": ["a"]}, begin),
            lambda: unicore_site.get("list", "/x"),
        )
    connection = of_firecrest.FirecrestConnection("parrot", parrot.url, Bearer("t0ken"), **options)
    jobs = firecrest_jobs.FirecrestJobs(connection, 1000.0)
    return (
        connection,
        lambda begin: jobs.submit("#!/bin/bash", "/d", begin),
        lambda: connection.ask("list", lambda client: client.status()),
    )


@pytest.mark.parametrize("api", ["unicore", "firecrest"])
def test_submissions_without_an_answer_keep_nobody_waiting(api: str, parrot: Parrot) -> None:
    begun: list[int] = []

    async def play() -> None:
        connection, submit, ask = opened(api, parrot)
        waiting = [
            asyncio.ensure_future(submit(lambda n=n: begun.append(n)))  # type: ignore[misc]
            for n in range(MANY)
        ]
        try:
            async with asyncio.timeout(100):
                while not [method for method, _, _ in parrot.asked if method == "POST"]:
                    await asyncio.sleep(0.01)
                for _ in range(MANY):
                    await ask()
            assert not any(task.done() for task in waiting)
            assert len(begun) == PLACES - 1, "the others are not said to be sent"
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await connection.close()

    asyncio.run(play())


def test_uploads_without_an_answer_keep_no_download_waiting(parrot: Parrot) -> None:
    async def play() -> None:
        connection, _, _ = opened("unicore", parrot)

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
            await connection.close()

    asyncio.run(play())
