"""The real `mlflow run --backend mantik`, waiting, not waiting, and interrupted."""

import json
import re
import signal

import pytest

from tests.runs.conftest import Runs
from tests.support.workflows import WAIT_S, tells, until

# A run takes half a dozen starts of Python, and MLflow's import in three of them.
pytestmark = pytest.mark.software("MLflow in a file")

LONG_S = 600.0
"""How long one command may take, seconds."""


def submitted(said: str) -> str:
    found = re.search(r"Run \(ID '([0-9a-f]{32})'\) submitted", said)
    assert found is not None, said
    return found[1]


@pytest.mark.nightly
def test_submitted_and_left(runs: Runs) -> None:
    runs.project.write("site.json", json.dumps({"config": str(runs.project.config)}))
    # The project's modules stand in for nothing of ours.
    runs.project.write("churn/mlflow.py", "raise SystemError\n")

    said, _ = runs.mlflow(
        "churn", "-c", "site.json", "-P", "alpha=3", "--run-name", "third",
        "--experiment-name", "other",
    ).communicate(timeout=LONG_S)  # fmt: skip

    run = runs.over(submitted(said))
    assert run.info.status == "FINISHED", runs.log(run.info.run_id)
    assert run.info.run_name == "third"
    assert runs.client.get_experiment(run.info.experiment_id).name == "other"
    assert run.data.params == {"alpha": "3", "data": "data.csv"}
    assert run.data.tags["mlflow.project.backend"] == "mantik"
    assert run.data.tags["mantik.site"] == "hpc1"
    (tried,) = runs.directory(run.info.run_id).attempts
    assert tried.outcome == "succeeded"
    assert runs.json("show", "third")["request"]["account"] == "sandbox"
    # The folder that it was submitted from is as it was.
    names = {path.name for path in (runs.project.directory / "churn").iterdir()}
    assert names == {"MLproject", "python_env.yaml", "train.py", "data.csv", "mlflow.py"}


def test_waited_for_and_interrupted(runs: Runs) -> None:
    config = json.dumps({"config": str(runs.project.config), "wait": True})
    running = runs.mlflow("churn", "-e", "waits", "-c", config, "--run-name", "second")
    until(lambda: runs.home.exists() and len(list(runs.home.glob("[0-9a-f]*"))) == 1, "it", WAIT_S)
    (directory,) = runs.home.glob("[0-9a-f]*")
    runs.started(directory.name)

    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=LONG_S)

    assert running.returncode != 0
    tells(said, "cancelling it", f"Run (ID '{directory.name}'): KILLED")
    run = runs.over(directory.name)
    # It has had its name from the start.
    assert (run.info.run_name, runs.directory(directory.name).request.name) == ("second", "second")
    assert run.info.status == "KILLED", said + runs.log(directory.name)
    (tried,) = runs.directory(directory.name).attempts
    assert tried.outcome == "cancelled"


def test_mistakes_are_told_in_words(runs: Runs) -> None:
    config = json.dumps({"config": str(runs.project.config)})
    running = runs.mlflow("churn", "-c", config, "-P", "alhpa=3", "-P", "alpha=x")

    said, _ = running.communicate(timeout=LONG_S)

    assert running.returncode == 1
    tells(said, "main.alhpa: is not a parameter of main", "did you mean alpha?")
    tells(said, "main.alpha: has to be a number, found 'x'")
    assert "Traceback" not in said
    assert runs.client.search_runs(["0"]) == []
    assert list(runs.home.iterdir()) == []
