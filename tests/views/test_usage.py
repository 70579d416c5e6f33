"""Advice on what to request next time."""

import json
from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.jobs.pools import Allocation
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState, Times, turn_of
from snakemake_executor_plugin_mantik.views.usage import (
    PoolUsage,
    RuleUsage,
    usage_by_pool,
    usage_by_rule,
)
from snakemake_executor_plugin_mantik.views.workflow import overview_jobs

NOW = 1_795_000_000.0
GIB = 1 << 30

JOB = AttemptRecord(
    "", "hpc1", 1, "", "train", "train", "f", AttemptState.DONE, "succeeded", created=NOW,
    submitted=NOW, finished=NOW + 4000, waited=60.0, ran=3600.0, runtime=7200.0,
    asked=json.dumps({"cores": 4, "memory_mib": 8192}),
    used=json.dumps({"cpu_s": 4 * 3000, "memory_bytes": 6 * GIB}),
)  # fmt: skip


def usage(*records: AttemptRecord, members: int = 0) -> RuleUsage:
    """The usage of a rule's attempts, each of a job of its own unless it has one."""
    attempts = tuple(
        replace(record, id=f"{n}", job=record.job or f"job {n}") for n, record in enumerate(records)
    )
    groups = {one.id: tuple(f"{n}" for n in range(members)) for one in attempts if members}
    [found] = usage_by_rule(overview_jobs(attempts, controlled=False, members=groups), NOW)
    return found


def advised(*records: AttemptRecord, members: int = 0) -> dict[str, int]:
    return {a.resource: a.value for a in usage(*records, members=members).advice}


def used(record: AttemptRecord = JOB, /, *, gib: float = 6.0, **more: object) -> AttemptRecord:
    values = json.dumps({"cpu_s": 12_000, "memory_bytes": int(gib * GIB)})
    return replace(record, used=values, **more)  # type: ignore[arg-type]  # fields of an attempt


def test_what_fits_needs_no_advice() -> None:
    found = usage(JOB, JOB, JOB)
    assert (found.advice, found.remarks) == ((), ())
    assert (found.cores, found.memory, found.walltime) == (4, 8 * GIB, 7200)
    assert (found.memory_used, found.longest, found.queued) == (6 * GIB, 3600, 60)
    assert found.cores_used == pytest.approx(12_000 / 3600)
    assert found.cpu_share == pytest.approx(12_000 / (4 * 3600))
    assert found.core_hours == {"hpc1": 12.0}


def test_less_is_advised_only_after_enough_jobs() -> None:
    small = used(gib=1.5, ran=600.0)
    assert advised(small, small) == {}
    # 1.8 GiB and 750 s, rounded up.
    assert advised(small, small, small) == {"mem_mb": 2048, "runtime": 15}
    assert advised(small, small, used(gib=4)) == {}, "the most counts"
    failed = replace(small, outcome="failed: it", reason="exit_code")
    assert advised(small, small, failed) == {}
    tiny = used(gib=0.01, ran=1.0)
    assert advised(tiny, tiny, tiny) == {"mem_mb": 256, "runtime": 10}
    demo = used(
        gib=0.08, ran=400.0, runtime=600.0, asked=json.dumps({"cores": 1, "memory_mib": 1000})
    )
    assert advised(demo, demo, demo) == {"mem_mb": 256}


def test_one_job_near_a_limit_is_enough_for_more() -> None:
    assert advised(used(gib=7.5)) == {"mem_mb": 9216}
    assert advised(replace(JOB, ran=6900.0)) == {"runtime": 150}


def test_a_job_that_had_too_little_gets_more_than_its_first_attempt() -> None:
    died = used(gib=7, job="a", outcome="failed: it", reason="out_of_memory")
    more = json.dumps({"memory_mib": 16_384})
    again = replace(used(gib=10), job="a", asked=more)
    assert advised(died) == {"mem_mb": 12_288}
    assert advised(died, again) == {"mem_mb": 12_288}
    assert "ran out of memory" in usage(died, again).advice[0].words
    late = replace(JOB, outcome="failed: it", reason="time_limit", ran=7200.0)
    assert advised(late) == {"runtime": 180}


def test_what_is_not_seen_as_a_whole_is_not_judged() -> None:
    small = used(gib=1, ran=10.0)
    assert advised(small, small, small, members=2) == {}
    wide = replace(small, asked=json.dumps({"memory_mib": 8192, "nodes": 2}))
    assert advised(wide, wide, wide) == {"runtime": 10}
    segment = replace(small, segments=10)
    assert advised(segment, segment, segment) == {"mem_mb": 1536}
    unknown = replace(JOB, asked="", used="", runtime=None)
    assert advised(unknown, unknown, unknown) == {}
    assert usage(unknown).core_hours == {"hpc1": None}


