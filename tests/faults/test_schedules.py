"""No job lost, doubled or misreported, and outputs whole, whatever comes: random schedules.

Each seed is a workflow that is started again and again until it is done, at one or two simulated
sites, while its schedule lets happen what `tests.support.schedules.KINDS` names. The engine and the
journal are the real ones; time, sites and the machine's own failures are simulated.

`MANTIK_SCHEDULES=100000` plays so many seeds, `MANTIK_SEEDS=17-17` these. A failure names its seed
and the kinds of misfortune that it takes.
"""

import tempfile
from pathlib import Path

import pytest

from tests.support.plays import Play
from tests.support.schedules import Schedule, fewest
from tests.support.seeds import seeds

SEEDS = seeds(400, number="MANTIK_SCHEDULES")
BLOCK = 50


def play(schedule: Schedule) -> None:
    """Play a schedule; in memory where that is possible: power loss is simulated."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        Play(schedule, Path(directory)).run()


def fails(schedule: Schedule) -> bool:
    """Whether a schedule breaks the promise."""
    try:
        play(schedule)
    except Exception:  # noqa: BLE001 - any of them is one more way to fail
        return True
    return False


@pytest.mark.parametrize("block", range(0, len(SEEDS), BLOCK))
def test_no_job_lost_doubled_or_misreported(block: int) -> None:
    for seed in SEEDS[block : block + BLOCK]:
        try:
            play(Schedule(seed))
        except Exception as error:
            error.add_note(f"seed {seed}, which takes {', '.join(fewest(seed, fails))}")
            raise
