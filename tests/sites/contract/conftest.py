"""The sites that the suite is held against."""

import pytest

from snakemake_executor_plugin_mantik.sites.base import Site
from tests.support.benches import BENCHES, Bench


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest) -> Bench:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Bench)
    return found


@pytest.fixture
def made(bench: Bench) -> Site:
    return bench.site()
