"""What a site with pools requests, from listings of a pool's directory."""

from collections.abc import Mapping, Sequence

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteNotFound
from snakemake_executor_plugin_mantik.jobs.pools import Pool, job_id
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import (
    MISSING,
    Entry,
    JobState,
    Phase,
    Site,
    SiteFacts,
    Submission,
)
from snakemake_executor_plugin_mantik.sites.pools import with_pools

POOL = Pool("small", Resources(runtime_s=600, cpus_per_task=2), 60, 2, 10)


Found = dict[str, list[str]]


class Listed:
    """The site of a pool whose directory has the files `names`; `jobs` are its allocations."""

    name = "site"
    clock = 1000.0

    def __init__(self, *names: str, **jobs: JobState) -> None:
        self.names = dict.fromkeys(names, self.clock)
        self.jobs = jobs

    async def open(self, *, make: bool = True) -> SiteFacts:
        return SiteFacts("/ws", "Listed 1", orders_jobs=True, upload_bytes=1 << 20)

    async def list(self, path: str) -> dict[str, Entry]:
        if not self.names:
            raise SiteNotFound(path)
        return {name: Entry(name, 1, False, modified) for name, modified in self.names.items()}

    async def find(self, names: Mapping[str, str]) -> Found:
        return {tag: [tag] for tag in names if tag in self.jobs}

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        return {job: self.jobs.get(job, MISSING) for job in ids}

    async def put(self, path: str, content: bytes) -> None:
        self.names[path.rpartition("/")[2]] = self.clock

    async def remove(self, path: str) -> None:
        self.names.pop(path.rpartition("/")[2], None)

    async def forget(self, ids: Sequence[str]) -> None:
        pass

    async def submit(self, submission: Submission) -> str:
        self.jobs[submission.tag] = JobState(Phase.WAITING)
        return submission.tag


async def opened(listed: Listed) -> Site:
    site = with_pools(listed, [POOL])  # type: ignore[arg-type]
    site.notify = lambda _: None
    await site.open()
    return site


async def look(site: Site) -> JobState:
    [state] = (await site.states([job_id("small", "job")])).values()
    return state


READY = "ready.1.1.0.0.60.0.0.job"


async def test_an_allocation_that_is_forgotten_is_replaced() -> None:
    """It ended while this machine slept: what it had not taken must not wait for it."""
    listed = Listed(READY, "pool.old", "run.old.other", old=JobState(Phase.RUNNING))
    site = await opened(listed)
    await look(site)
    assert list(listed.jobs) == ["old"]
    listed.clock += 36000
    listed.jobs.clear()

    await look(site)
    assert not listed.jobs  # a single denial is no proof
    for _ in range(3):
        listed.clock += 100
        await look(site)

    assert len(listed.jobs) == 1
    assert "pool.old" not in listed.names


async def test_an_allocation_that_is_not_found_once_stays() -> None:
    listed = Listed(READY, "pool.old")
    listed.clock += 36000
    site = await opened(listed)
    await look(site)
    listed.jobs["old"] = JobState(Phase.RUNNING)
    listed.clock += 200
    await look(site)
    assert list(listed.jobs) == ["old"]
    assert "pool.old" in listed.names


@pytest.mark.parametrize(("kept", "requested"), [(Phase.RUNNING, 1), (Phase.ENDED, 1)])
async def test_files_of_an_ended_allocation_request_none(kept: Phase, requested: int) -> None:
    runs = [f"run.old.{n}" for n in range(3)]
    listed = Listed(READY, *runs, old=JobState(kept))
    await look(await opened(listed))
    assert len(listed.jobs) - 1 == requested


async def test_a_cancelled_job_requests_no_allocation() -> None:
    listed = Listed(READY, "stop.job")
    await look(await opened(listed))
    assert not listed.jobs
