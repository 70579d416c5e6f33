"""Runs that went where nothing can be told any more: the others are told all the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.runs.store import RunStore
from snakemake_executor_plugin_mantik.tracking.outbox import EventKind, Lane, Outbox
from snakemake_executor_plugin_mantik.tracking.store import DIRECTORY
from snakemake_executor_plugin_mantik.tracking.worker import process
from snakemake_executor_plugin_mantik.tracking.worker.process import OUTBOX, Worker
from tests.support.ports import free_port
from tests.tracking.conftest import TrackingServer

END = {"status": "FINISHED", "time": 2000.0, "words": "", "exit_code": 0, "log": ""}


def ended(outbox: Outbox, name: str, uri: str, experiment: str) -> None:
    """A run that has ended, and of which nothing is told."""
    data = {
        "name": name, "tags": {}, "params": {}, "experiment_id": "", "experiment": experiment,
        "config": "none",
    }  # fmt: skip
    outbox.add_run(name, uri, data)
    outbox.add(name, EventKind.END, END)


@pytest.fixture
def outbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    for name, value in process.SETTINGS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / DIRECTORY).mkdir(parents=True)
    return Outbox(tmp_path / DIRECTORY / OUTBOX)


def work(workdir: Path) -> list[Mapping[str, Any]]:
    """What the worker answers who tells what it can."""
    answers: list[Mapping[str, Any]] = []
    made = Worker(workdir, answers.append)
    made.finish()
    for lane in Lane:
        made.work(lane)
    made.close()
    return answers


def test_a_dead_server_and_a_deleted_experiment_hold_up_nothing(
    tmp_path: Path, outbox: Outbox, tracking_server: TrackingServer
) -> None:
    client = MlflowClient(tracking_uri=tracking_server.uri)
    deleted, alive = f"{tmp_path} deleted", f"{tmp_path} alive"
    client.delete_experiment(client.create_experiment(deleted))
    dead = f"http://127.0.0.1:{free_port()}"
    for number in range(3):
        ended(outbox, f"dead{number}", dead, alive)
        ended(outbox, f"deleted{number}", tracking_server.uri, deleted)
    ended(outbox, "alive0", tracking_server.uri, alive)
    ended(outbox, "alive1", tracking_server.uri, alive)

    answers = work(tmp_path)

    experiment = client.get_experiment_by_name(alive)
    assert experiment is not None, answers
    runs = client.search_runs([experiment.experiment_id])
    assert {(r.info.run_name, r.info.status) for r in runs} == {
        ("alive0", "FINISHED"), ("alive1", "FINISHED"),
    }  # fmt: skip
    assert outbox.pending() == 6
    # Each place is tried twice and no more; what is alive comes first.
    down = [answer["tries"] for answer in answers if "down" in answer]
    assert (
        sorted(down)
        == [[f"dead{n}" for n in range(3)]] * 2 + [[f"deleted{n}" for n in range(3)]] * 2
    )
    made = [answer["try"] for answer in answers if "try" in answer]
    assert (made, answers[0]["try"]) == (["alive0", "alive1"], "alive0")


def test_a_password_in_the_uri_is_in_no_word_of_ours(
    tmp_path: Path,
    outbox: Outbox,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    host = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@{host}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    ended(outbox, "one", f"http://{host}", "e")

    answers = work(tmp_path)
    with pytest.raises(MantikError, match="MLflow") as raised:
        RunStore(f"http://{host}").search("")

    assert "one" in [name for answer in answers for name in answer["tries"]]
    for told in (str(answers), str(raised.value), capfd.readouterr().err):
        assert host in told
        assert "hunter2" not in told
