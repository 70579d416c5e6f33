"""Whole workflows: every run of an entry point is an MLflow run, and says what the job logged."""

import json
import sys

from tests.support.workflows import tells
from tests.tracking.conftest import PASSWORD, Tracked

HEAD = """
from pathlib import PurePosixPath
from snakemake_executor_plugin_mantik.mlproject import Call
"""
RULE = """
rule {name}:
    output: "{name}.txt"
    params: call=Call(PurePosixPath("."), "demo", "main", "abc", {arguments!r})
    shell: {command!r} " && echo > {{output}}"
"""


def rule(command: str, name: str = "train", arguments: dict[str, str] | None = None) -> str:
    """A rule that the executor takes for the run of an entry point."""
    return RULE.format(name=name, command=command, arguments=arguments or {})


CODE = """
import mlflow
print("trained")
with mlflow.start_run() as run:
    mlflow.log_param("seen", run.info.run_id)
    mlflow.log_param("alpha", "2")
    for step in range(3):
        mlflow.log_metric("loss/train", 1.0 / (step + 1), step=step)
    mlflow.log_metric("bad", float("nan"))
    mlflow.set_tag("colour", "grün")
    mlflow.log_text("hello", "notes/a.txt")
    with mlflow.start_run(nested=True, run_name="inner"):
        mlflow.log_metric("inner", 7)
"""


def test_what_a_job_logs(tracked: Tracked) -> None:
    project = tracked.project
    project.write("code.py", CODE)
    arguments = {"alpha": "1.50", "text": "it's $HOME"}
    project.write("Snakefile", HEAD + rule(f"{sys.executable} code.py", arguments=arguments))

    said = project.run().ok().output

    runs = tracked.runs()
    assert set(runs) == {"train", "inner"}, said
    run = runs["train"]
    assert run.info.status == "FINISHED"
    assert run.data.params == arguments | {"seen": run.info.run_id}
    assert tracked.history(run, "loss/train") == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert [str(value) for _, value in tracked.history(run, "bad")] == ["nan"]
    assert run.data.tags["colour"] == "grün"
    assert run.data.tags["mantik.site"] == "hpc1"
    assert run.data.tags["mantik.rule"] == "train"
    assert run.data.tags["mlflow.project.entryPoint"] == "main"
    assert run.data.tags["mlflow.project.backend"] == "mantik"
    assert run.data.tags["mantik.job_id"] in said
    assert tracked.history(runs["inner"], "inner") == [(0, 7.0)]
    assert runs["inner"].data.tags["mlflow.parentRunId"] == run.info.run_id
    assert runs["inner"].info.status == "FINISHED"
    assert tracked.artifacts(run) == [
        "mantik/backend-config.yaml", "mantik/log.txt", "mantik/script.sh", "notes/a.txt",
    ]  # fmt: skip
    tells(said, "alpha stays '1.50'; the job logged '2'")
    assert not [p for p in (project.workspace / ".snakemake").rglob("*") if p.is_file()]
    left = project.directory / ".snakemake/mantik/tracking"
    assert not [path for path in left.iterdir() if len(path.name) == 36]
    assert PASSWORD not in json.dumps(
        [path.read_text(errors="replace") for path in project.workspace.rglob("*")
         if path.is_file()]
    )  # fmt: skip
