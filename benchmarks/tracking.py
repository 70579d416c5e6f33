"""What it costs to make each job, and the workflow, an MLflow run in a local SQLite file.

Prints one line of JSON with CPU: of the controller beyond that of the same jobs untracked, of the
worker process, and of a program that does nothing but the same calls of MLflow's client.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from benchmarks.engine import cpu_seconds, opened, request
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.mlproject.call import Call
from snakemake_executor_plugin_mantik.staging.sources import Sources
from snakemake_executor_plugin_mantik.tracking import store
from snakemake_executor_plugin_mantik.tracking.run import Target, TrackedRun
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker
from snakemake_executor_plugin_mantik.tracking.worker import SETTINGS
from snakemake_executor_plugin_mantik.tracking.workflow import Workflow

SITE = "hpc1"
END_S = 600.0
PARAMS = {"alpha": "1.5", "depth": "3"}


def tracked(number: int) -> JobRequest:
    """A job that runs an entry point, as far as tracking knows."""
    call = Call(PurePosixPath(), "demo", "main", "abc", PARAMS)
    return replace(request(number, SITE), subject=TrackedRun(call, {"n": str(number)}))


def run(requests: Sequence[JobRequest], workdir: Path, uri: str) -> tuple[float, float]:
    """Run jobs; the CPU seconds of this process, and the seconds until the last one was there."""
    (workdir / "out").mkdir(parents=True)
    tracker = Tracker(
        workdir, Target(uri), {SITE: ""}, mask=str, tell=print, workflow=Workflow("Snakefile")
    )
    begun = cpu_seconds(), time.monotonic()
    tracker.start(tracked=bool(uri), open_tries=())
    engine = Engine(
        {SITE: opened(SITE, len(requests), workdir)}, journal=Journal(workdir / ".state"),
        workdir=workdir, state=workdir / ".state", tell=lambda _: None, observer=tracker,
    )  # fmt: skip
    engine.open([SITE], lambda _: Sources((), 0, ()))
    for each in requests:
        engine.submit(each)
    done = 0
    while done < len(requests):
        for outcome in engine.collect():
            assert outcome.succeeded, outcome.message
            engine.commit(outcome)
            done += 1
        time.sleep(0.02)
    seconds = time.monotonic() - begun[1]
    engine.close()
    tracker.end("finished")
    tracker.close(END_S)
    return cpu_seconds() - begun[0], seconds


def client_alone(runs: int, directory: Path) -> None:
    """What MLflow's client is asked for as many jobs, by hand."""
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    experiment = client.create_experiment("bench", (directory / "artifacts").as_uri())
    file = directory / "file"
    file.write_text("x" * 5000)
    identity = store.Identity("a" * 32, "1", "bench")
    for number in range(runs):
        tags = {f"mantik.{i}": str(number) for i in range(16)}
        made = client.create_run(experiment, tags=tags, run_name="run").info.run_id
        client.log_batch(made, params=[Param(k, v) for k, v in PARAMS.items()])
        client.update_run(made, status="SCHEDULED")
        client.log_batch(made, tags=[RunTag("mantik.job_id", "1"), RunTag("mantik.queue", "b")])
        client.update_run(made, status="RUNNING")
        # The job's own store is read, and is found to be empty.
        own = directory / "stores" / str(number)
        store.write_skeleton(own, "/w", str(number), identity, name="r", user="u", now=1.0)
        reader = MlflowClient(own.as_uri())
        reader.search_experiments()
        reader.search_runs(["1"])
        client.get_run(made)
        for _ in range(3):
            client.log_artifact(made, str(file), "mantik")
        metrics = [Metric(f"mantik/{i}", 1.0, number, 0) for i in range(5)]
        client.log_batch(made, metrics=metrics, tags=[RunTag("mantik.exit_code", "0")])
        client.set_terminated(made, "FINISHED")


def measure(jobs: int) -> dict[str, float]:
    """The figures, per job."""
    os.environ.update(SETTINGS)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        plain, plain_s = run([request(n, SITE) for n in range(jobs)], directory / "plain", "")
        uri = f"sqlite:///{directory}/mlflow.db"
        own, own_s = run([tracked(n) for n in range(jobs)], directory / "tracked", uri)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        worker = usage.ru_utime + usage.ru_stime
        (directory / "alone").mkdir()
        command = [sys.executable, "-m", "benchmarks.tracking", "client", str(jobs)]
        subprocess.run([*command, str(directory / "alone")], check=True)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        alone = usage.ru_utime + usage.ru_stime - worker
    return {
        "controller_ms": (own - plain) / jobs * 1000,
        "worker_ms": worker / jobs * 1000,
        "client_ms": alone / jobs * 1000,
        "untracked_seconds": plain_s,
        "tracked_seconds": own_s,
    }


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client_alone(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(json.dumps(measure(int(sys.argv[1]))))
