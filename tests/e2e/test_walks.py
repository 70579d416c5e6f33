"""Much goes wrong at once in a few walks of real processes: a broken promise shows here first.

`make test-faults` tries each fault in each step, and walks at random.
"""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from tests.faults.faults import FAULTS
from tests.faults.walk import Break, End, Move, Walk, site_of_walks

FAULT = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with site_of_walks(tmp_path_factory.mktemp("walks")) as box:
        yield box


def broken(**kinds: str) -> tuple[Break, ...]:
    """Faults by the kind of requests that meet them."""
    return tuple(Break(FAULT[name], kind) for kind, name in kinds.items())


KILLED = [
    Move(
        broken(submit="lost-after-acting", upload="500-after-acting"),
        end=End(signal.SIGKILL, "submit", 2, "answered to nobody"),
    ),
    Move(broken(list="half-json"), end=End(signal.SIGKILL, "marker", 0, "answered to nobody")),
]
DETACHED = [
    Move(broken(list="404"), end=End(signal.SIGTERM, "list", 2)),
    Move(broken(marker="404", archive="cut", file="cut", store="cut")),
]
CANCELLED = [
    Move(
        broken(revoke="lost-after-acting", abort="lost-after-acting", list="503-of-the-site"),
        end=End(signal.SIGINT, "list", 2),
    ),
    Move(broken(make="lost-after-acting", submit="html-502-after-acting")),
]
UNHEARD = [
    Move(
        broken(
            make="404", upload="reset", submit="hang-after-acting", list="wrong-json",
            marker="login-page", archive="half-json", file="reset", transfer="500",
        )
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("moves", "api"),
    [
        pytest.param(KILLED, "unicore", id="killed"),
        pytest.param(DETACHED, "firecrest", id="detached"),
        pytest.param(CANCELLED, "unicore", id="cancelled", marks=pytest.mark.nightly),
        pytest.param(CANCELLED, "firecrest", id="cancelled-firecrest", marks=pytest.mark.nightly),
        pytest.param(UNHEARD, "firecrest", id="unheard", marks=pytest.mark.nightly),
    ],
)
def test_no_job_lost_doubled_or_misreported(
    api: str, moves: Sequence[Move], box: Sandbox, tmp_path: Path
) -> None:
    walk = Walk("these", api, moves, pace=1 if moves in (DETACHED, CANCELLED) else 0)
    walk.through(box, tmp_path)
    assert walk.ends == sum(move.end is not None for move in moves)
    assert walk.faults >= len(moves)
