"""A workflow of all kinds of rules: its own run, those of its jobs, how they hang together."""

import sys
from pathlib import Path

from snakemake_executor_plugin_mantik.tracking.publishing import RETRY_OF
from snakemake_executor_plugin_mantik.tracking.run import PARENT_RUN_TAG
from tests.support.workflows import tells
from tests.tracking.conftest import Tracked
from tests.tracking.rules import HEAD, rule

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
    project.write("Snakefile", HEAD + RULES.replace("PYTHON", sys.executable) + train)
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
