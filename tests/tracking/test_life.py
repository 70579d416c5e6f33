"""Whole workflows: every run of an entry point is an MLflow run, and says what the job logged."""

import os
import sys
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.common.errors import install_command
from tests.e2e.test_secrets import leaks
from tests.support.workflows import tells
from tests.tracking.conftest import HEAD, PASSWORD, Tracked, rule, workflow

CODE = """
import os
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
    with mlflow.start_span("step") as span:
        span.set_inputs({"x": 1})
    model = mlflow.initialize_logged_model(name="net")
    os.mkdir("net")
    with open("net/MLmodel", "w") as file:
        file.write("flavors: {}")
    client = mlflow.MlflowClient()
    client.log_model_artifacts(model.model_id, "net")
    mlflow.finalize_logged_model(model.model_id, "READY")
    mlflow.register_model(f"models:/{model.model_id}", NAME)
    client.set_registered_model_alias(NAME, "champion", "1")
"""


def test_what_a_job_logs(tracked: Tracked) -> None:
    project = tracked.project
    name = f"model of {tracked.experiment}".replace("/", " ")
    tracked.client.create_registered_model(name)
    tracked.client.create_model_version(name, "s3://here/model", await_creation_for=0)
    project.write("code.py", CODE.replace("NAME", repr(name)))
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
    version = tracked.client.get_model_version_by_alias(name, "champion")
    assert (str(version.version), version.run_id) == ("2", run.info.run_id)
    (trace,) = tracked.client.search_traces(
        locations=[run.info.experiment_id], run_id=run.info.run_id
    )
    assert (trace.data.spans[0].name, trace.data.spans[0].inputs) == ("step", {"x": 1})
    (model,) = tracked.client.search_logged_models([run.info.experiment_id])
    assert version.source == f"models:/{model.model_id}"
    assert model.tags["mlflow.modelVersions"].count('"version"') == 1
    uri = tracked.client.get_model_version_download_uri(name, "2")
    assert uri == model.artifact_location
    tells(said, "alpha is already '1.50' in MLflow; the job logged '2'")
    assert not [p for p in (project.workspace / ".snakemake").rglob("*") if p.is_file()]
    left = project.directory / ".snakemake/mantik/tracking"
    assert not [path for path in left.iterdir() if len(path.name) == 36]


def test_no_credential_is_at_the_site(tracked: Tracked, sandbox: Sandbox) -> None:
    project = tracked.project
    secret = "hunter2-hunter2"
    project.config.write_text(
        f"{project.place.config}\nEnvironment:\n  Variables: {{WANDB_API_KEY: {secret}}}\n"
    )
    project.write("Snakefile", workflow(train="printenv && cp -r .snakemake seen"))

    project.run().ok()

    kept = project.directory / ".snakemake" / "mantik" / "tracking"
    assert leaks(sandbox.directory, kept, words=(PASSWORD,)) == []
    assert [*project.workspace.glob("seen/**/meta.yaml")]
    run = tracked.run()
    for name in ("mantik/script.sh", "mantik/backend-config.yaml"):
        told = Path(tracked.client.download_artifacts(run.info.run_id, name)).read_text()
        assert "WANDB_API_KEY" in told
        assert secret not in told
        # What the script carried, a gzipped archive in base64, is data of the job.
        assert "H4sI" not in told


SCRIPT = "$(grep PPid /proc/$PPID/status | cut -f2)"
"""The process id of the job script, which is the parent of the command's parent."""


@pytest.mark.software("MLflow in a file")
def test_how_jobs_end(elsewhere: Tracked) -> None:
    # At a firecREST site, into an SQLite file named relative to the working directory.
    project = elsewhere.project
    project.write(
        "log.py",
        """
        import mlflow
        with mlflow.start_run():
            mlflow.log_metric("m", 1)
        """,
    )
    project.write(
        "Snakefile",
        workflow(
            crashes=f"{elsewhere.python} log.py && exit 3",
            stopped=f"{elsewhere.python} log.py && kill -TERM {SCRIPT} && sleep 30",
            vanished=f"{elsewhere.python} log.py && kill -KILL {SCRIPT} && sleep 30",
            untracked="printenv MLFLOW_RUN_ID MLFLOW_TRACKING_URI",
        ),
    )

    said = project.run("--keep-going").failed()

    runs = elsewhere.runs()
    whole = elsewhere.workflow()
    counted = ("finished", "failed", "killed", "running", "queued")
    counts = [whole.data.metrics[f"mantik/jobs_{how}"] for how in counted]
    assert (whole.info.status, counts) == ("FAILED", [1, 2, 1, 0, 0]), said
    states = {name: run.info.status for name, run in runs.items()}
    assert states == {
        "crashes": "FAILED", "stopped": "KILLED", "vanished": "FAILED", "untracked": "FINISHED",
    }, said  # fmt: skip
    assert runs["crashes"].data.tags["mantik.exit_code"] == "3"
    assert runs["crashes"].data.metrics["mantik/exit_code"] == 3
    assert runs["crashes"].data.tags["mantik.reason.kind"] == "exit_code"
    assert [runs[name].data.metrics["m"] for name in ("crashes", "stopped", "vanished")] == [1] * 3
    log = elsewhere.client.download_artifacts(runs["untracked"].info.run_id, "mantik/log.txt")
    run_id, uri = Path(log).read_text().split()[:2]
    assert run_id == runs["untracked"].info.run_id
    assert uri.startswith("file:///")
    assert project.exists("runs.db")


@pytest.mark.software("MLflow in a file")
def test_why_a_job_cannot_start(elsewhere: Tracked) -> None:
    elsewhere.project.write(
        "Snakefile",
        workflow(stuck="true").replace("    shell:", "    resources: runtime='72h'\n    shell:", 1),
    )

    said = elsewhere.project.run().failed()

    tags = elsewhere.runs()["stuck"].data.tags
    assert tags["mantik.waiting_reason"] == "PartitionTimeLimit", said
    assert tags["mantik.reason.kind"] == "rejected", said


def test_without_mlflow_here(tracked: Tracked) -> None:
    project = tracked.project
    project.write("Snakefile", workflow(train="true"))
    project.write("hide/sitecustomize.py", HIDE)
    project.extra["PYTHONPATH"] = f"{project.directory / 'hide'}:{os.environ.get('PYTHONPATH', '')}"

    said = project.run().ok().output

    tells(said, "not tracked", install_command("mlflow"))
    assert said.count("not tracked") == 1
    assert not tracked.runs()


HIDE = """
    import importlib.util
    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "mlflow" else real(name, *more)
"""
