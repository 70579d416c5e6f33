"""Who holds a claim, as the controller reads it."""

import pytest

from snakemake_executor_plugin_mantik.engine import evidence
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from tests.support.simulated import Fate, SimulatedSite, World
from tests.support.virtualtime import run

RECORD = TryRecord("t1", "sim", 0, "job", "train", "train", "f", TryState.SUBMITTED)
CLAIM = b"owner=n1-77\nsite_job=42\nscheduler_job=1234\nhost=n1\n"


def owner(content: bytes | None) -> evidence.ClaimOwner | None:
    world = World(lambda _: Fate(), lambda _: 1.0)
    if content is not None:
        world.files[RECORD.paths.claim] = content
    return run(evidence.read_owner(SimulatedSite(world), RECORD))


def test_the_job_that_it_names_holds_it_however_often_it_has_beaten() -> None:
    assert owner(CLAIM) == owner(CLAIM + b"....") == evidence.ClaimOwner("42", "1234")


@pytest.mark.parametrize("shown", range(len(CLAIM)))
def test_a_slow_file_system_shows_a_part_of_it(shown: int) -> None:
    """1234 is not 12: whoever is taken for the owner by half a number would end the try."""
    assert owner(CLAIM[:shown]) is None


def test_there_is_none() -> None:
    assert owner(None) is None
