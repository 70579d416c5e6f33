"""What a site with pools requests, from listings of a pool's directory."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
)
from snakemake_executor_plugin_mantik.jobs.pools import Allocation, Pool, job_id
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
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
from tests.support.virtualtime import run

POOL = Pool("small", Resources(runtime_s=600, cpus_per_task=2), 60, 2, 10)
ONE_CPU = Resources(runtime_s=600, cpus_per_task=1)


Found = dict[str, list[str]]


class Listed:
    """The site of a pool whose directory has the files `names`; `jobs` are its allocations."""

    name = "site"
    clock = 1000.0

    def __init__(self, *names: str, **jobs: JobState) -> None:
        self.names = dict.fromkeys(names, self.clock)
        self.jobs = jobs
        self.refusal: SiteError | JobState | None = None
        self.asked = 0

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

    async def cancel(self, ids: Sequence[str]) -> None:
        self.jobs |= dict.fromkeys(ids, JobState(Phase.ENDED, Reason.CANCELLED))

    async def close(self) -> None:
        pass

    async def submit(self, submission: Submission) -> str:
        self.asked += 1
        if isinstance(self.refusal, SiteError):
            raise self.refusal
        self.jobs[submission.tag] = self.refusal or JobState(Phase.WAITING)
        return submission.tag


async def opened(listed: Listed, pool: Pool = POOL) -> Site:
    site = with_pools(listed, [pool])  # type: ignore[arg-type]
    site.notify = lambda _: None
    await site.open()
    return site


async def look(site: Site) -> JobState:
    """Look at the job, and wait until what is requested then was."""
    [state] = (await site.states([job_id("small", "job")])).values()
    await asyncio.gather(*vars(site)["_requests"].values())
    return state


READY = "ready.1.1.0.0.60.0.0.job"


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


async def test_an_allocation_comes_for_a_job_that_is_behind_one_that_has_ended() -> None:
    """That one was here, too: only an agent sees that it is over."""
    listed = Listed(READY.replace("ready", "behind"))
    assert (await look(await opened(listed))).phase is Phase.WAITING
    assert len(listed.jobs) == 1


async def test_a_job_of_the_scheduler_is_not_put_behind_one_of_a_pool() -> None:
    site = await opened(Listed())
    with pytest.raises(SiteRejected, match="cannot wait for one of a pool"):
        await site.submit(Submission("tag", "job", "", ONE_CPU, after=(job_id("small", "job"),)))


async def test_jobs_fill_all_nodes_of_an_allocation() -> None:
    """What an agent of any of its nodes has taken is free when the allocation has ended."""
    pool = replace(POOL, resources=replace(POOL.resources, nodes=2))
    waiting = [READY.replace("job", str(n)) for n in range(4)]
    listed = Listed(*waiting)
    await look(await opened(listed, pool))
    assert len(listed.jobs) == 1
    listed = Listed(*waiting, READY)
    await look(await opened(listed, pool))
    assert len(listed.jobs) == 2
    listed = Listed("run.old+1.job", old=JobState(Phase.RUNNING))
    site = await opened(listed, pool)
    assert (await look(site)).phase is Phase.RUNNING
    listed.jobs["old"] = JobState(Phase.ENDED)
    assert (await look(site)).reason is Reason.ALLOCATION_ENDED


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("time", Reason.TIME_LIMIT), ("stop", Reason.CANCELLED), ("pool", Reason.ALLOCATION_ENDED),
        ("0", Reason.SUCCESS), ("3", Reason.EXIT_CODE),
    ],
)  # fmt: skip
async def test_an_agent_says_how_a_job_has_ended(how: str, reason: Reason) -> None:
    state = await look(await opened(Listed(f"done.{how}.job")))
    assert (state.phase, state.reason) == (Phase.ENDED, reason)
    if reason is not Reason.SUCCESS:  # it was sent twice: a marker may be there
        state = await look(await opened(Listed(f"done.{how}.job", READY)))
        assert (state.phase, state.reason) == (Phase.WAITING, reason)


async def test_a_cancelled_job_requests_no_allocation() -> None:
    listed = Listed(READY, "stop.job")
    await look(await opened(listed))
    assert not listed.jobs


async def test_a_cancelled_job_that_no_agent_has_seen_yet_is_taken_back() -> None:
    """What an agent has unpacked it removes itself."""
    listed = Listed(READY.replace(".job", ".seen"))
    site = await opened(listed)
    await look(site)
    await site.submit(Submission("job", "job", "", replace(ONE_CPU, pool="small")))
    [sent] = [name for name in listed.names if name.startswith("in.")]
    await site.cancel([job_id("small", "job"), job_id("small", "seen")])
    assert sent not in listed.names
    assert {READY.replace(".job", ".seen"), "stop.job", "stop.seen"} <= listed.names.keys()


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


@pytest.mark.parametrize(
    "refusal",
    [SiteRejected("Invalid account"), JobState(Phase.ENDED, Reason.REJECTED, "Invalid account")],
    ids=["at once", "by the scheduler"],
)
async def test_a_refused_allocation_ends_the_jobs_that_wait(refusal: SiteError | JobState) -> None:
    """Those that are sent later ask the site again."""
    listed = Listed(READY)
    listed.refusal = refusal
    site = await opened(listed)
    for _ in range(3):
        state = await look(site)
    assert (state.phase, state.reason) == (Phase.ENDED, Reason.REJECTED)
    assert "Invalid account" in state.detail
    assert listed.asked == 1

    await site.forget([job_id("small", "job")])  # no other allocation is to run it
    assert READY not in listed.names

    wants = Resources(runtime_s=60, cpus_per_task=1, pool="small")
    await site.submit(Submission("next", "next", "true", wants))
    await look(site)
    assert listed.asked == 2


@pytest.mark.parametrize(
    "refusal",
    [SiteBusy("too many jobs"), JobState(Phase.ENDED, Reason.REJECTED, "too many", later=True)],
    ids=["at once", "by the scheduler"],
)
def test_a_site_that_has_no_room_is_asked_again_after_pauses(refusal: SiteError | JobState) -> None:
    async def act() -> None:
        listed = Listed(READY)
        listed.refusal = refusal
        site = await opened(listed)
        asked = []
        for _ in range(100):
            assert (await look(site)).phase is Phase.WAITING
            asked.append(listed.asked)
            await asyncio.sleep(10)
        assert asked[2] == 1
        assert asked[-1] == 6  # after 30, 60, 120, 240, 480 s
        assert "too many" in (await look(site)).pending

    run(act())


async def test_two_controllers_request_no_more_allocations_than_there_may_be() -> None:
    listed = Listed(*(f"ready.{n}.2.0.0.60.0.0.{n}" for n in range(9)))
    sites = [await opened(listed) for _ in range(3)]
    await asyncio.gather(*map(look, sites))
    await asyncio.gather(*map(look, sites))
    assert len(listed.jobs) == POOL.count
    assert sum(name.startswith("pool.") for name in listed.names) == POOL.count


@pytest.mark.parametrize(
    ("left", "kept"),
    [([], False), ([READY], True), ([READY, "stop.job"], False), (["in.1.1.x"], True)],
)
async def test_what_has_not_started_at_the_end_of_a_run_is_cancelled(
    left: list[str], kept: bool
) -> None:
    """Unless jobs wait: the user left them, or another controller has sent them."""
    listed = Listed(READY, "pool.runs", "run.runs.other", runs=JobState(Phase.RUNNING))
    site = await opened(listed, replace(POOL, count=2, resources=ONE_CPU))
    await look(site)
    [queued] = listed.jobs.keys() - {"runs"}
    del listed.names[READY]
    listed.names |= dict.fromkeys(left, listed.clock)

    await site.close()

    assert (listed.jobs[queued].phase is Phase.WAITING) == kept
    assert listed.jobs["runs"].phase is Phase.RUNNING


async def test_what_was_sent_when_allocations_were_larger_is_sent_again() -> None:
    listed = Listed("ready.1.4.0.0.60.0.0.job")
    assert (await look(await opened(listed))).phase is Phase.UNKNOWN
    assert not listed.jobs
