"""The fault matrix with the centre's real servers behind the proxy: the same tests, other servers.

Only faults that let the server act are tried: of the others no server knows. Every second cell is
enough, so that each fault meets each step at one of the APIs; CI tries a few of them.
Not tried here: full disks and clocks that are off, which are the machine's that the tests run on;
and transfers, since nothing here is too large for a real firecREST to take directly.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import test_matrix
from tests.faults.cell import CHAINED, Cell, cell_at
from tests.faults.faults import FAULTS, Fault
from tests.faults.test_matrix import KILLED_AT, MET_AT, Prove, kills, prove
from tests.real.centre import Centre, firecrest, open_directory, tsi
from tests.real.centre.firecrest import Firecrest
from tests.support.unicoreserver import UnicoreX
from tests.support.workflows import Place

SOFTWARE = {"unicore": tsi.SOFTWARE, "firecrest": firecrest.SOFTWARE}
REACHING = [
    fault
    for fault in FAULTS
    if "after-acting" in fault.name or "json" in fault.name or "drip" in fault.name
    or fault.name == "cut"
]  # fmt: skip


CELLS = [
    (fault, step, api)
    for i, fault in enumerate(REACHING)
    for j, step in enumerate(MET_AT)
    for k, api in enumerate(SOFTWARE)
    if (i + j + k) % 2 == 0
]
"""Each fault in each step, at one API, the other one for its neighbours."""
DEATHS = [
    (step, kind, when, api)
    for i, (step, kind) in enumerate(KILLED_AT)
    if kind not in CHAINED
    for j, (_, _, when, api) in enumerate(kills(step, kind))
    if (i + j + j // 2) % 2 == 0
]
"""In turn before a request and after it, and the other way round at the other API."""
IN_CI = {
    "500-after-acting-stage-unicore",
    "lost-after-acting-submit-unicore",
    "hang-after-acting-watch-firecrest",
    "cut-fetch-firecrest",
    "half-json-cancel-firecrest",
    "submit-submit-after-firecrest",
    "watch-list-before-firecrest",
    "cancel-abort-before-unicore",
}
"""The cells that are no matter of `make nightly` alone."""


def marked(cells: Sequence[tuple[Any, ...]]) -> "list[Any]":
    """Cells as parameters; the last word of each is the API."""
    return [
        pytest.param(
            *cell, id=(name := "-".join(map(str, cell))),
            marks=[
                pytest.mark.software(SOFTWARE[cell[-1]]),
                *([] if name in IN_CI else [pytest.mark.nightly]),
            ],
        )
        for cell in cells
    ]  # fmt: skip


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
    def make_cell(
        api: str, directory: Path, *, slots: int = 2, pool: bool = False
    ) -> Iterator[Cell]:
        assert not pool, "the ids of a pool's jobs are not the scheduler's"
        place, url, ca_file = sites[api]
        if slots == 1:
            place = replace(place, config=place.config.replace("Queue: batch\n", ONE_AT_A_TIME))
        cells: list[Cell] = []

        def alive() -> list[Any]:
            attempts = cells[0].project.attempts
            return centre.queued(job for each in attempts for job in each.site_jobs)

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


@pytest.mark.parametrize(("fault", "step", "api"), marked(CELLS))
def test_fault(fault: Fault, step: str, api: str, tmp_path: Path, prove: Prove) -> None:
    test_matrix.test_fault(fault, step, api, tmp_path, prove)


@pytest.mark.parametrize(("step", "kind", "when", "api"), marked(DEATHS))
def test_controller_killed(
    step: str, kind: str, when: str, api: str, tmp_path: Path, prove: Prove
) -> None:
    test_matrix.test_controller_killed(step, kind, when, api, tmp_path, prove)
