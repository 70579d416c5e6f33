"""A job that goes on past its walltime is one MLflow run, whoever dies meanwhile."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest

from tests.e2e import test_long_training as long_training
from tests.support.workflows import Project, tells, until
from tests.tracking.conftest import HEAD, Tracked

pytestmark = pytest.mark.software("MLflow in a file")

EPOCHS, SEGMENTS = 8, 4
TRAIN = """
import os, sys, time
import mlflow

segment = int(os.environ["MANTIK_SEGMENT"])
print("segment", segment)
epoch = int(open("ckpt/epoch").read()) if os.path.exists("ckpt/epoch") else 0

def wait():
    open(f"begun-{segment}", "w").close()
    while os.path.exists(f"held-{segment}"):
        time.sleep(0.05)

def log(epoch):
    mlflow.log_metrics({"loss": epoch + segment / 10, "system/load": segment}, step=epoch)

with mlflow.start_run():
    mlflow.log_param("lr", 0.1)
    mlflow.log_metric("accuracy", segment)
    for _ in range(2):
        log(epoch)
        epoch += 1
        with open("ckpt/new", "w") as checkpoint:
            checkpoint.write(str(epoch))
        os.replace("ckpt/new", "ckpt/epoch")
    if epoch < 8:
        log(epoch)  # the next segment does this again
        mlflow.log_text("", f"epoch-{epoch}")
wait()
if epoch < 8 or os.path.exists("broken"):
    sys.exit(85 if epoch < 8 else 3)
open("model.txt", "w").close()
"""
RULE = """
rule train:
    input: "train.py"
    output: "model.txt"
    params: call=Call(PurePosixPath("."), "demo", "main", "abc", {{}})
    resources: mantik_continue=10, mantik_checkpoint="ckpt/"
    threads: 1
    shell: "{python} {{input}}"
