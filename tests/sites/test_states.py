"""Jobs' properties, logs and details, quoted from UNICORE/X 11.0.0 with Slurm 22.05 behind it."""

from typing import Any

import pytest

from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase
from snakemake_executor_plugin_mantik.sites.firecrest.jobs import firecrest_state
from snakemake_executor_plugin_mantik.sites.slurm import (
    Wait,
    explain_pending,
    judge_pending,
    memory_message,
    pending_obstacle,
    pending_reason,
)
from snakemake_executor_plugin_mantik.sites.unicore.jobs import (
    logged_details,
    rejection_message,
    slurm_details,
    slurm_state,
    state_of_log,
    unicore_state,
)


def each(phases: dict[Phase, tuple[str | None, ...]]) -> list[tuple[str | None, Phase]]:
    return [(word, phase) for phase, words in phases.items() for word in words]


@pytest.mark.parametrize(
    ("status", "phase"),
    each(
        {
            Phase.WAITING: ("READY", "STAGINGIN", "QUEUED"),
            Phase.RUNNING: ("RUNNING", "STAGINGOUT"),
            Phase.ENDED: ("SUCCESSFUL", "FAILED"),
            Phase.UNKNOWN: ("UNDEFINED", "SOMETHING_NEW", None),
        }
    ),
)
def test_phases(status: str | None, phase: Phase) -> None:
    state = unicore_state({"status": status})
    assert state.phase is phase
    assert (state.reason is None) is (phase is not Phase.ENDED)


def test_all_fields() -> None:
    properties = {
        "batchSystemID": "4711",
        "exitCode": "3",
        "statusMessage": "User application exited with non-zero exit code: <3>. More information "
        "might be available in the job's working directory '/jobs/4kMirF913B3/'",
        "status": "FAILED",
    }
    assert unicore_state(properties) == JobState(
        Phase.ENDED, Reason.EXIT_CODE, properties["statusMessage"], "4711"
    )


def test_not_available_is_empty() -> None:
    state = unicore_state({"status": "QUEUED", "batchSystemID": "N/A", "exitCode": "x"})
    assert state.scheduler_id == ""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Job aborted.", Reason.CANCELLED),
        ("Processing failed: eu.unicore.xnjs.ems.ExecutionException: Resource request <Queue = "
         "nope> is out of range. (Invalid resource request)", Reason.REJECTED),
        ("Processing failed: Resource <CPUs> is not available for partition batch",
         Reason.REJECTED),
        ("Could not submit job: sbatch: error: invalid partition specified: nope",
         Reason.REJECTED),
        ("Staging in failed. Reason: x", Reason.LAUNCH_FAILURE),
        ("Post-command(s) failed: [Command exited with non-zero exit code: <1>.]",
         Reason.LAUNCH_FAILURE),
        ("Job did not complete normally on BSS, please check log", Reason.UNKNOWN),
    ],
)  # fmt: skip
def test_reasons_without_asking_further(message: str, reason: Reason) -> None:
    assert unicore_state({"status": "FAILED", "statusMessage": message}).reason is reason


AWAY = (
    "Processing failed: eu.unicore.xnjs.tsi.TSIUnavailableException: Error communicating to the TSI"
)


@pytest.mark.parametrize(
    "message",
    [
        AWAY,
        "Could not submit job: Error communicating to the TSI",
        "Pre-command(s) failed: [Processing failed: eu.unicore.xnjs.ems.ExecutionException: Could "
        "not read PID file </jobs/A24wPnQH2PD/.UNICORE_PRE_0//PRE_0_UNICORE_SCRIPT_PID> on "
        "<localhost> (Submission to login node failed)]",
        "Staging in failed. Reason: Filetransfer FAILED: [inline:// -> bss.sh] error message: "
        "Inline import to '/jobs/EZKy76sSKR3//bss.sh' failed: "
        "eu.unicore.xnjs.tsi.TSIUnavailableException: Error communicating to the TSI",
        "Staging in failed. Reason: Processing failed: java.lang.IllegalStateException: Internal "
        "server error: File transfer '7rFNUWMGUUy' not found!",
        "Error processing stage-in.: eu.unicore.xnjs.ems.ExecutionException No such action. (XNJS "
        "error)",
    ],
)
def test_jobs_that_were_lost_because_something_was_away(message: str) -> None:
    state = unicore_state({"status": "FAILED", "statusMessage": message, "batchSystemID": "N/A"})
    assert (state.phase, state.reason) == (Phase.ENDED, Reason.LAUNCH_FAILURE)
    assert state.later


