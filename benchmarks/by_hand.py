"""The calls of MLflow's client that tracking a workflow takes, made by hand, and nothing else.

Imports MLflow and nothing of ours, since all that this process takes is what MLflow takes.
"""

import sys
import tempfile
import time
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient


def track(client: MlflowClient, experiment: str, number: int, files: Path, own: Path) -> None:
    """One job: made, sent, begun and ended, with what is in its own store if it has logged."""
    tags = {f"mantik.{i}": str(number) for i in range(16)}
    run = client.create_run(experiment, tags=tags, run_name="run").info.run_id
    client.log_batch(run, params=[Param("alpha", "1.5"), Param("depth", "3")])
    client.update_run(run, status="SCHEDULED")
    client.log_batch(run, tags=[RunTag("mantik.job_id", "1"), RunTag("mantik.queue", "b")])
    client.update_run(run, status="RUNNING")
    if own.exists():
        reader = MlflowClient(own.as_uri())
        reader.search_experiments()
        (found,) = reader.search_runs(["1"])
        assert "epochs" not in client.get_run(run).data.params
        client.log_batch(run, params=[Param(k, v) for k, v in found.data.params.items()])
        values = [Metric("loss", 0.5, 1700000000000, step) for step in range(1, 11)]
        client.log_batch(run, metrics=values)
    client.log_artifacts(run, str(files), "mantik")
    metrics = [Metric(f"mantik/{i}", 1.0, number, 0) for i in range(5)]
    client.log_batch(run, metrics=metrics, tags=[RunTag("mantik.exit_code", "0")])
    client.set_terminated(run, "FINISHED")


def show(client: MlflowClient, run: str, files: Path) -> None:
    """How far the workflow is: counts and pictures, told in its beginning and its end."""
    client.log_batch(run, metrics=[Metric(f"mantik/jobs_{i}", 1.0, 0, 0) for i in range(7)])
    client.log_artifacts(run, str(files), "mantik")


def main() -> None:
    """Track as many jobs at an MLflow server, so many a second; print the CPU of this process."""
    uri, runs, pace, stores = sys.argv[1:]
    client = MlflowClient(uri)
    experiment = client.create_experiment(Path(stores).name)
    workflow = client.create_run(experiment, run_name="workflow").info.run_id
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for name in ("script.sh", "backend-config.yaml"):
            (Path(directory) / name).write_text("x" * 5000)
        client.log_artifacts(workflow, directory, "mantik")
        show(client, workflow, Path(directory))
        for number in range(int(runs)):
            time.sleep(max(0.0, begun + number / int(pace) - time.monotonic()))
            track(client, experiment, number, Path(directory), Path(stores) / str(number))
        show(client, workflow, Path(directory))
        client.set_terminated(workflow, "FINISHED")
    print(time.process_time())


if __name__ == "__main__":
    main()
