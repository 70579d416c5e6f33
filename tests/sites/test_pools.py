"""What a site with pools requests, from listings of a pool's directory."""

from collections.abc import Mapping, Sequence

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteNotFound
from snakemake_executor_plugin_mantik.jobs.pools import Allocation, Pool, job_id
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

    async def close(self) -> None:
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


async def test_what_an_allocation_did_is_recorded_until_it_has_ended() -> None:
    """Its agents add up; what is no file of an agent's is passed over."""
    listed = Listed("pool.a", "used.a.n1.100.150", "used.a.n2.90.30", "used.a.n3.x.1", "used.a.1.2")
    listed.jobs["a"] = JobState(Phase.RUNNING)
    told: list[Allocation] = []
    site = await opened(listed)
    site.record = told.append
    await look(site)
    await look(site)
    assert [(each.seconds, each.used, each.idle) for each in told] == [(190, 180, 200)]
    assert (told[0].site_job, told[0].pool, told[0].ended) == ("a", "small", None)
    assert told[0].started is not None

    # Its agent has left, and the scheduler confirms the end later.
    del listed.names["pool.a"]
    await look(site)
    assert "used.a.n1.100.150" in listed.names
    listed.jobs["a"] = JobState(Phase.ENDED)
    await look(site)
    assert told[1].ended is not None
    assert (told[1].seconds, told[1].used, len(told)) == (190, 180, 2)
    assert not listed.names
    await site.close()


async def test_an_agent_that_has_left_makes_room_for_another_allocation() -> None:
    listed = Listed(READY, *(f"used.{n}.n.9.9" for n in range(3)))
    listed.jobs |= {f"{n}": JobState(Phase.RUNNING) for n in range(3)}
    await look(await opened(listed))
    assert len(listed.jobs) == 4


async def test_what_an_allocation_did_while_nobody_looked_is_recorded() -> None:
    """The scheduler has forgotten it."""
    listed = Listed("used.a.n1.100.150")
    told: list[Allocation] = []
    site = await opened(listed)
    site.record = told.append
    for _ in range(3):
        await look(site)
        listed.clock += 100
    assert not listed.names
    assert told[-1].ended is not None
    assert told[-1].used == 150
    await site.close()