def test_a_job_that_unicore_gave_up_may_wait_or_run() -> None:
    """Seen with a TSI that was killed while UNICORE asked for the job's exit code."""
    state = unicore_state({"status": "FAILED", "statusMessage": AWAY, "batchSystemID": "17"})
    assert (state.phase, state.reason, state.later) == (Phase.UNKNOWN, None, False)
    assert slurm_state({"JobState": "RUNNING"}, state).phase is Phase.RUNNING
    assert slurm_state({"JobState": "PENDING"}, state).phase is Phase.WAITING
    ended = slurm_state({"JobState": "COMPLETED", "ExitCode": "0:0"}, state)
    assert (ended.phase, ended.reason) == (Phase.ENDED, Reason.SUCCESS)
    assert slurm_state({}, state) is state


def test_words_of_sbatch() -> None:
    log = [
        "Sat Nov 21 11:20:49 UTC 2026: Status set to PENDING.",
        "Sat Nov 21 11:20:59 UTC 2026: Could not submit job: sbatch: error: Batch job submission "
        "failed: Requested time limit is invalid\n(missing or exceeds some limit)",
        "Sat Nov 21 11:21:00 UTC 2026: Status set to DONE - failure.",
    ]
    assert rejection_message(log) == (
        "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or "
        "exceeds some limit)"
    )
    assert rejection_message(log[:1]) == ""


RUNNING = JobState(Phase.RUNNING, scheduler_id="7")
DETAILS: list[tuple[dict[str, Any], Reason, str]] = [
    ({"JobState": "TIMEOUT", "Reason": "TimeLimit", "ExitCode": "0:15"}, Reason.TIME_LIMIT,
     "TIMEOUT (TimeLimit)"),
    ({"JobState": "CANCELLED", "Reason": "None", "ExitCode": "143:0"}, Reason.CANCELLED,
     "CANCELLED"),
    # One that was waiting: Slurm leaves the reason for that.
    ({"JobState": "CANCELLED", "Reason": "Priority", "ExitCode": "0:0"}, Reason.CANCELLED,
     "CANCELLED"),
    ({"JobState": "OUT_OF_MEMORY", "ExitCode": "0:125"}, Reason.OUT_OF_MEMORY, "OUT_OF_MEMORY"),
    ({"JobState": "FAILED", "Reason": "JobLaunchFailure", "ExitCode": "0:53"},
     Reason.LAUNCH_FAILURE, "FAILED (JobLaunchFailure), ended by signal 53"),
    # All processes killed with -9; memory kills look the same, but for their standard error.
    ({"JobState": "FAILED", "Reason": "JobLaunchFailure", "ExitCode": "0:9"}, Reason.UNKNOWN,
     "FAILED, ended by signal 9 (SIGKILL)"),
    ({"JobState": "FAILED", "Reason": "NonZeroExitCode", "ExitCode": "3:0"}, Reason.EXIT_CODE,
     "FAILED (NonZeroExitCode), exit code 3"),
    ({"JobState": "NODE_FAIL", "Reason": "NodeDown", "ExitCode": "0:0"}, Reason.NODE_FAILURE,
     "NODE_FAIL (NodeDown)"),
    ({"JobState": "PREEMPTED"}, Reason.PREEMPTED, "PREEMPTED"),
    ({"rawDetailsData": "JobId=7 JobName=x JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15"},
     Reason.TIME_LIMIT, "TIMEOUT (TimeLimit)"),
]  # fmt: skip


@pytest.mark.parametrize(("details", "reason", "words"), DETAILS)
def test_ends_that_slurm_tells_before_unicore_does(
    details: dict[str, Any], reason: Reason, words: str
) -> None:
    told = slurm_state(slurm_details(details), RUNNING)
    assert told == JobState(Phase.ENDED, reason, detail=words, scheduler_id="7")


