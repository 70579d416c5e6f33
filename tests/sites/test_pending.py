"""What a scheduler's reason why a job waits means, and what is said about it."""

import pytest

from snakemake_executor_plugin_mantik.sites.slurm import (
    Wait,
    explain_pending,
    judge_pending,
    pending_obstacle,
    pending_reason,
)

TURN, HINDERED, NEVER = Wait.TURN, Wait.HINDERED, Wait.NEVER

REASONS = {
    "Priority": (TURN, "other jobs come first"),
    "Resources": (TURN, "are busy"),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions":
        (TURN, "down, drained, or kept"),
    "ReqNodeNotAvail": (TURN, "down, or reserved"),
    "ReqNodeNotAvail, UnavailableNodes:n[1-2]": (TURN, "down, or reserved"),
    "ReqNodeNotAvail, Reserved for maintenance": (TURN, "down, or reserved"),
    "ReqNodeNotAvail, May be reserved for other job": (TURN, "down, or reserved"),
    "NodeDown": (TURN, "down, or reserved"),
    "Dependency": (TURN, "have not ended"),
    "BeginTime": (TURN, "start time"),
    "Licenses": (TURN, "licences"),
    "Reservation": (TURN, "has not begun"),
    "Cleaning": (TURN, "being started"),
    "Prolog": (TURN, "being started"),
    "SchedDefer": (TURN, "being started"),
    "BurstBufferStageIn": (TURN, "burst buffer"),
    "PowerNotAvail": (TURN, "power"),
    "MaxPoweredUpNodes": (TURN, "power"),
    "AssocMaxJobsLimit": (TURN, "limit of running jobs"),
    "AssocGrpJobsLimit": (TURN, "limit of running jobs"),
    "QOSMaxJobsPerUserLimit": (TURN, "limit of running jobs"),
    "QOSGrpJobsLimit": (TURN, "limit of running jobs"),
    "MaxJobsPerAccount": (TURN, "limit of running jobs"),
    "QOSJobLimit": (TURN, "limit of running jobs"),
    "AssociationJobLimit": (TURN, "limit of running jobs"),
    "JobArrayTaskLimit": (TURN, "limit of running jobs"),
    "QOSMaxSubmitJobPerUserLimit": (TURN, "limit of submitted jobs"),
    "QOSMaxCpuPerUserLimit": (TURN, "by running jobs"),
    "QOSMaxNodePerUserLimit": (TURN, "by running jobs"),
    "QOSMaxGRESPerUser": (TURN, "by running jobs"),
    "QOSMaxMemoryPerUser": (TURN, "by running jobs"),
    "MaxCpuPerAccount": (TURN, "by running jobs"),
    "MaxGRESPerAccount": (TURN, "by running jobs"),
    "QOSGrpNodeLimit": (TURN, "by running jobs"),
    "QOSGrpCpuLimit": (TURN, "by running jobs"),
    "QOSGrpGRES": (TURN, "by running jobs"),
    "QOSGrpMemLimit": (TURN, "by running jobs"),
    "AssocGrpCpuLimit": (TURN, "by running jobs"),
    "AssocGrpNodeLimit": (TURN, "by running jobs"),
    "AssocGrpBilling": (TURN, "by running jobs"),
    "AssocGrpCPURunMinutesLimit": (TURN, "by running jobs"),
    "QOSGrpGRESRunMinutes": (TURN, "by running jobs"),
    "QOSResourceLimit": (TURN, "by running jobs"),
    "AssocGrpCPUMinutesLimit": (HINDERED, "budget"),
    "AssocGrpBillingMinutes": (HINDERED, "budget"),
    "AssocGrpWallLimit": (HINDERED, "budget"),
    "QOSGrpMemoryMinutes": (HINDERED, "budget"),
    "QOSUsageThreshold": (HINDERED, "budget"),
    "DependencyNeverSatisfied": (HINDERED, "failed"),
    "JobHeldUser": (HINDERED, "scontrol release"),
    "JobHeldAdmin": (HINDERED, "support"),
    "JobHoldMaxRequeue": (HINDERED, "support"),
    "launch failed requeued held": (HINDERED, "support"),
    "ReservationDeleted": (HINDERED, "does not exist"),
    "ReservationInvalid": (HINDERED, "does not exist"),
    "PartitionDown": (HINDERED, "just now"),
    "PartitionInactive": (HINDERED, "just now"),
    "PartitionNodeLimit": (HINDERED, "no node that is up"),
    "PartitionConfig": (HINDERED, "no node that is up"),
    "BadConstraints": (HINDERED, "no node that is up"),
    "Constraints": (HINDERED, "no node that is up"),
    "PartitionTimeLimit": (NEVER, "more time than the queue allows"),
    "QOSMaxWallDurationPerJobLimit": (NEVER, "more time than a job may"),
    "AssocMaxWallDurationPerJobLimit": (NEVER, "more time than a job may"),
    "QOSMaxNodePerJobLimit": (NEVER, "more than a job may"),
    "QOSMaxCpuPerNode": (NEVER, "more than a job may"),
    "AssocMaxCpuMinutesPerJobLimit": (NEVER, "more than a job may"),
    "QOSMinCpuNotSatisfied": (NEVER, "less than"),
    "QOSMinGRES": (NEVER, "less than"),
    "InvalidAccount": (NEVER, "may not use this queue"),
    "AccountNotAllowed": (NEVER, "may not use this queue"),
    "InvalidQOS": (NEVER, "may not be used here"),
    "QOSNotAllowed": (NEVER, "may not be used here"),
}  # fmt: skip
"""Reasons that `squeue` of Slurm 20 to 25 shows."""


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_of_slurm(reason: str) -> None:
    """As `squeue` prints them, and as `scontrol` does."""
    wait, words = REASONS[reason]
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
