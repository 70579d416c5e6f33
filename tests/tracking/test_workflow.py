"""Workflows of all kinds of rules: their own runs, those of their jobs, how they hang together."""

import json
from pathlib import Path

from snakemake_executor_plugin_mantik.tracking.publishing import RETRY_OF
from snakemake_executor_plugin_mantik.tracking.run import PARENT_RUN_TAG
from tests.support.workflows import FILES_STAY, tells
from tests.tracking.conftest import HEAD, Tracked, rule

RULES = """
rule all:
    localrule: True
    input: "train.txt", "unseen.txt", expand("b-{n}.txt", n=[1, 2])

rule prepare:
    output: "prepared-{n}.txt"
    params: depth=3, name="x y", rows=[1, 2], made=lambda wildcards: object()
    threads: 2
    shell: "PYTHON log.py && echo > {output}"

rule a:
    input: "prepared-{n}.txt"
    output: "a-{n}.txt"
    group: "pair"
    shell: "echo > {output}"

rule b:
    input: "a-{n}.txt"
    output: "b-{n}.txt"
    group: "pair"
    shell: "echo > {output}"

rule unseen:
    input: "prepared-1.txt"
    output: "unseen.txt"
    resources: mantik_track="none"
    shell: "echo > {output}"
"""
LOG = "import mlflow\nwith mlflow.start_run():\n    mlflow.log_metric('m', 1)\n"
FAILS_ONCE = "test -e {once} || (touch {once}; seq 1 100000 | sha256sum; exit 4)"


def test_all_of_a_workflow(elsewhere: Tracked) -> None:
    project = elsewhere.project
    project.write("log.py", LOG)
    secret = "hunter2-hunter2"
    kept = (project.directory / "runs").as_uri()
    above = elsewhere.client.create_run(elsewhere.client.create_experiment("digits", kept))
    project.extra["MLFLOW_RUN_ID"] = above.info.run_id
    train = rule(FAILS_ONCE.format(once=project.directory / "once"), arguments={"alpha": "1.50"})
    project.write("Snakefile", HEAD + RULES.replace("PYTHON", elsewhere.python) + train)
    options = ["--mantik-track", "all", "--retries", "1", "--config", f"db_password={secret}",
               "model={depth: 3}"]  # fmt: skip

    said = project.run(*options).ok().output

    (whole,) = elsewhere.workflows()
    assert (whole.info.run_name, whole.info.status) == (project.directory.name, "FINISHED"), said
    assert whole.data.params == {"db_password": "***", "model.depth": "3"}
    assert whole.data.tags[PARENT_RUN_TAG] == above.info.run_id
    assert "--retries 1" in whole.data.tags["mantik.command"]
    assert not [value for value in whole.data.tags.values() if secret in value]
    experiment = whole.info.experiment_id
    found = elsewhere.client.search_runs(
        [experiment], f"tags.`{PARENT_RUN_TAG}` = '{whole.info.run_id}'"
    )
    names = sorted(run.info.run_name for run in found)
    groups = ["group pair: a, b n=1", "group pair: a, b n=2"]
    assert names == [*groups, "prepare n=1", "prepare n=2", "train", "train"], said
    runs = {(run.info.run_name, run.info.status): run for run in found}
    prepared = runs["prepare n=1", "FINISHED"]
    assert prepared.data.params == {"n": "1", "depth": "3", "name": "x y"}
    assert prepared.data.metrics["m"] == 1
    assert prepared.data.metrics["mantik/cpu_seconds"] > 0
    hours = prepared.data.metrics["mantik/running_seconds"] * 2 / 3600
    assert abs(prepared.data.metrics["mantik/core_hours"] - hours) < 1e-9
    assert runs[groups[0], "FINISHED"].data.tags["mantik.members"] == '["a n=1", "b n=1"]'
    failed, tried_again = runs["train", "FAILED"], runs["train", "FINISHED"]
    assert failed.data.tags["mantik.attempt"] == "1"
    assert failed.data.metrics["mantik/cpu_seconds"] > 0
    assert tried_again.data.tags["mantik.attempt"] == "2"
    assert tried_again.data.tags[RETRY_OF] == failed.info.run_id
    assert tried_again.data.params == {"alpha": "1.50"}
    counted = {n: v for n, v in whole.data.metrics.items() if n.startswith("mantik/jobs_")}
    assert counted == {
        "mantik/jobs_finished": 6, "mantik/jobs_failed": 0, "mantik/jobs_killed": 0,
        "mantik/jobs_running": 0, "mantik/jobs_queued": 0,
    }  # fmt: skip
    files = elsewhere.artifacts(whole)
    assert files == [
        "mantik/Snakefile", "mantik/backend-configs/hpc2.yaml", "mantik/pipeline.html",
        "mantik/timeline.html",
    ]  # fmt: skip
    drawn = elsewhere.client.download_artifacts(whole.info.run_id, "mantik/pipeline.html")
    tells(Path(drawn).read_text(), project.directory.name)
    left = project.directory / ".snakemake/mantik/tracking"
    assert not [path for path in left.iterdir() if len(path.name) == 36]

    project.run(*options).ok()

    assert len(elsewhere.workflows()) == 1