@pytest.mark.parametrize(
    ("word", "signal", "nodes", "node"),
    [
        ("NODE_FAIL", 0, "nid001", "nid001"),
        ("BOOT_FAIL", 0, "nid001", "nid001"),
        ("FAILED", 53, "nid001", "nid001"),
        ("FAILED", 9, "nid001", ""),
        ("PREEMPTED", 0, "nid001", ""),
        ("OUT_OF_MEMORY", 125, "nid001", ""),
        ("NODE_FAIL", 0, "nid[001-002]", ""),
        ("NODE_FAIL", 0, "nid001,nid004", ""),
        ("BOOT_FAIL", 0, "(null)", ""),
    ],
)
def test_the_node_because_of_which_a_job_ended(
    word: str, signal: int, nodes: str, node: str
) -> None:
    told = f"JobState={word} ExitCode=0:{signal} ReqNodeList=(null) ExcNodeList=x NodeList={nodes}"
    for details in ({"JobState": word, "ExitCode": f"0:{signal}", "NodeList": nodes}, {"": told}):
        assert slurm_state(slurm_details(details), RUNNING).failed_node == node
    assert firecrest_state(job(word, 0, signal, nodes=nodes)).failed_node == node


def test_ends_without_a_node_and_those_that_pbs_tells() -> None:
    assert firecrest_state(job("BOOT_FAIL", nodes="None assigned")).failed_node == ""
    assert firecrest_state(job("F", -1, nodes="n1")).failed_node == ""


def test_what_slurm_counts_of_a_job_that_ended() -> None:
    """By Slurm's clock, whenever somebody asks."""
    times = {"SubmitTime": "2026-11-24T23:59:00", "StartTime": "2026-11-25T00:01:30"}
    told = {"JobState": "TIMEOUT", "RunTime": "1-02:03:04", "EndTime": "2026-11-26T02:04:34"}
    state = slurm_state(slurm_details({**told, **times}), RUNNING)
    assert (state.starts_after, state.ran) == (150.0, 86400.0 + 2 * 3600 + 184)


def test_details_that_unicore_has_kept() -> None:
    log = [
        "Mon Nov 23 03:33:01 UTC 2026: Submitted to TSI as [u u:DEFAULT_GID] with BSSID=6",
        'Mon Nov 23 03:44:32 UTC 2026: Detailed job information from batch system: {"JobId": "6", '
        '"JobState": "NODE_FAIL", "Reason": "NodeDown", "ExitCode": "0:0", "RunTime": "00:00:00"}',
        "Mon Nov 23 03:44:32 UTC 2026: Result: Failed: Job did not complete normally on BSS, please"
        " check standard error file and job log for more information.",
    ]
    told = {"JobState": "NODE_FAIL", "Reason": "NodeDown", "ExitCode": "0:0", "RunTime": "00:00:00"}
    assert logged_details(log) == told
    assert logged_details(log[:1]) == {}


@pytest.mark.parametrize(
    "words",
    [
        "Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation",
    ],
)
def test_a_controller_of_slurm_that_is_away(words: str) -> None:
    log = [f"Could not submit job: sbatch: error: Batch job submission failed: {words}"]
    failed = unicore_state({"status": "FAILED", "statusMessage": "Failed", "batchSystemID": "N/A"})
    state = state_of_log(failed, log)
    assert (state.reason, state.later) == (Reason.LAUNCH_FAILURE, True)
    assert words in state.detail


@pytest.mark.parametrize(
    "details",
    [
        {"JobState": "COMPLETED", "ExitCode": "0:0"},  # UNICORE knows the exit code of the script
        {"JobState": "RUNNING", "Reason": "None", "ExitCode": "0:0"},
        {"JobState": "PENDING", "Reason": "Priority", "ExitCode": "0:0"},
        {"rawDetailsData": "N/A"},
    ],
)
def test_details_that_tell_of_no_end(details: dict[str, Any]) -> None:
    assert slurm_state(slurm_details(details), RUNNING) is RUNNING


PENDING = {"JobState": "PENDING", "ExitCode": "0:0", "NodeList": "", "StartTime": "Unknown"}


