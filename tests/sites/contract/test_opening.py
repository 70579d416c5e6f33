"""Opening a site."""

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteUnauthorized, SiteUnreachable
from snakemake_executor_plugin_mantik.sites.base import Site, SiteFacts
from tests.sites.contract.steps import a_job, content, ended, running, until
from tests.support.benches import Bench, in_use, open_and_close


class TestOpening:
    async def test_tells_where_jobs_find_the_workspace(self, site: Site, facts: SiteFacts) -> None:
        assert facts.workspace.startswith("/")
        assert facts.server
        await site.put("in.txt", b"from here")
        job = await site.submit(a_job(f"cd '{facts.workspace}' && cat in.txt > out.txt"))
        await until(site, job, ended)
        assert await content(site, "out.txt") == b"from here"

    async def test_tells_who_runs_jobs_and_what_queues_allow(self, facts: SiteFacts) -> None:
        assert facts.user
        for limits in facts.queues.values():
            ranges = (limits.runtime_s, limits.nodes, limits.memory_mib_per_node,
                      limits.gpus_per_node)  # fmt: skip
            assert all(0 <= r[0] <= r[1] for r in ranges if r is not None)

    async def test_closing_changes_nothing_at_the_site(self, bench: Bench) -> None:
        async with in_use(bench.site()) as site:
            await site.open()
            await site.put("kept", b"1")
            job = await site.submit(a_job("exec sleep 300"))
            await until(site, job, running)
        async with in_use(bench.site()) as site:
            for _ in range(2):
                await site.open()
            await until(site, job, running)  # its record may say otherwise for a moment
            assert await content(site, "kept") == b"1"
            await site.cancel([job])

    async def test_with_credentials_that_are_wrong(self, bench: Bench) -> None:
        with pytest.raises(SiteUnauthorized):
            await open_and_close(bench.stranger())

    async def test_with_a_server_that_is_away(self, bench: Bench) -> None:
        with pytest.raises(SiteUnreachable):
            await open_and_close(bench.away())
