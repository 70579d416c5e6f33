"""Advice on what to request next time."""

import json
from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.views.usage import RuleUsage, usage_by_rule
from snakemake_executor_plugin_mantik.views.workflow import overview_jobs

NOW = 1_795_000_000.0
GIB = 1 << 30

JOB = TryRecord(
    "", "hpc1", 1, "", "train", "train", "f", TryState.DONE, "succeeded", created=NOW,
    submitted=NOW, finished=NOW + 4000, waited=60.0, ran=3600.0, runtime=7200.0,
    asked=json.dumps({"cores": 4, "memory_mib": 8192}),
    used=json.dumps({"cpu_s": 4 * 3000, "memory_bytes": 6 * GIB}),
)  # fmt: skip


def usage(*records: TryRecord, members: int = 0) -> RuleUsage:
    """The usage of a rule's tries, each of a job of its own unless it has one."""
    tries = tuple(
        replace(record, id=f"{n}", job=record.job or f"job {n}") for n, record in enumerate(records)
    )
    groups = {one.id: tuple(f"{n}" for n in range(members)) for one in tries if members}
    [found] = usage_by_rule(overview_jobs(tries, controlled=False, members=groups), NOW)
    return found


def advised(*records: TryRecord, members: int = 0) -> dict[str, int]:
    return {a.resource: a.value for a in usage(*records, members=members).advice}


def used(record: TryRecord = JOB, /, *, gib: float = 6.0, **more: object) -> TryRecord:
    values = json.dumps({"cpu_s": 12_000, "memory_bytes": int(gib * GIB)})
    return replace(record, used=values, **more)  # type: ignore[arg-type]  # fields of a try


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


def test_a_job_that_had_too_little_gets_more_than_its_first_try() -> None:
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