@pytest.mark.parametrize(
    ("times", "wait"),
    [
        ({"SubmitTime": "2026-11-24T23:30:00", "StartTime": "2026-11-25T01:00:00"}, 5400.0),
        ({"SubmitTime": "2026-11-24T23:30:00", "StartTime": "Unknown"}, None),
        ({"SubmitTime": "2026-11-24T23:30:00", "StartTime": "2026-11-24T23:30:00"}, None),
        ({"StartTime": "2026-11-25T01:00:00"}, None),
        ({}, None),
    ],
)
def test_when_the_scheduler_expects_a_job_to_start(
    times: dict[str, str], wait: float | None
) -> None:
    waiting = JobState(Phase.WAITING, scheduler_id="7")
    text = " ".join(f"{k}={v}" for k, v in {**PENDING, "Reason": "Priority", **times}.items())
    for details in ({**PENDING, "Reason": "Priority", **times}, {"rawDetailsData": text}):
        state = slurm_state(slurm_details(details), waiting)
        assert (state.pending, state.starts_after) == ("Priority", wait)


@pytest.mark.parametrize(
    ("reason", "waits", "never"),
    [
        ("launch_failed_requeued_held", "launch failed requeued held", False),
        ("PartitionTimeLimit", "PartitionTimeLimit", True),
        ("Priority", "", False),
    ],
)
def test_why_a_job_waits(reason: str, waits: str, never: bool) -> None:
    """UNICORE's own state of it says nothing; the details that its TSI gives do."""
    queued = unicore_state({"status": "QUEUED", "batchSystemID": "1"})
    assert (queued.waits, queued.never) == (None, False)
    told = slurm_state(slurm_details({**PENDING, "Reason": reason}), queued)
    assert (told.phase, told.waits, told.never) == (Phase.WAITING, waits, never)
    assert told.pending == reason.replace("_", " ")
    assert told.scheduler_id == "1"


def test_what_unicore_knows_of_a_script_that_ended_by_itself_counts() -> None:
    state = JobState(Phase.ENDED, Reason.EXIT_CODE, "exited with <137>", "7")
    killed = {"JobState": "FAILED", "Reason": "JobLaunchFailure", "ExitCode": "0:9"}
    assert slurm_state(killed, state) is state
    assert slurm_state({"JobState": "TIMEOUT"}, state).reason is Reason.TIME_LIMIT


@pytest.mark.parametrize(
    "words",
    [
        "slurmstepd: error: Step 7.0 exceeded memory limit (1100 > 1000), being killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch",
    ],
)
def test_words_of_slurm_on_memory(words: str) -> None:
    assert memory_message(f"Epoch 1\n{words}\nslurmstepd: error: more\n") == words
    assert memory_message("Epoch 1\n") == ""


# firecREST, as one with Slurm told them; PBS after its source.


def job(state: Any, code: int | None = 0, signal: int | None = 0, **more: Any) -> dict[str, Any]:
    status = {"state": state, "stateReason": None, "exitCode": code, "interruptSignal": signal}
    return {"jobId": "7", "name": "x", "status": status, "partition": "batch", **more}


def step(state: str) -> dict[str, Any]:
    return {"id": "7.batch", "name": "batch", "status": {"state": state}, "time": {}}


ENDS = [
    (job("COMPLETED"), Reason.SUCCESS),
    (job("FAILED", 3), Reason.EXIT_CODE),
    (job("FAILED", 127), Reason.EXIT_CODE),
    (job("FAILED", 0, 11), Reason.UNKNOWN),
    (job("FAILED", 0, 53), Reason.LAUNCH_FAILURE),
    (job("FAILED", 0, 9), Reason.UNKNOWN),
    (job("FAILED", 0, 9, tasks=[step("CANCELLED by 0")]), Reason.OUT_OF_MEMORY),
    (job("TIMEOUT", tasks=[step("CANCELLED")]), Reason.TIME_LIMIT),
    (job("CANCELLED by 1001"), Reason.CANCELLED),
    (job("CANCELLED+"), Reason.CANCELLED),
    (job("OUT_OF_MEMORY", 0, 125), Reason.OUT_OF_MEMORY),
    (job("NODE_FAIL"), Reason.NODE_FAILURE),
    (job("BOOT_FAIL"), Reason.NODE_FAILURE),
    (job("PREEMPTED"), Reason.PREEMPTED),
    (job("DEADLINE"), Reason.TIME_LIMIT),
    (job(["COMPLETED"]), Reason.SUCCESS),
    # half a record, right after the end
    (job("FAILED", 3, name="allocation", partition="", group="root"), Reason.EXIT_CODE),
    (job("F", 0, None), Reason.SUCCESS),
    (job("F", 3, None), Reason.EXIT_CODE),
    (job("F", -29, None), Reason.TIME_LIMIT),
    (job("F", -27, None), Reason.OUT_OF_MEMORY),
    (job("F", -1, None), Reason.LAUNCH_FAILURE),
    (job("F", 271, None), Reason.CANCELLED),
    (job("F", 265, None), Reason.UNKNOWN),
]


