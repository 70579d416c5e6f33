"""A claim is a file, a revocation a directory of the same name: they exclude each other."""

import asyncio

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.sites.base import Site
from tests.sites.contract.steps import content, refused


class TestClaims:
    """A claim is a file, a revocation a directory of the same name: they exclude each other."""

    async def test_directory_over_a_file(self, site: Site) -> None:
        await site.put("tries/claim", b"1")
        with pytest.raises(SiteRejected):
            await site.make_directory("tries/claim")
        assert await content(site, "tries/claim") == b"1"

    async def test_directory_with_its_parents(self, site: Site) -> None:
        await site.make_directory("new/tries/claim")
        entry = await site.stat("new/tries/claim")
        assert entry is not None
        assert (entry.name, entry.size, entry.directory) == ("claim", 0, True)
        assert await site.list("new/tries/claim") == {}

    async def test_file_over_a_directory(self, site: Site) -> None:
        await site.make_directory("tries/claim")
        await site.make_directory("tries/claim")
        with pytest.raises(SiteRejected):
            await site.put("tries/claim", b"1")
        assert (await site.list("tries"))["claim"].directory

    async def test_nothing_below_a_file(self, site: Site) -> None:
        await site.put("tries/claim", b"1")
        await refused(site.make_directory("tries/claim/below"), site.put("tries/claim/below", b"1"))
        assert await site.stat("tries/claim/below") is None
        assert await content(site, "tries/claim") == b"1"

    async def test_one_of_both_at_the_same_time(self, site: Site) -> None:
        for number in range(5):
            path = f"tries/{number}"
            acts = site.put(path, b"1"), site.make_directory(path)
            results = await asyncio.gather(*acts, return_exceptions=True)
            (loser,) = [result for result in results if result is not None]
            assert isinstance(loser, SiteRejected)
            entry = await site.stat(path)
            assert entry is not None
            assert entry.directory is (results[1] is None)
