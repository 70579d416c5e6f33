"""The fault matrix with a real UNICORE/X behind the proxy: the same tests, another server.

Only faults that let the server act are tried: of the others no server knows.
Not tried here: full disks and clocks that are off, which are the machine's that the tests run on.
Cancelling is the sandbox's to show: this server only says that a job has ended and lets it run on,
which `test_unicorex.py` tries.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import test_matrix
from tests.faults.cell import Cell, cell_at
from tests.faults.faults import FAULTS, Fault
from tests.faults.test_matrix import KILLS, Prove, prove
from tests.support.places import unicorex_place
from tests.support.unicoreserver import UnicoreX
from tests.support.unicorex import SOFTWARE

pytestmark = [pytest.mark.software(SOFTWARE), pytest.mark.timeout(600)]

API = "unicore"
REACHING = [
    pytest.param(fault, id=fault.name)
    for fault in FAULTS
    if "after-acting" in fault.name or "json" in fault.name or "drip" in fault.name
    or fault.name == "cut"
]  # fmt: skip
GOES_ON = {"READY", "STAGINGIN", "QUEUED", "RUNNING", "STAGINGOUT"}

__all__ = ["prove"]


@pytest.fixture
def narrow() -> bool:
    """Whether the server has room for one job only."""
    return False


@pytest.fixture(autouse=True)
def _server(request: pytest.FixtureRequest, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the real server where the matrix makes a sandbox for each cell."""
    server = request.getfixturevalue("narrow_unicorex" if narrow else "unicorex")

    @contextmanager
    def make_cell(api: str, directory: Path, *, slots: int = 2) -> Iterator[Cell]:
        with real_cell(server, directory) as cell:
            yield cell

    monkeypatch.setattr(test_matrix, "make_cell", make_cell)


@contextmanager
def real_cell(server: UnicoreX, directory: Path) -> Iterator[Cell]:
    place = unicorex_place(server)

    def alive() -> list[str]:
        jobs = (job for each in cell.project.tries for job in each.site_jobs)
        return [job for job in jobs if server.status(job) in GOES_ON]

    cells = cell_at(API, place, server.url, directory, alive, ca_file=server.ca_file)
    with cells as cell:
        try:
            yield cell
        finally:
            cell.open_gate()  # so that jobs of a test that has failed keep no places


@pytest.mark.parametrize("step", ["stage", "submit", "fetch"])
@pytest.mark.parametrize("fault", REACHING)
def test_fault(fault: Fault, step: str, tmp_path: Path, prove: Prove) -> None:
    test_matrix.test_fault(fault, step, API, tmp_path, prove)


@pytest.mark.parametrize("narrow", [True])
@pytest.mark.parametrize("fault", REACHING)
def test_fault_while_watching(fault: Fault, tmp_path: Path, prove: Prove) -> None:
    test_matrix.test_fault_while_watching(fault, API, tmp_path, prove)


@pytest.mark.parametrize(
    ("api", "when"), [k for k in KILLS if k.values[0] == API and "-cancel-" not in str(k.id)]
)
def test_controller_killed(
    api: str, when: tuple[str, str, bool], tmp_path: Path, prove: Prove
) -> None:
    test_matrix.test_controller_killed(api, when, tmp_path, prove)