@pytest.mark.parametrize(("told", "reason"), ENDS)
def test_ends_at_firecrest(told: dict[str, Any], reason: Reason) -> None:
    state = firecrest_state(told)
    assert (state.phase, state.reason) == (Phase.ENDED, reason)
    assert state.scheduler_id == "7"


@pytest.mark.parametrize(
    ("told", "phase"),
    each(
        {
            Phase.WAITING: ("PENDING", "CONFIGURING", "Q", "H"),
            Phase.RUNNING: ("RUNNING", "COMPLETING", "SUSPENDED", "R", "E"),
            Phase.UNKNOWN: ("SOMETHING_NEW", "", None, "M"),
        }
    ),
)
@pytest.mark.parametrize("code", [None, 0])
def test_phases_at_firecrest(told: str | None, phase: Phase, code: int | None) -> None:
    state = firecrest_state(job(told, code, None))
    assert (state.phase, state.reason) == (phase, None)


def test_details_at_firecrest() -> None:
    waiting = job("PENDING")
    waiting["status"]["stateReason"] = "PartitionTimeLimit"
    assert firecrest_state(waiting).detail == "PENDING (PartitionTimeLimit)"
    waiting["status"]["stateReason"] = "None"  # Slurm's word, not JSON's
    assert firecrest_state(waiting).detail == "PENDING"
    assert firecrest_state(job("FAILED", 0, 11)).detail == "FAILED, ended by signal 11 (SIGSEGV)"
    cancelled = job("CANCELLED by 1001")  # Slurm leaves the reason for which it waited
    cancelled["status"]["stateReason"] = "Dependency"
    assert firecrest_state(cancelled).detail == "CANCELLED by 1001"


@pytest.mark.parametrize("told", [{}, {"status": None}, {"status": "x"}, {"status": {"state": 3}}])
def test_nonsense_of_firecrest_is_unknown(told: dict[str, Any]) -> None:
    assert firecrest_state(told).phase is Phase.UNKNOWN


@pytest.mark.parametrize(
    ("reason", "waits", "never"),
    [
        (None, "", False), ("Priority", "", False), ("JobHeldAdmin", "JobHeldAdmin", False),
        ("InvalidQOS", "InvalidQOS", True),
    ],
)  # fmt: skip
def test_why_a_job_waits_at_firecrest(reason: str | None, waits: str, never: bool) -> None:
    waiting = job("PENDING")
    waiting["status"]["stateReason"] = reason
    state = firecrest_state(waiting)
    assert (state.waits, state.never) == (waits, never)
    assert state.pending == (reason or "").replace("None", "")


def test_what_firecrest_counts_of_a_job_that_ended() -> None:
    times = {"elapsed": 13, "start": 1700000000, "end": 1700000013, "limit": 60}
    state = firecrest_state(job("OUT_OF_MEMORY", 0, 125, time=times))
    assert (state.started, state.ran) == (1700000000.0, 13.0)
    assert firecrest_state(job("NODE_FAIL")).ran is None


def test_since_when_a_job_runs() -> None:
    times = {"elapsed": 5, "start": 1700000000, "end": None, "limit": 60}
    assert firecrest_state(job("RUNNING", time=times)).started == 1700000000.0
    assert firecrest_state(job("PENDING", time=times)).started == 1700000000.0, "it is expected"
    assert firecrest_state(job("RUNNING", time={"start": None})).started is None


# Why jobs wait.

TURN, HINDERED, NEVER = Wait.TURN, Wait.HINDERED, Wait.NEVER

