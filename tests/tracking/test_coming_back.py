"""Whoever dies, and whatever is down: each run is told once, in order, and no job waits long."""

import signal
import sys
import time
from functools import partialmethod
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.tracking.publishing import DETACHED
from snakemake_executor_plugin_mantik.tracking.run import PARENT_RUN_TAG, WAITING_REASON
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker
from tests.support.command import smk_mantik
from tests.support.gate import Gate
from tests.support.workflows import WAIT_S, Project, tells, until
from tests.tracking.conftest import Tracked, workflow

SLOW = """
import mlflow, os, pathlib, time
print("begun", flush=True)
with mlflow.start_run():
    mlflow.log_metric("m", 1)
    pathlib.Path("logged").touch()
    while not os.path.exists("go"):
        time.sleep(0.1)
    mlflow.log_metric("m", 2, step=1)
"""


def prepare(project: Project, python: str = sys.executable) -> None:
    project.write("slow.py", SLOW)
    project.write("Snakefile", workflow(train=f"{python} slow.py"))


def logged(project: Project) -> bool:
    return (project.workspace / "logged").exists()


def test_controller_killed(tracked: Tracked) -> None:
    project = tracked.project
    prepare(project, tracked.python)
    first = project.start("--nolock", "--rerun-incomplete")
    until(lambda: logged(project), "the job")
    until(lambda: tracked.run().info.status == "RUNNING", "the run")
    first.kill()
    project.go()

    said = project.run("--nolock", "--rerun-incomplete").ok().output

    assert "reattached" in said
    run, whole = tracked.run(), tracked.workflow()
    assert run.info.status == "FINISHED"
    assert tracked.history(run, "m") == [(0, 1.0), (1, 2.0)]
    assert run.data.tags[PARENT_RUN_TAG] == whole.info.run_id
    assert whole.info.status == "FINISHED"
    assert whole.data.metrics["mantik/jobs_finished"] == 1


CHAIN = """
    rule all:
        input: "b.txt"
    rule a:
        output: "a.txt"
        shell: "until test -e go; do sleep 0.1; done; echo 1 > {output}"
    rule b:
        input: "a.txt"
        output: "b.txt"
        resources: mantik_track="all"
        shell: "sleep 1; cp {input} {output}"
"""


def test_a_job_that_waited_for_another_while_nobody_looked(tracked: Tracked) -> None:
    project = tracked.project
    project.write("Snakefile", CHAIN)
    first = project.start("--nolock", "--rerun-incomplete")
    first.says("b: waits for a")
    until(tracked.runs, "its run")
    until(lambda: WAITING_REASON in tracked.run().data.tags, "what it waits for")
    assert tracked.run().info.status == "SCHEDULED"
    assert tracked.run().data.tags[WAITING_REASON] == "waits for a"
    first.kill()
    project.go()
    [b] = [record for record in project.attempts if record.rule == "b"]
    marker = project.workspace / b.paths.marker(0)
    until(marker.exists, "its end")
    over = marker.stat().st_mtime
    # Nobody looks for longer than an end in whole seconds, by the site's clock, may be off.
    until(lambda: time.time() > over + 3, "it to be long over")

    project.run("--nolock", "--rerun-incomplete").ok()

    run = tracked.run()
    assert (run.info.status, run.data.tags.get(WAITING_REASON, "")) == ("FINISHED", "")
    assert run.info.end_time <= 1000 * (over + 2), "it had ended before it was looked for"


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [True, False])
def test_ended_by_the_user(tracked: Tracked, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """With Ctrl-C, or by a command after the controller was killed."""
    project = tracked.project
    prepare(project)
    running = project.start("--nolock", "--rerun-incomplete")
    until(lambda: logged(project), "the job")
    until(lambda: tracked.run().info.status == "RUNNING", "the run")

    if killed:
        running.kill()
        # The command runs in this process, which outlives it.
        monkeypatch.setattr(Tracker, "close", partialmethod(Tracker.close, WAIT_S))
        said = smk_mantik(project, "cancel", "--all").ok().output
    else:
        said = running.interrupt().output

    run = tracked.run()
    assert run.info.status == "KILLED", said
    assert tracked.history(run, "m") == [(0, 1.0)], said
    log = tracked.client.download_artifacts(run.info.run_id, "mantik/log.txt")
    assert "begun" in Path(log).read_text()
    # Nobody goes on with it.
    assert tracked.workflow().info.status == "KILLED", said


def test_detached_and_another_workflow_meanwhile(tracked: Tracked) -> None:
    project = tracked.project
    waits = "touch logged; until test -e go; do sleep 0.1; done"
    project.write("Snakefile", workflow(train=waits))
    project.write("other/Snakefile", workflow(other="true"))
    running = project.start()
    # MLflow creates a run as one that runs: that its job does is known here first.
    running.says("train: runs at")

    running.process.send_signal(signal.SIGTERM)
    tells(running.end().output, "Detached")
    until(lambda: DETACHED in tracked.workflow().data.tags, "the tag")
    project.run("--snakefile", "other/Snakefile").ok()

    mine, other = tracked.workflows()
    assert (mine.info.status, other.info.status) == ("RUNNING", "FINISHED")
    assert mine.data.metrics["mantik/jobs_running"] == 1
    assert other.info.run_name == f"{project.directory.name}: other"
    project.go()

    project.run().ok()

    mine, _ = tracked.workflows()
    assert mine.info.status == "FINISHED"
    assert DETACHED not in mine.data.tags
    assert tracked.runs()["train"].data.tags[PARENT_RUN_TAG] == mine.info.run_id


def test_server_is_down_and_comes_back(gated: tuple[Tracked, Gate]) -> None:
    tracked, gate = gated
    project = tracked.project
    project.write(
        "log.py", "import mlflow\nwith mlflow.start_run():\n    mlflow.log_metric('m', 1)\n"
    )
    command = f"{tracked.python} log.py"
    project.write("Snakefile", workflow(one=command, two=command))
    gate.shut()

    said = project.run().ok().output

    tells(
        said,
        "MLflow cannot be updated now",
        "MLflow does not know everything about 3 runs yet",
        f"smk-mantik track -d {project.directory}",
    )
    assert not tracked.runs()
    gate.open()
    project.write("Snakefile", workflow(one=command, two=command, three="true"))
    said = project.run().ok().output

    runs = tracked.runs()
    assert set(runs) == {"one", "two", "three"}, said
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert tracked.history(runs["one"], "m") == [(0, 1.0)]
    assert len(runs["one"].data.tags["mantik.own_run_id"]) == 32
    assert "mantik.own_run_id" not in runs["three"].data.tags
