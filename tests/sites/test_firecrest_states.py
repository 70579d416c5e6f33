"""Jobs as a real firecREST with Slurm told them in each case; PBS after firecREST's source."""

from typing import Any

import pytest

from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.base import Phase
from snakemake_executor_plugin_mantik.sites.firecrest.jobs import firecrest_state


def job(state: Any, code: int | None = 0, signal: int | None = 0, **more: Any) -> dict[str, Any]:
    status = {"state": state, "stateReason": None, "exitCode": code, "interruptSignal": signal}
    return {"jobId": "7", "name": "x", "status": status, "partition": "batch", **more}


def step(state: str) -> dict[str, Any]:
    return {"id": "7.batch", "name": "batch", "status": {"state": state}, "time": {}}


ENDS = [
    (job("COMPLETED"), Reason.SUCCESS, 0),
    (job("FAILED", 3), Reason.EXIT_CODE, 3),
    (job("FAILED", 127), Reason.EXIT_CODE, 127),
    (job("FAILED", 0, 11), Reason.UNKNOWN, None),
    (job("FAILED", 0, 53), Reason.LAUNCH_FAILURE, None),
    (job("FAILED", 0, 9), Reason.UNKNOWN, None),
    (job("FAILED", 0, 9, tasks=[step("CANCELLED by 0")]), Reason.OUT_OF_MEMORY, None),
    (job("TIMEOUT", tasks=[step("CANCELLED")]), Reason.TIME_LIMIT, None),
    (job("CANCELLED by 1001"), Reason.CANCELLED, None),
    (job("CANCELLED+"), Reason.CANCELLED, None),
    (job("OUT_OF_MEMORY", 0, 125), Reason.OUT_OF_MEMORY, None),
    (job("NODE_FAIL"), Reason.NODE_FAILURE, None),
    (job("BOOT_FAIL"), Reason.NODE_FAILURE, None),
    (job("PREEMPTED"), Reason.PREEMPTED, None),
    (job("DEADLINE"), Reason.TIME_LIMIT, None),
    (job(["COMPLETED"]), Reason.SUCCESS, 0),
    # half a record, right after the end
    (job("FAILED", 3, name="allocation", partition="", group="root"), Reason.EXIT_CODE, 3),
    (job("F", 0, None), Reason.SUCCESS, 0),
    (job("F", 3, None), Reason.EXIT_CODE, 3),
    (job("F", -29, None), Reason.TIME_LIMIT, None),
    (job("F", -27, None), Reason.OUT_OF_MEMORY, None),
    (job("F", -1, None), Reason.LAUNCH_FAILURE, None),
    (job("F", 271, None), Reason.CANCELLED, None),
    (job("F", 265, None), Reason.UNKNOWN, None),
]


@pytest.mark.parametrize(("told", "reason", "code"), ENDS)
def test_ends(told: dict[str, Any], reason: Reason, code: int | None) -> None:
    state = firecrest_state(told)
    assert (state.phase, state.reason, state.exit_code) == (Phase.ENDED, reason, code)
    assert state.scheduler_id == "7"


@pytest.mark.parametrize(
    ("told", "phase"),
    [
        ("PENDING", Phase.WAITING),
        ("CONFIGURING", Phase.WAITING),
        ("RUNNING", Phase.RUNNING),
        ("COMPLETING", Phase.RUNNING),
        ("SUSPENDED", Phase.RUNNING),
        ("SOMETHING_NEW", Phase.UNKNOWN),
        ("", Phase.UNKNOWN),
        (None, Phase.UNKNOWN),
        ("Q", Phase.WAITING),
        ("H", Phase.WAITING),
        ("R", Phase.RUNNING),
        ("E", Phase.RUNNING),
        ("M", Phase.UNKNOWN),
    ],
)
@pytest.mark.parametrize("code", [None, 0])
def test_phases(told: str | None, phase: Phase, code: int | None) -> None:
    state = firecrest_state(job(told, code, None))
    assert (state.phase, state.reason, state.exit_code) == (phase, None, None)


def test_details() -> None:
    waiting = job("PENDING")
    waiting["status"]["stateReason"] = "PartitionTimeLimit"
    assert firecrest_state(waiting).detail == "PENDING (PartitionTimeLimit)"
    waiting["status"]["stateReason"] = "None"  # Slurm's word, not JSON's
    assert firecrest_state(waiting).detail == "PENDING"
    assert firecrest_state(job("FAILED", 0, 11)).detail == "FAILED, ended by signal 11 (SIGSEGV)"
    cancelled = job("CANCELLED by 1001")  # Slurm leaves the reason for which it waited
    cancelled["status"]["stateReason"] = "Dependency"
    assert firecrest_state(cancelled).detail == "CANCELLED by 1001"
    assert firecrest_state(job("RUNNING")).queue == "batch"


@pytest.mark.parametrize("told", [{}, {"status": None}, {"status": "x"}, {"status": {"state": 3}}])
def test_nonsense_is_unknown(told: dict[str, Any]) -> None:
    assert firecrest_state(told).phase is Phase.UNKNOWN


@pytest.mark.parametrize(
    ("reason", "waits", "never"),
    [
        (None, "", False), ("Priority", "", False), ("JobHeldAdmin", "JobHeldAdmin", False),
        ("InvalidQOS", "InvalidQOS", True),
    ],
)  # fmt: skip
def test_why_a_job_waits(reason: str | None, waits: str, never: bool) -> None:
    waiting = job("PENDING")
    waiting["status"]["stateReason"] = reason
    state = firecrest_state(waiting)
    assert (state.waits, state.never) == (waits, never)
    assert state.pending == (reason or "").replace("None", "")


def test_what_slurm_counts_of_a_job_that_ended() -> None:
    times = {"elapsed": 13, "start": 1700000000, "end": 1700000013, "limit": 60}
    state = firecrest_state(job("OUT_OF_MEMORY", 0, 125, time=times))
    assert (state.started, state.ran) == (1700000000.0, 13.0)
    assert firecrest_state(job("NODE_FAIL")).ran is None


def test_since_when_a_job_runs() -> None:
    times = {"elapsed": 5, "start": 1700000000, "end": None, "limit": 60}
    assert firecrest_state(job("RUNNING", time=times)).started == 1700000000.0
    assert firecrest_state(job("PENDING", time=times)).started == 1700000000.0, "it is expected"
    assert firecrest_state(job("RUNNING", time={"start": None})).started is None
