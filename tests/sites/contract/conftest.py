"""The sites that the suite is held against."""

from collections.abc import AsyncIterator

import pytest

from snakemake_executor_plugin_mantik.sites.base import Site, SiteFacts
from tests.support.benches import BENCHES, Bench


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest) -> Bench:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Bench)
    return found


@pytest.fixture
async def opened(bench: Bench) -> AsyncIterator[tuple[Site, SiteFacts]]:
    """A site that is open, and what it tells when it opens."""
    made = bench.site()
    try:
        yield made, await made.open()
    finally:
        await made.close()


@pytest.fixture
def site(opened: tuple[Site, SiteFacts]) -> Site:
    return opened[0]


@pytest.fixture
def facts(opened: tuple[Site, SiteFacts]) -> SiteFacts:
    return opened[1]
