"""The fault matrix with the centre's real servers behind the proxy: the same tests, other servers.

Only faults that let the server act are tried: of the others no server knows. Every second cell is
enough, so that each fault meets each step at one of the APIs: the sandboxes' matrix is complete.
Not tried here: full disks and clocks that are off, which are the machine's that the tests run on;
and transfers, since nothing here is too large for a real firecREST to take directly.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.faults import test_matrix
from tests.faults.cell import CHAINED, Cell, cell_at
from tests.faults.faults import FAULTS, Fault
from tests.faults.test_matrix import KILLS, Prove, prove
from tests.real.centre import Centre, firecrest, open_directory, tsi
from tests.real.centre.firecrest import Firecrest
from tests.support.unicoreserver import UnicoreX
from tests.support.workflows import Place

pytestmark = pytest.mark.timeout(900)

SOFTWARE = {"unicore": tsi.SOFTWARE, "firecrest": firecrest.SOFTWARE}
REACHING = [
    fault
    for fault in FAULTS
    if "after-acting" in fault.name or "json" in fault.name or "drip" in fault.name
    or fault.name == "cut"
]  # fmt: skip


def every_second(*steps: str) -> pytest.MarkDecorator:
    """Each fault in each of `steps`, at one API, the other one for its neighbours."""
    cells: Sequence[tuple[tuple[int, Fault], tuple[int, str], tuple[int, str]]] = list(
        product(enumerate(REACHING), enumerate(steps), enumerate(SOFTWARE))
    )
    return pytest.mark.parametrize(
        ("fault", "step", "api"),
        [
            pytest.param(
                fault, step, api,
                id=f"{fault.name}-{step}-{api}", marks=pytest.mark.software(SOFTWARE[api]),
            )
            for (i, fault), (j, step), (k, api) in cells
            if (i + j + k) % 2 == 0
        ],
    )  # fmt: skip


ONE_AT_A_TIME = "Queue: devel\n  CPUsPerNode: 16\n"
"""Resources that let the centre run one of the jobs after the other."""

__all__ = ["prove"]


@pytest.fixture(autouse=True)
def _servers(
    centre: Centre,
    tsi_unicorex: UnicoreX,
    real_firecrest: Firecrest,
    unicore_centre_place: Place,
    firecrest_centre_place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Put a real server where the matrix makes a sandbox for each cell."""
    sites: dict[str, tuple[Place, str, Path | None]] = {
        "unicore": (unicore_centre_place, tsi_unicorex.url, tsi_unicorex.ca_file),
        "firecrest": (firecrest_centre_place, real_firecrest.url, None),
    }

    @contextmanager
    def make_cell(api: str, directory: Path, *, slots: int = 2) -> Iterator[Cell]:
        place, url, ca_file = sites[api]
        if slots == 1:
            place = replace(place, config=place.config.replace("Queue: batch\n", ONE_AT_A_TIME))
        cells: list[Cell] = []

        def alive() -> list[Any]:
            tries = cells[0].project.tries
            return centre.queued(job for each in tries for job in each.site_jobs)

        with (
            open_directory() as outside,
            cell_at(api, place, url, directory, alive, ca_file=ca_file, outside=outside) as cell,
        ):
            cells.append(cell)
            try:
                yield cell
            finally:
                cell.open_gate()  # so that jobs of a test that has failed keep no places

    monkeypatch.setattr(test_matrix, "make_cell", make_cell)


@every_second("stage", "submit", "fetch")
def test_fault(fault: Fault, step: str, api: str, tmp_path: Path, prove: Prove) -> None:
    test_matrix.test_fault(fault, step, api, tmp_path, prove)


@every_second("watch", "cancel")
def test_fault_at_jobs(fault: Fault, step: str, api: str, tmp_path: Path, prove: Prove) -> None:
    if step == "watch":
        test_matrix.test_fault_while_watching(fault, api, tmp_path, prove)
    else:
        test_matrix.test_fault_while_cancelling(fault, api, tmp_path, prove)


ALLOWED = [k for k in KILLS if not any(f"-{kind}-" in str(k.id) for kind in CHAINED)]
"""In pairs: before a request, and after it."""
ONE_OF_EACH_PAIR = {"unicore": {0, 3}, "firecrest": {1, 2}}
"""Of four kills in a row, those that an API meets: the other API meets the others."""


@pytest.mark.parametrize(
    ("api", "when"),
    [
        pytest.param(*kill.values, id=str(kill.id), marks=pytest.mark.software(SOFTWARE[api]))
        for api, chosen in ONE_OF_EACH_PAIR.items()
        for number, kill in enumerate(k for k in ALLOWED if k.values[0] == api)
        if number % 4 in chosen
    ],
)
def test_controller_killed(
    api: str, when: tuple[str, str, bool], tmp_path: Path, prove: Prove
) -> None:
    test_matrix.test_controller_killed(api, when, tmp_path, prove)
