"""No job lost, doubled or misreported, whatever comes: random walks of real processes.

`MANTIK_REAL_SCHEDULES=200` walks so many seeds, `MANTIK_REAL_SEEDS=17-17` these.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from tests.faults.walk import site_of_walks, walk_of
from tests.support.seeds import seeds

WALKS = 12


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with site_of_walks(tmp_path_factory.mktemp("walks")) as box:
        yield box


@pytest.mark.parametrize("seed", seeds(WALKS, "MANTIK_REAL_SEEDS", number="MANTIK_REAL_SCHEDULES"))
def test_no_job_lost_doubled_or_misreported(seed: int, box: Sandbox, tmp_path: Path) -> None:
    walk_of(seed).through(box, tmp_path)
