"""What is said about a scheduler's reason why a job waits."""

import pytest

from snakemake_executor_plugin_mantik.sites.pending import explain_pending
from snakemake_executor_plugin_mantik.sites.slurm import pending_obstacle


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "other jobs come first"),
        ("Resources", "are busy"),
        ("Dependency", "have not ended"),
        ("AssocMaxJobsLimit", "limit of running jobs"),
        ("QOSMaxJobsPerUserLimit", "limit of running jobs"),
        ("AssocGrpCPUMinutesLimit", "the budget is used up"),
        ("AssocGrpBillingMinutes", "the budget is used up"),
        ("QOSGrpNodeLimit", "reached by other jobs"),
        ("QOSMaxCpuPerUserLimit", "reached by other jobs"),
        ("ReqNodeNotAvail", "down or reserved"),
        ("QOSMaxWallDurationPerJobLimit", "more time than a job may"),
        ("QOSMaxNodePerJobLimit", "more than a job may"),
        ("PartitionTimeLimit", "more time than the queue allows"),
        ("InvalidAccount", "may not use this queue"),
    ],
)
def test_known_reasons_are_explained(reason: str, words: str) -> None:
    said = explain_pending(reason)
    assert said.startswith(f"{reason} (")
    assert words in said
    assert ("never starts" in said) is pending_obstacle(reason)[1]


def test_unknown_reasons_stay_as_they_are() -> None:
    assert explain_pending("Not Running: Job is in state Held") == (
        "Not Running: Job is in state Held"
    )
