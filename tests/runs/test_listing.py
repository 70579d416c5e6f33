"""What is listed; what others write into an MLflow store leads nowhere here."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.runs.listing import DIRECTORY_OF, RunFilter, _owner, list_rows
from snakemake_executor_plugin_mantik.runs.store import SITE
from snakemake_executor_plugin_mantik.tracking.run import WAITING_REASON


@pytest.mark.parametrize(
    ("told", "owner"),
    [
        ("b" * 32, "b" * 32),
        ("../../../../tmp/theirs", "a" * 32),
        ("/tmp/theirs", "a" * 32),
        ("", "a" * 32),
    ],
)
def test_whose_directory_a_run_is_in(told: str, owner: str) -> None:
    run = SimpleNamespace(
        info=SimpleNamespace(run_id="a" * 32), data=SimpleNamespace(tags={DIRECTORY_OF: told})
    )

    assert _owner(run) == owner


@pytest.fixture(autouse=True)
def _here(store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_uri)
    monkeypatch.setenv("MANTIK_RUNS", str(tmp_path / "runs"))


def test_an_experiment_that_there_is_not() -> None:
    MlflowClient().create_experiment("churn")

    assert list_rows(RunFilter(experiment="churn"), print) == []
    with pytest.raises(UserError, match=r"no experiment 'chrun'.*mean churn"):
        list_rows(RunFilter(experiment="chrun"), print)


@pytest.mark.parametrize(
    ("status", "note"),
    [("SCHEDULED", "cannot start: PartitionDown"), ("RUNNING", ""), ("FAILED", "it failed")],
)
def test_why_a_job_cannot_start(status: str, note: str) -> None:
    """As MLflow has it, of a run that was submitted elsewhere."""
    tags = {SITE: "alps", WAITING_REASON: "PartitionDown"}
    if status == "FAILED":
        tags["mantik.reason"] = note
    run = MlflowClient().create_run("0", tags=tags)
    MlflowClient().update_run(run.info.run_id, status=status)

    assert [row.note for row in list_rows(RunFilter(), pytest.fail)] == [note]