def test_memory_per_cpu_stays_per_cpu() -> None:
    asked = json.dumps({"cores": 4, "memory_mib": 8192, "memory_mib_per_cpu": 2048})
    small = replace(used(gib=1), asked=asked)
    assert advised(small, small, small) == {"mem_mb_per_cpu": 384}


def test_idle_cores_are_remarked() -> None:
    idle = replace(JOB, used=json.dumps({"cpu_s": 3600.0, "memory_bytes": 6 * GIB}))
    assert "at most 1.0 of 4 cores busy" in usage(idle, idle, idle).remarks[0]
    assert usage(idle, idle).remarks == ()
    gpu = replace(JOB, used=json.dumps({"gpu_busy": 4.2}))
    assert "busy for at most 4 %" in usage(gpu, gpu, gpu).remarks[0]
    assert usage(gpu, gpu, replace(gpu, used=json.dumps({"gpu_busy": 80}))).remarks == ()


HAD = Allocation("a", "hpc1", "small", "7", 48, NOW, NOW, seconds=3600, used=24 * 3600)


def usage_of(*allocations: Allocation, jobs: int = 0) -> PoolUsage:
    there = [
        replace(JOB, id=f"{n}", job=f"{n}", state=AttemptState.SUBMITTED, outcome="", started=NOW,
                site_jobs=(f"pool.small.{n}",))
        for n in range(jobs)
    ]  # fmt: skip
    [found] = usage_by_pool(allocations, overview_jobs(there, controlled=True))
    return found


def test_allocations_of_a_pool_add_up() -> None:
    """Of the second, an agent on another node has told that it had no job at all."""
    found = usage_of(HAD, replace(HAD, tag="b", seconds=7200), jobs=3)
    assert (found.used, found.idle) == (48.0, 96.0)
    assert (found.running, found.queued, found.jobs_running) == (2, 0, 3)
    assert found.words == (
        "hpc1, pool small: 2 allocations running, 0 queued; 3 jobs running, 0 waiting;"
        " 48 core hours used, 96 idle"
    )


def test_without_jobs_nobody_knows_whether_an_allocation_still_runs() -> None:
    assert usage_of(HAD).running == 0


def test_an_idle_pool_is_remarked() -> None:
    assert not usage_of(replace(HAD, used=25 * 3600)).advice
    assert not usage_of(replace(HAD, seconds=60, used=0)).advice
    advice = usage_of(replace(HAD, used=12 * 3600)).advice
    assert "idle for 75% of their 48 core hours" in advice
    assert "Idle" in advice
    assert "Count" in advice


# Waiting for other jobs, in the queue, and running are told apart, the same in every view.


MAKER = AttemptRecord(
    id="m", site="hpc1", bucket=0, job="m", rule="m", name="m", fingerprint="f",
    state=AttemptState.SUBMITTED, created=90.0, submitted=100.0, started=130.0,
)  # fmt: skip
AHEAD = replace(
    MAKER, id="a", job="a", rule="a", name="a", created=95.0, submitted=101.0, started=None,
    after=json.dumps({"m.txt": "m"}),
)  # fmt: skip
ENDED = replace(
    MAKER, state=AttemptState.DONE, outcome="succeeded", finished=460.0, waited=30.0, ran=300.0,
    used=json.dumps({"ended": 430.0}),
)  # fmt: skip


def views(*records: AttemptRecord, now: float) -> tuple[object, ...]:
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
        AHEAD, state=AttemptState.DONE, outcome="succeeded", finished=600.0, waited=times.waited,
        ran=10.0, used=json.dumps({"ended": 510.0, "behind": times.behind}),
    )  # fmt: skip
    assert views(ENDED, over, now=9000.0) == (329.0, 70.0, 70.0)
    job = overview_jobs((ENDED, over), controlled=True)[-1]
    assert "waited 5 min 29 s for other jobs" in job.title(9000.0)
    early = replace(over, used=json.dumps({"ended": 439.0, "behind": 328.0}), waited=0.0)
    assert overview_jobs((ENDED, early), controlled=True)[-1].started == 430.0, "not before it"


@pytest.mark.parametrize("turn", [None, 50.0])
def test_a_job_that_waited_for_none(turn: float | None) -> None:
    times = Times(waited=20.0, ran=10.0).after(100.0, turn)
    assert (times.waited, times.behind or 0.0) == (20.0, 0.0)