def test_a_rule_says_what_makes_no_sense(elsewhere: Tracked) -> None:
    project = elsewhere.project
    project.write(
        "Snakefile",
        """
        rule all:
            output: "x"
            resources: mantik_track="yes please"
            shell: "touch x"
        """,
    )

    said = project.run().failed()

    tells(said, "nothing submitted", "mantik_track", "all, one or none", "'yes please'")
    assert not project.exists(".snakemake/mantik/journal.sqlite")


TWICE = """
import sys
from pathlib import Path
import mlflow

print("trained")
first = not Path(ONCE).exists()
with mlflow.start_run():
    mlflow.log_param("first", first)
    mlflow.log_metric("accuracy", 0.1 if first else 0.9)
    for step in range(2 if first else 3):
        mlflow.log_metric("loss", step + (0.5 if first else 0.7), step=step)
    mlflow.log_text("", f"first-{first}")
if first:
    Path(ONCE).touch()
    sys.exit(4)
"""


def test_retries_go_on_in_one_run(tracked: Tracked) -> None:
    project = tracked.project
    project.write("code.py", TWICE.replace("ONCE", repr(str(project.directory.parent / "once"))))
    text = rule(f"{tracked.python} code.py", arguments={"alpha": "1.50"})
    one = '    resources: mantik_track="one"\n    shell:'
    project.write("Snakefile", HEAD + text.replace("    shell:", one))

    said = project.run("--retries", "1").ok().output

    run = tracked.run()
    assert run.info.status == "FINISHED", said
    assert tracked.history(run, "loss") == [(0, 0.5), (1, 1.5), (2, 2.7)]
    assert tracked.history(run, "accuracy") == [(0, 0.1), (0, 0.9)]
    assert run.data.metrics["accuracy"] == 0.9
    assert run.data.params == {"alpha": "1.50", "first": "True"}
    assert "first is already 'True' in MLflow; the job logged 'False'" in said
    assert run.data.tags["mantik.attempt"] == "2"
    assert run.data.tags["mantik.exit_code"] == "0"
    assert "mantik.reason" not in run.data.tags
    attempts = json.loads(run.data.tags["mantik.segments"])
    assert [each["segment"] for each in attempts] == [1, 2]
    assert len({each["attempt"] for each in attempts}) == 2
    assert "exit code 4" in attempts[0]["end"]
    ran = [record.ran for record in project.attempts if record.ran is not None]
    assert len(ran) == 2
    assert abs(run.data.metrics["mantik/running_seconds"] - sum(ran)) < 0.1
    assert {"first-True", "first-False", "mantik/log.txt", "mantik/attempt-1/log.txt"} <= set(
        tracked.artifacts(run)
    )
    assert "mantik/attempt-2/log.txt" not in tracked.artifacts(run)


STAYING = """
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
LOG_AND_NOTE = """
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
    project.write("log.py", LOG_AND_NOTE)
    project.write("Snakefile", STAYING.replace("PYTHON", tracked.python))

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
