"""What a job logs reaches its run while the job runs: all of it, each thing once, whoever dies."""

import os
import signal
import sys
from pathlib import Path

import pytest
from mlflow.entities import Run

from tests.support.workflows import Project, until
from tests.tracking.conftest import Tracked, workflow

pytestmark = pytest.mark.software("MLflow in a file")
"""MLflow is imported by the job, by each worker and by each controller's run: that adds up."""

LOGS = """
import mlflow, os, pathlib, time
from mlflow.models import Model

def wait(name):
    while not os.path.exists(name):
        time.sleep(0.05)

points = []
def metric(key, value, step):
    moment = int(time.time() * 1000)
    points.append(f"{key} {moment} {step} {value!r}")
    mlflow.log_metric(key, value, step=step, timestamp=moment)

print("begun")
with mlflow.start_run() as run:
    mlflow.log_param("depth", "3")
    mlflow.set_tag("colour", "red")
    for step in range(50):
        metric("loss/train", 1 / (step + 1), step)
    mlflow.log_text("first", "notes/a ü.txt")
    with mlflow.start_run(nested=True, run_name="inner"):
        mlflow.log_metric("inner", 7)
    pathlib.Path("one").touch()
    wait("go1")
    for step in range(50, 80):
        metric("loss/train", 1 / (step + 1), step)
    metric("again", 1.0, 0)
    mlflow.set_tag("colour", "blue")
    mlflow.log_text("second", "notes/a ü.txt")
    model = mlflow.initialize_logged_model("net", tags={"kind": "toy"})
    pathlib.Path("model").mkdir()
    pathlib.Path("model/MLmodel").write_text(f"model_id: {model.model_id}\\nflavors: null\\n")
    mlflow.MlflowClient().log_model_artifacts(model.model_id, "model")
    mlflow.finalize_logged_model(model.model_id, "READY")
    mlflow.log_metric("score", 0.5, step=1, model_id=model.model_id)
    pathlib.Path("large").write_bytes(os.urandom(1 << 21))
    mlflow.log_artifact("large")
    pathlib.Path("two").touch()
    wait("go2")
    metric("loss/train", 0.0, 80)
    mlflow.log_text("third", "notes/b.txt")
pathlib.Path("points").write_text("\\n".join(sorted(points)))
"""


def prepare(project: Project, python: str = sys.executable) -> None:
    project.write("logs.py", LOGS)
    project.write("Snakefile", workflow(train=f"{python} logs.py"))


def touch(project: Project, name: str) -> None:
    (project.workspace / name).touch()


def reached(project: Project, name: str) -> None:
    until((project.workspace / name).exists, f"the job's {name}")


def points(tracked: Tracked, run: Run) -> list[str]:
    """All points of all metrics that the job's own list tells, as it writes them."""
    found = []
    for key in ("loss/train", "again"):
        for m in tracked.client.get_metric_history(run.info.run_id, key):
            found.append(f"{m.key} {m.timestamp} {m.step} {m.value!r}")
    return sorted(found)


def count(tracked: Tracked, key: str) -> int:
    run = tracked.runs().get("train")
    return len(tracked.client.get_metric_history(run.info.run_id, key)) if run else 0


def _text(tracked: Tracked, run: Run, path: str) -> str:
    return Path(tracked.client.download_artifacts(run.info.run_id, path)).read_text()


def check(tracked: Tracked, said: str) -> None:
    """MLflow has all that the job logged, point by point, and nothing else."""
    runs = tracked.runs()
    assert set(runs) == {"train", "inner"}, said
    run = runs["train"]
    assert points(tracked, run) == (tracked.project.workspace / "points").read_text().split("\n")
    ours = ("mantik/",)
    assert {m for m in run.data.metrics if not m.startswith(ours)} == {
        "loss/train", "again", "score",
    }  # fmt: skip
    assert run.info.status == "FINISHED"
    assert run.data.params == {"depth": "3"}
    assert run.data.tags["colour"] == "blue"
    assert tracked.history(runs["inner"], "inner") == [(0, 7.0)]
    assert runs["inner"].data.tags["mlflow.parentRunId"] == run.info.run_id
    assert _text(tracked, run, "notes/a ü.txt") == "second"
    logged = {path for path in tracked.artifacts(run) if not path.startswith(ours)}
    assert logged == {"notes/a ü.txt", "notes/b.txt", "large"}
    (model,) = tracked.client.search_logged_models([run.info.experiment_id])
    assert (model.name, str(model.status), model.source_run_id) == (
        "net", "READY", run.info.run_id,
    )  # fmt: skip
    assert [(m.key, m.value, m.step) for m in model.metrics] == [("score", 0.5, 1)]


def test_what_a_job_logs_is_told_while_it_runs(tracked: Tracked) -> None:
    project = tracked.project
    prepare(project)
    running = project.start()
    reached(project, "one")

    until(lambda: count(tracked, "loss/train") == 50, "the first points")
    until(lambda: "inner" in tracked.runs(), "the nested run")
    until(lambda: tracked.runs()["train"].data.tags.get("colour") == "red", "the tag")
    until(lambda: tracked.runs()["train"].data.params == {"depth": "3"}, "the param")
    run = tracked.runs()["train"]
    assert run.info.status == "RUNNING"
    until(lambda: tracked.artifacts(run) == ["notes/a ü.txt"], "the artifact")
    touch(project, "go1")
    reached(project, "two")
    until(lambda: count(tracked, "loss/train") == 80, "more points")
    until(lambda: tracked.client.search_logged_models([run.info.experiment_id]), "the model")
    until(lambda: _text(tracked, run, "notes/a ü.txt") == "second", "the artifact's new text")
    # What is too large comes in the end.
    assert "large" not in tracked.artifacts(run)
    touch(project, "go2")

    check(tracked, running.end().ok().output)


def test_whoever_dies_meanwhile(elsewhere: Tracked) -> None:
    # At a firecREST site, into an SQLite file.
    project = elsewhere.project
    prepare(project, elsewhere.python)
    first = project.start("--nolock", "--rerun-incomplete")
    reached(project, "one")
    until(lambda: count(elsewhere, "loss/train") > 0, "the first points")
    os.kill(int(project.read(".snakemake/mantik/tracking/lock")), signal.SIGKILL)
    touch(project, "go1")
    reached(project, "two")
    until(lambda: count(elsewhere, "loss/train") == 80, "more points, by another worker")
    first.kill()
    touch(project, "go2")
    until((project.workspace / "train.txt").exists, "the job's end")

    check(elsewhere, project.run("--nolock", "--rerun-incomplete").ok().output)
