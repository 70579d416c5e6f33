"""Runs that went where nothing can be told any more: the others are told all the same."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.runs.store import RunStore
from snakemake_executor_plugin_mantik.tracking import process
from snakemake_executor_plugin_mantik.tracking.process import Worker
from tests.support.ports import free_port
from tests.tracking.conftest import TrackingServer
from tests.tracking.written import Written


def ended(written: Written, name: str, uri: str, experiment: str) -> str:
    """A run that has ended, and of which nothing is told."""
    record = written.job(name, uri=uri, experiment=experiment)
    written.end(record)
    return record.id


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    for name, value in process.SETTINGS.items():
        monkeypatch.setenv(name, value)
    made = Written(tmp_path, "")
    yield made
    made.journal.close()


def work(workdir: Path) -> list[Mapping[str, Any]]:
    answers: list[Mapping[str, Any]] = []
    made = Worker(workdir, answers.append)
    made.finish()
    made.work()
    made.close()
    return answers


def test_a_dead_server_and_a_deleted_experiment_hold_up_nothing(
    tmp_path: Path, written: Written, tracking_server: TrackingServer
) -> None:
    client = MlflowClient(tracking_uri=tracking_server.uri)
    deleted, alive = f"{tmp_path} deleted", f"{tmp_path} alive"
    client.delete_experiment(client.create_experiment(deleted))
    dead = f"http://127.0.0.1:{free_port()}"
    for number in range(3):
        ended(written, f"dead{number}", dead, alive)
        ended(written, f"deleted{number}", tracking_server.uri, deleted)
    living = {ended(written, f"alive{n}", tracking_server.uri, alive) for n in range(2)}

    answers = work(tmp_path)

    experiment = client.get_experiment_by_name(alive)
    assert experiment is not None, answers
    runs = client.search_runs([experiment.experiment_id])
    assert {(r.info.run_name, r.info.status) for r in runs} == {
        ("alive0", "FINISHED"), ("alive1", "FINISHED"),
    }  # fmt: skip
    assert written.left == 6
    # Each place is tried twice and no more.
    assert len([answer for answer in answers if "down" in answer]) == 4
    assert {answer["try"] for answer in answers if "try" in answer} == living


def test_a_password_in_the_uri_is_in_no_word_of_ours(
    tmp_path: Path,
    written: Written,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    host = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@{host}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    one = ended(written, "one", f"http://{host}", "e")

    answers = work(tmp_path)
    with pytest.raises(MantikError, match="MLflow") as raised:
        RunStore(f"http://{host}").search("")

    assert one in [name for answer in answers for name in answer["tries"]]
    for told in (str(answers), str(raised.value), capfd.readouterr().err):
        assert host in told
        assert "hunter2" not in told
