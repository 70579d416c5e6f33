"""How long a job waited and ran, whatever the clocks show and whenever somebody looks."""

import time
from dataclasses import replace
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.engine.attempt import Attempt
from snakemake_executor_plugin_mantik.engine.evidence import ClaimOwner, Evidence, Finding
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import Times, TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase

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
    times = attempt.times(Marker(0, started=started, ended=started + 8.0))
    assert (times.waited, times.ran, times.told_by) == (20.0, 8.0, "")
    assert times.ended == pytest.approx(submitted + 28.0)


@pytest.mark.parametrize("differs", [-1.0, -30.0])
def test_a_node_that_is_a_little_behind_did_not_wait(differs: float) -> None:
    now = time.time()
    marker = Marker(0, started=now - 10 + differs, ended=now + differs)
    times = Attempt(RECORD, [], now - 10, 1, now - 10).times(marker)
    assert (times.waited, times.ran) == (0.0, 10.0)


@pytest.mark.parametrize("differs", [-7 * 3600.0, -120.0, 120.0, 7 * 3600.0])
def test_a_node_with_another_clock_tells_nothing(differs: float) -> None:
    now = time.time()
    marker = Marker(0, started=now - 10 + differs, ended=now + differs)
    assert Attempt(RECORD, [], now - 10, 1, now - 10).times(marker) == Times(ran=10.0)


def test_what_nobody_acknowledged_is_not_known() -> None:
    now = time.time()
    marker = Marker(0, started=now, ended=now + 1)
    assert Attempt(RECORD, [], now - 10, 1).times(marker) == Times(ran=1.0)
    assert Attempt(RECORD, [], now - 10, 1, now - 10).times(Marker(0, bare=True)) == Times()


def ended(**end: Any) -> Times:
    """The times of a job that was submitted two days ago, waited for 20 s, and reported nothing."""
    submitted = time.time() - 2 * DAY_S
    attempt = Attempt(RECORD, [], submitted, 1, submitted + 3600.0)
    state, began = JobState(Phase.ENDED, Reason.OUT_OF_MEMORY, **end), submitted + 3620.0
    attempt.end = Evidence(
        Finding.ENDED, state=state, owner=ClaimOwner("", "7", began), beat=began + 13.0
    )
    found = attempt.times(None)
    assert found.ended is None or found.ended == pytest.approx(
        submitted + (found.waited or 0.0) + (found.ran or 0.0)
    )
    return replace(found, ended=None, waited=found.waited and round(found.waited, 3))


def test_a_job_without_a_report_ran_until_its_last_heartbeat() -> None:
    assert ended() == Times(20.0, 13.0, told_by="heartbeat")


def test_what_the_scheduler_counts_is_what_a_site_bills() -> None:
    assert ended(ran=17.0) == Times(20.0, 17.0, told_by="scheduler")
    assert ended(ran=17.0, starts_after=19.0) == Times(19.0, 17.0, told_by="scheduler")
