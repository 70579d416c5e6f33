"""No job lost, doubled or misreported, and outputs whole, whatever comes: random schedules.

Each seed is a workflow that is started again and again until it is done, at one or two simulated
sites, while its schedule lets happen what `tests.support.schedules.KINDS` names. The engine and the
journal are the real ones; time, sites and the machine's own failures are simulated.

`MANTIK_SCHEDULES=100000` plays so many seeds, `MANTIK_SEEDS=17-17` these. A failure names its seed
and the kinds of misfortune that it takes.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.plays import Play
from tests.support.schedules import KINDS, OF_POOLS, Schedule, fewest
from tests.support.seeds import seeds

SEEDS = seeds(400, number="MANTIK_SCHEDULES")
BLOCK = 10

COUNTED = {
    ("edits", "same times", "purges", "copies", "two workflows", "tampers", "killed"): (
        "edits while jobs wait or run",
        "edits of equal size and time",
        "sweeps of a place",
        "copies that were refused",
        "takeovers",
        "controllers that were unlocked at once",
        "controllers that found another one leading",
        "other workflows that were refused",
        "outputs that stayed",
        "outputs that moved between places",
        "files changed by others",
        "segments that went on",
        "segments after a walltime or a kill",
    ),
    ("wrong listings",): ("wrong listings",),
    ("journals", "deaths"): ("journals lost or put back",),
    ("targets",): ("removals under a reader",),
    ("slow", "answers"): ("jobs that went to another site",),
    ("lost allocations",): ("jobs whose allocation ended",),
    ("refused allocations",): ("allocations that were refused",),
}
"""What depends on the moment, by the kinds of misfortune that alone may happen then."""


def play(schedule: Schedule) -> None:
    """Play a schedule; in memory where that is possible: power loss is simulated."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        Play(schedule, Path(directory) / "flow").run()


def fails(schedule: Schedule) -> bool:
    """Whether a schedule breaks the promise."""
    try:
        play(schedule)
    except Exception:  # noqa: BLE001 - any of them is one more way to fail
        return True
    return False


def play_seeds(
    seeds: range,
    record: Callable[[str, object], None],
    chosen: Callable[..., Schedule] = Schedule,
) -> None:
    """Play the schedules of seeds, and record their kinds of misfortune."""
    for seed in seeds:
        make = partial(chosen, seed)
        schedule = make()
        record("misfortunes", sorted(schedule.kinds))
        try:
            play(schedule)
        except Exception as error:
            error.add_note(f"seed {seed}, which takes {', '.join(fewest(make, fails))}")
            raise


@pytest.mark.parametrize("block", range(0, len(SEEDS), BLOCK))
def test_no_job_lost_doubled_or_misreported(
    block: int, record_property: Callable[[str, object], None]
) -> None:
    play_seeds(SEEDS[block : block + BLOCK], record_property)


@pytest.mark.parametrize("block", range(0, len(SEEDS), 2 * BLOCK))
def test_outputs_that_stay_and_move(
    block: int, record_property: Callable[[str, object], None]
) -> None:
    """Half as many, in which nearly each job reads what stays at its place or another one."""
    play_seeds(SEEDS[block : block + BLOCK], record_property, partial(Schedule, moving=True))


@pytest.mark.parametrize("block", range(0, len(SEEDS), 2 * BLOCK))
def test_jobs_of_pools(block: int, record_property: Callable[[str, object], None]) -> None:
    """Half as many, in which most jobs run in allocations of a pool."""
    play_seeds(SEEDS[block : block + BLOCK], record_property, partial(Schedule, pools=True))


@pytest.mark.parametrize("kept", COUNTED, ids=" and ".join)
def test_what_is_counted_happens(kept: tuple[str, ...]) -> None:
    """It must not become something that no seed meets any more."""
    lacking = set(COUNTED[kept])
    for seed in range(200):
        without = [kind for kind in (*KINDS, *OF_POOLS) if kind not in kept]
        schedule = Schedule(seed, without, pools=kept[0] in OF_POOLS)
        play(schedule)
        lacking -= (+schedule.happened).keys()
        if not lacking:
            return
    pytest.fail(f"no seed meets {lacking}")