"""


def prepare(tracked: Tracked) -> None:
    project = tracked.project
    text = project.config.read_text()
    assert "Resources:\n" in text
    project.config.write_text(text.replace("Resources:\n", "Resources:\n  Runtime: 600s\n"))
    project.write("train.py", TRAIN)
    project.write("Snakefile", HEAD + RULE.format(python=tracked.python))
    project.workspace.mkdir(parents=True)


def begun(project: Project, number: int) -> None:
    until((project.workspace / f"begun-{number}").exists, f"segment {number}")


def history(tracked: Tracked, key: str) -> list[tuple[int, float]]:
    return tracked.history(tracked.run(), key)


def ended_segments(tracked: Tracked) -> list[dict[str, object]]:
    return list(json.loads(tracked.run().data.tags.get("mantik.segments", "[]")))


def check(tracked: Tracked, status: str = "FINISHED") -> None:
    run = tracked.run()
    assert run.info.status == status
    # The first two of each segment, and the one that it did again.
    firsts = [epoch + (epoch - 1) // 2 / 10 if epoch else 0.0 for epoch in range(EPOCHS)]
    assert history(tracked, "loss") == list(enumerate(firsts))
    assert sorted(v for _, v in history(tracked, "accuracy")) == [0.0, 1.0, 2.0, 3.0]
    assert run.data.metrics["accuracy"] == 3.0
    # MLflow counts these from 0 in each segment.
    steps = [step for step, _ in history(tracked, "system/load")]
    assert len(set(steps)) == len(steps) == EPOCHS + SEGMENTS - 1
    segments = json.loads(run.data.tags["mantik.segments"])
    assert [each["segment"] for each in segments] == [1, 2, 3, 4]
    assert (
        len({each["attempt"] for each in segments}) == len({each["job"] for each in segments}) == 4
    )
    assert all(each["nodes"] and each["started"] <= each["ended"] for each in segments)
    attempts = tracked.project.attempts
    ran = [r.ran for r in attempts if r.ran is not None and r.outcome != "cancelled"]
    assert len(ran) == 4
    assert run.data.metrics["mantik/running_seconds"] == pytest.approx(sum(ran))
    logged = tracked.client.get_metric_history(run.info.run_id, "mantik/running_seconds")
    assert [metric.step for metric in logged] == [0, 1, 2, 3]
    cpu = tracked.client.get_metric_history(run.info.run_id, "mantik/cpu_seconds")
    assert all(a.value < b.value for a, b in pairwise(cpu))
    artifacts = tracked.artifacts(run)
    assert {"epoch-2", "epoch-4", "epoch-6", "mantik/log.txt"} <= set(artifacts)
    assert {f"mantik/segment-{n}/script.sh" for n in (1, 2, 3)} <= set(artifacts)


def test_all_segments_are_one_run(tracked: Tracked) -> None:
    """It is killed in the first segment; the others are sent ahead, two run while none is there."""
    project = tracked.project
    prepare(tracked)
    held = [project.workspace / f"held-{number}" for number in range(SEGMENTS)]
    for path in (held[0], held[2]):
        path.touch()
    first = project.start("--nolock", "--rerun-incomplete")
    begun(project, 0)
    until(lambda: len([r for r in project.attempts if r.site_jobs]) == 10, "the segments ahead")
    until(lambda: tracked.run().info.status == "RUNNING", "its run")
    run = tracked.run()
    first.kill()
    held[0].unlink()
    begun(project, 2)
    second = project.start("--nolock", "--rerun-incomplete")
    until(lambda: len(history(tracked, "loss")) == 7, "what three segments have logged")
    until(lambda: len(ended_segments(tracked)) == 2, "the segments that have ended")
    again = tracked.run()
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "RUNNING")
    [earlier, _] = ended_segments(tracked)
    assert earlier["attempt"] == again.data.tags["mantik.attempt_id"]
    held[2].unlink()
    second.end().ok()
    check(tracked)
    assert tracked.workflow().data.metrics["mantik/jobs_finished"] == 1
    assert not [record for record in project.attempts if not record.state.final]


@pytest.mark.nightly
def test_a_retry_after_segments_is_a_run_of_its_own(elsewhere: Tracked, tmp_path: Path) -> None:
    """At a firecREST site, into a file, and without a segment ahead."""
    project = elsewhere.project
    prepare(elsewhere)
    broken = project.workspace / "broken"
    broken.touch()
    said = project.run("--mantik-presubmit", "0").failed()
    tells(said, "exit code 3")
    check(elsewhere, "FAILED")
    before = elsewhere.run()
    assert before.data.metrics["mantik/exit_code"] == 3
    broken.unlink()
    project.write("train.py", TRAIN.replace("for _ in range(2)", "for _ in range(8 - epoch)"))
    project.run("--mantik-presubmit", "0").ok()
    runs = elsewhere.client.search_runs([before.info.experiment_id], "tags.mantik.rule = 'train'")
    [other] = [run for run in runs if run.info.run_id != before.info.run_id]
    assert other.info.status == "FINISHED"
    assert other.data.tags["mantik.retry_of"] == before.info.run_id
    assert other.data.tags["mantik.attempt"] == "2"


LONG = """
rule train:
    input: "train.py"
    output: "model.json"
    params: call=Call(PurePosixPath("."), "demo", "main", "abc", {{}})
    resources: mantik_continue=10, mantik_checkpoint="ckpt/", mantik_warn="10s"
    threads: 1
    shell: "{python} {{input}} {{config[outside]}}"
"""


@pytest.mark.nightly
def test_the_loss_of_a_long_training_has_each_step_once(tracked: Tracked, tmp_path: Path) -> None:
    """Three controllers die, a walltime ends in the middle of an epoch that was logged."""
    project = tracked.project
    prepare(tracked)
    config = project.config.read_text()
    assert "Runtime: 600s" in config
    project.config.write_text(config.replace("Runtime: 600s", "Runtime: 60s"))
    before_save = "    save(losses)\n"
    assert before_save in dedent(long_training.TRAIN)
    logged = '    mlflow.log_metric("loss", losses[-1], step=len(losses) - 1)\n'
    text = dedent(long_training.TRAIN).replace(before_save, logged + before_save)
    project.write("train.py", f"import mlflow\n{text}")
    project.write("Snakefile", HEAD + LONG.format(python=sys.executable))
    outside = tmp_path / "outside"
    outside.mkdir()
    long_training.train(project, outside, None)
    assert tracked.run().info.status == "FINISHED"
    losses = json.loads(project.read("model.json"))
    assert history(tracked, "loss") == list(enumerate(losses))