REASONS = {
    (TURN, "other jobs come first"): "Priority",
    (TURN, "are busy"): "Resources",
    (TURN, "down, drained, or kept"): (
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher "
        "priority partitions"
    ),
    (TURN, "down, or reserved"): (
        "ReqNodeNotAvail; ReqNodeNotAvail, UnavailableNodes:n[1-2]; ReqNodeNotAvail, "
        "Reserved for maintenance; ReqNodeNotAvail, May be reserved for other job; "
        "NodeDown"
    ),
    (TURN, "have not ended"): "Dependency",
    (TURN, "start time"): "BeginTime",
    (TURN, "licences"): "Licenses",
    (TURN, "has not begun"): "Reservation",
    (TURN, "being started"): "Cleaning; Prolog; SchedDefer",
    (TURN, "burst buffer"): "BurstBufferStageIn",
    (TURN, "power"): "PowerNotAvail; MaxPoweredUpNodes",
    (TURN, "limit of running jobs"): (
        "AssocMaxJobsLimit; AssocGrpJobsLimit; QOSMaxJobsPerUserLimit; QOSGrpJobsLimit; "
        "MaxJobsPerAccount; QOSJobLimit; AssociationJobLimit; JobArrayTaskLimit"
    ),
    (TURN, "limit of submitted jobs"): "QOSMaxSubmitJobPerUserLimit",
    (TURN, "by running jobs"): (
        "QOSMaxCpuPerUserLimit; QOSMaxNodePerUserLimit; QOSMaxGRESPerUser; "
        "QOSMaxMemoryPerUser; MaxCpuPerAccount; MaxGRESPerAccount; QOSGrpNodeLimit; "
        "QOSGrpCpuLimit; QOSGrpGRES; QOSGrpMemLimit; AssocGrpCpuLimit; "
        "AssocGrpNodeLimit; AssocGrpBilling; AssocGrpCPURunMinutesLimit; "
        "QOSGrpGRESRunMinutes; QOSResourceLimit"
    ),
    (HINDERED, "budget"): (
        "AssocGrpCPUMinutesLimit; AssocGrpBillingMinutes; AssocGrpWallLimit; "
        "QOSGrpMemoryMinutes; QOSUsageThreshold"
    ),
    (HINDERED, "failed"): "DependencyNeverSatisfied",
    (HINDERED, "scontrol release"): "JobHeldUser",
    (HINDERED, "support"): "JobHeldAdmin; JobHoldMaxRequeue; launch failed requeued held",
    (HINDERED, "does not exist"): "ReservationDeleted; ReservationInvalid",
    (HINDERED, "just now"): "PartitionDown; PartitionInactive",
    (HINDERED, "no node that is up"): (
        "PartitionNodeLimit; PartitionConfig; BadConstraints; Constraints"
    ),
    (NEVER, "more time than the queue allows"): "PartitionTimeLimit",
    (NEVER, "more time than a job may"): (
        "QOSMaxWallDurationPerJobLimit; AssocMaxWallDurationPerJobLimit"
    ),
    (NEVER, "more than a job may"): (
        "QOSMaxNodePerJobLimit; QOSMaxCpuPerNode; AssocMaxCpuMinutesPerJobLimit"
    ),
    (NEVER, "less than"): "QOSMinCpuNotSatisfied; QOSMinGRES",
    (NEVER, "may not use this queue"): "InvalidAccount; AccountNotAllowed",
    (NEVER, "may not be used here"): "InvalidQOS; QOSNotAllowed",
}
"""Reasons that `squeue` of Slurm 20 to 25 shows."""


@pytest.mark.parametrize(
    ("wait", "words", "reason"),
    [(*meant, each) for meant, reasons in REASONS.items() for each in reasons.split("; ")],
)
def test_reasons_of_slurm(wait: Wait, words: str, reason: str) -> None:
    """As `squeue` prints them, and as `scontrol` does."""
    for written in (reason, f"({reason})", reason.replace(" ", "_")):
        assert pending_reason(written) == reason
    assert judge_pending(reason)[0] is wait
    said = explain_pending(reason)
    assert said.startswith(f"{reason} (")
    assert words in said
    assert ("never starts" in said) is (wait is NEVER)
    assert pending_obstacle(reason) == ("" if wait is TURN else reason, wait is NEVER)


def test_unknown_reasons_stay_as_they_are() -> None:
    assert pending_obstacle("SomethingNew") == ("SomethingNew", False)
    sentence = "Not Running: Insufficient amount of resource: n_cpus"
    assert explain_pending(pending_reason(sentence)) == sentence
    assert pending_obstacle(sentence) == ("", False)
    for nothing in ("None", "(null)", "", None):
        assert pending_reason(nothing) == ""
