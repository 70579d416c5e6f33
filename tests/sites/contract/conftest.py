"""The sites that the suite is held against."""

import pytest

from tests.support.benches import BENCHES, Bench


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest) -> Bench:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Bench)
    return found
