"""How long a job waited and ran, whatever the clocks show and whenever somebody looks."""

import time

import pytest

from snakemake_executor_plugin_mantik.engine.attempt import Attempt
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState

RECORD = TryRecord(
    id="try", site="sim", bucket=0, job="j", rule="r", name="r", fingerprint="f",
    state=TryState.SUBMITTED,
)  # fmt: skip
DAY_S = 86400.0


@pytest.mark.parametrize("off", [0.0, -5 * 3600.0, 9 * 3600.0])
@pytest.mark.parametrize("away", [0.0, 60.0, 3 * DAY_S])
def test_the_sites_clock_tells_how_long_a_job_waited(off: float, away: float) -> None:
    """However late the end is noticed, and however far the site's clock is off."""
    now = time.time()
    submitted = now - 20.0 - 8.0 - away
    attempt = Attempt(RECORD, [], submitted, 1, submitted + off)
    started = submitted + 20.0 + off
    assert attempt.times(Marker(0, started=started, ended=started + 8.0)) == (20.0, 8.0)


@pytest.mark.parametrize("differs", [-1.0, -30.0])
def test_a_node_that_is_a_little_behind_did_not_wait(differs: float) -> None:
    now = time.time()
    marker = Marker(0, started=now - 10 + differs, ended=now + differs)
    assert Attempt(RECORD, [], now - 10, 1, now - 10).times(marker) == (0.0, 10.0)


@pytest.mark.parametrize("differs", [-7 * 3600.0, -120.0, 120.0, 7 * 3600.0])
def test_a_node_with_another_clock_tells_nothing(differs: float) -> None:
    now = time.time()
    marker = Marker(0, started=now - 10 + differs, ended=now + differs)
    assert Attempt(RECORD, [], now - 10, 1, now - 10).times(marker) == (None, 10.0)


def test_what_nobody_acknowledged_is_not_known() -> None:
    now = time.time()
    assert Attempt(RECORD, [], now - 10, 1).times(Marker(0, started=now, ended=now + 1))[0] is None
    assert Attempt(RECORD, [], now - 10, 1, now - 10).times(Marker(0, bare=True)) == (None, 0.0)
