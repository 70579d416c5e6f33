"""The promise in short: a few random schedules, which `make test-faults` plays in numbers."""

from collections.abc import Callable

import pytest

from tests.faults.test_schedules import play_seeds

SEEDS, BLOCK = range(60), 20


@pytest.mark.parametrize("first", SEEDS[::BLOCK])
def test_no_job_lost_doubled_or_misreported(
    first: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("schedules", dict(play_seeds(range(first, first + BLOCK))))
