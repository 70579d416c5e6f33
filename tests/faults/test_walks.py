"""No job lost, doubled or misreported, whatever comes: random walks of real processes.

`MANTIK_REAL_SCHEDULES=200` walks so many seeds, `MANTIK_REAL_SEEDS=17-17` these.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.sandbox.settings import SiteOption
from tests.faults.cell import cell_in, settings
from tests.faults.walk import SNAKEFILE, Walk
from tests.support.seeds import seeds

pytestmark = pytest.mark.timeout(900)

WALKS = 12


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """One for all walks of a worker, which come one after the other and leave nothing running."""
    sites = [SiteOption("unicore"), SiteOption("firecrest", "firecrest")]
    with Sandbox(tmp_path_factory.mktemp("walks"), sites, settings(slots=3)) as box:
        yield box


@pytest.mark.parametrize("seed", seeds(WALKS, "MANTIK_REAL_SEEDS", number="MANTIK_REAL_SCHEDULES"))
def test_no_job_lost_doubled_or_misreported(
    seed: int, box: Sandbox, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    walk = Walk(seed)
    with cell_in(box, walk.api, walk.api, tmp_path, snakefile=SNAKEFILE) as cell:
        try:
            count = walk.play(cell)
        except AssertionError as error:
            error.add_note(str(walk))
            raise
        wrong = (len(count.lost), len(count.doubled), len(count.misreported))
        record_property("walk", (count.jobs, *wrong, walk.ends, walk.faults))
        assert not count.wrong, f"{count.wrong}\n{walk}\n{cell.outputs()}"
