"""Waiting for other jobs, in the queue, and running are told apart, the same in every view."""

import json
from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.journal import Times, TryRecord, TryState, turn_of
from snakemake_executor_plugin_mantik.views.workflow import overview_jobs

MAKER = TryRecord(
    id="m", site="hpc1", bucket=0, job="m", rule="m", name="m", fingerprint="f",
    state=TryState.SUBMITTED, created=90.0, submitted=100.0, started=130.0,
)  # fmt: skip
AHEAD = replace(
    MAKER, id="a", job="a", rule="a", name="a", created=95.0, submitted=101.0, started=None,
    after=json.dumps({"m.txt": "m"}),
)  # fmt: skip
ENDED = replace(
    MAKER, state=TryState.DONE, outcome="succeeded", finished=460.0, waited=30.0, ran=300.0,
    used=json.dumps({"ended": 430.0}),
)  # fmt: skip


def views(*records: TryRecord, now: float) -> tuple[object, ...]:
    """How long the last one waited for other jobs and in the queue: in `jobs`, and in pictures."""
    job = overview_jobs(records, controlled=True)[-1]
    assert job.submitted == 101.0
    return job.waited_for_jobs(now), job.waited(now), job.queued_s(now)


def test_a_job_that_waits_for_others_is_not_in_the_queue_yet() -> None:
    assert views(MAKER, AHEAD, now=200.0) == (99.0, None, None)


def test_its_turn_comes_when_those_have_ended() -> None:
    """Not when somebody notices that."""
    assert turn_of([ENDED]) == 430.0
    assert views(ENDED, AHEAD, now=500.0) == (329.0, 70.0, 70.0)


def test_what_is_told_at_the_end() -> None:
    times = Times(waited=399.0, ran=10.0, ended=510.0).after(101.0, turn_of([ENDED]))
    assert (times.behind, times.waited) == (329.0, 70.0)
    over = replace(
        AHEAD, state=TryState.DONE, outcome="succeeded", finished=600.0, waited=times.waited,
        ran=10.0, used=json.dumps({"ended": 510.0, "behind": times.behind}),
    )  # fmt: skip
    assert views(ENDED, over, now=9000.0) == (329.0, 70.0, 70.0)
    job = overview_jobs((ENDED, over), controlled=True)[-1]
    assert "waited 5 min 29 s for other jobs" in job.title(9000.0)


@pytest.mark.parametrize("turn", [None, 50.0])
def test_a_job_that_waited_for_none(turn: float | None) -> None:
    times = Times(waited=20.0, ran=10.0).after(100.0, turn)
    assert (times.waited, times.behind or 0.0) == (20.0, 0.0)
