"""How jobs end, and what is told of it: the engine believes the scheduler where no marker comes."""

import asyncio
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import SiteBusy, SiteRejected
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import JobState, Site, SiteFacts
from tests.sites.contract.steps import (
    a_job,
    ended,
    fate,
    running,
    until,
    until_explained,
    until_there,
    waiting,
)
from tests.support.benches import Bench
from tests.support.clusters import CLOSED, FRAGILE, kill_all


class TestEnds:
    """Each is explained soon, whatever `states` says meanwhile."""

    async def test_time_limit(self, bench: Bench, site: Site) -> None:
        resources = Resources(runtime_s=bench.cluster.shortest_s)
        job = await site.submit(a_job("exec sleep 300", resources))
        assert (await until_explained(site, job)).reason is Reason.TIME_LIMIT

    async def test_out_of_memory(self, site: Site) -> None:
        greedy = "x=$(head -c 300M /dev/zero | tr '\\0' x); sleep 300"
        resources = Resources(runtime_s=600, memory_mib_per_node=100)
        job = await site.submit(a_job(greedy, resources))
        assert (await until_explained(site, job)).reason is Reason.OUT_OF_MEMORY

    async def test_all_processes_killed(self, site: Site, facts: SiteFacts) -> None:
        script = f"echo $$ > '{facts.workspace}/new' && mv '{facts.workspace}'/{{new,pid}}\n"
        job = await site.submit(a_job(f"{script}sleep 300"))
        await until_there(site, "pid")
        kill_all(int((Path(facts.workspace) / "pid").read_text()))
        state = await until_explained(site, job)
        assert state.reason is Reason.UNKNOWN
        assert "signal 9" in state.detail

    async def test_out_of_memory_in_the_words_of_slurm(self, site: Site) -> None:
        """Slurm kills one process after the other; the batch script may end by itself."""
        words = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch"

        job = await site.submit(a_job(f"echo begun >&2; echo '{words}' >&2; kill -9 $$\n"))
        state = await until_explained(site, job)
        assert (state.reason, state.detail) == (Reason.OUT_OF_MEMORY, words)

    async def test_node_failure(self, bench: Bench, site: Site) -> None:
        resources = Resources(queue=FRAGILE, runtime_s=600)
        job = await site.submit(a_job("sleep 300", resources))
        state = await until(site, job, running)
        bench.cluster.fail_node(state.scheduler_id)
        explained = await until_explained(site, job)
        assert explained.reason is Reason.NODE_FAILURE
        assert explained.failed_node

    async def test_scancel_of_one_that_runs(self, bench: Bench, site: Site) -> None:
        job = await site.submit(a_job("exec sleep 300"))
        state = await until(site, job, running)
        bench.cluster.cancel(state.scheduler_id)
        assert (await until_explained(site, job)).reason is Reason.CANCELLED

    async def test_scancel_of_one_that_waits(self, bench: Bench, site: Site) -> None:
        job = await site.submit(a_job("exit 0", Resources(queue=CLOSED, runtime_s=600)))
        state = await until(site, job, waiting)
        bench.cluster.cancel(state.scheduler_id)
        assert (await until_explained(site, job)).reason is Reason.CANCELLED

    async def test_cancel_of_one_that_waits(self, site: Site) -> None:
        job = await site.submit(a_job("exit 0", Resources(queue=CLOSED, runtime_s=600)))
        await until(site, job, waiting)
        await site.cancel([job])
        assert (await until(site, job, ended)).reason is Reason.CANCELLED
        assert (await site.explain(job)).reason is Reason.CANCELLED
        await site.cancel([job])


class TestRefusals:
    """A job that the scheduler does not take is refused at once or after it was accepted."""

    async def test_for_good(self, site: Site) -> None:
        asked = (
            Resources(queue="no-such-queue", runtime_s=600),
            Resources(account="no-such-account", runtime_s=600),
            Resources(memory_mib_per_node=1 << 30, runtime_s=600),
        )
        fates = (fate(site, a_job("exit 0", resources)) for resources in asked)
        for result in await asyncio.gather(*fates):
            if isinstance(result, JobState):
                assert (result.reason, result.later) == (Reason.REJECTED, False)
                assert "sbatch" not in result.detail or "error" in result.detail
            else:
                assert isinstance(result, SiteRejected)

    async def test_for_now(self, bench: Bench, site: Site) -> None:
        with bench.cluster.full() as resources:
            result = await fate(site, a_job("exit 0", resources))
        if isinstance(result, JobState):
            assert (result.reason, result.later) == (Reason.REJECTED, True)
        else:
            assert isinstance(result, SiteBusy)
