"""Runs of rules whose outputs stay at their site."""

import sys

from tests.support.workflows import FILES_STAY, tells
from tests.tracking.conftest import Tracked

RULES = """
rule score:
    input: "model/weights.bin"
    output: "score.txt"
    params: model=lambda wildcards, input: input[0].rpartition(".")[0]
    shell: "PYTHON log.py score 2; wc -c < {input} > {output}"

rule train:
    input: "data/set.txt"
    output: "model/weights.bin"
    shell: "PYTHON log.py train 1; head -c 1000 /dev/zero > {output}"

rule first:
    output: temp("data/set.txt")
    group: "prepare"
    shell: "echo first > {output}.part; mv {output}.part {output}"
"""
LOG = """
import sys
import mlflow
with mlflow.start_run():
    mlflow.log_metric(sys.argv[1], float(sys.argv[2]))
    with open("notes.txt", "w") as file:
        file.write("notes")
    mlflow.log_artifact("notes.txt")
"""


def test_runs_of_rules_whose_outputs_stay(tracked: Tracked) -> None:
    project = tracked.project
    project.write("log.py", LOG)
    project.write("Snakefile", RULES.replace("PYTHON", sys.executable))

    said = project.run("--mantik-track", "all", *FILES_STAY).ok().output

    runs = tracked.runs()
    assert {name: run.info.status for name, run in runs.items()} == {
        "first": "FINISHED",
        "train": "FINISHED",
        "score": "FINISHED",
    }, said
    assert runs["train"].data.metrics["train"] == 1
    assert runs["score"].data.metrics["score"] == 2
    assert runs["score"].data.params["model"] == "model/weights"
    for name in ("train", "score"):
        assert "notes.txt" in tracked.artifacts(runs[name])
    assert not project.exists("model")
    assert not project.exists("score.txt")
    assert not (project.workspace / "data/set.txt").exists(), "temp()"
    tells(project.run("--mantik-track", "all", *FILES_STAY).ok().output, "Nothing to be done")
    assert len(tracked.runs()) == 3
