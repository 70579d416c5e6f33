"""Jobs that log to the tracking server themselves: what they get, and who has to know of it."""

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.tracking.run import direct_remark, sent_variables
from tests.e2e.test_secrets import leaks
from tests.support.workflows import tells
from tests.tracking.conftest import PASSWORD, Tracked, TrackingServer, workflow

LOGS = """
import mlflow, os, sys
mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
with mlflow.start_run() as run:
    mlflow.log_metric("m", 1, step=3)
    seen = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    print("seen", seen, os.environ["MLFLOW_TRACKING_PASSWORD"] == sys.argv[1][::-1])
"""


@pytest.mark.parametrize(
    "uri",
    [
        "", "sqlite:///runs.db", "file:///tmp/runs", "/tmp/runs", "databricks",
        "http://127.0.0.1:5000", "https://localhost", "http://[::1]:5000", "http://0.0.0.0:5000",
        "http://me:hunter2@localhost:5000",
    ],
)  # fmt: skip
def test_what_no_node_can_reach_is_refused(uri: str) -> None:
    with pytest.raises(UserError) as refused:
        sent_variables({"MLFLOW_TRACKING_URI": uri})

    assert "leave the option out" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_what_is_sent_and_told() -> None:
    environ = {
        "MLFLOW_TRACKING_URI": "https://me:hunter2@mlflow.example", "PATH": "/bin",
        "MLFLOW_TRACKING_TOKEN": "t0ken", "MLFLOW_TRACKING_PASSWORD": "",
        "MLFLOW_TRACKING_INSECURE_TLS": "true", "MLFLOW_TRACKING_CLIENT_CERT_PATH": "/here",
    }  # fmt: skip

    assert sent_variables(environ) == {
        "MLFLOW_TRACKING_URI": "https://me:hunter2@mlflow.example",
        "MLFLOW_TRACKING_TOKEN": "t0ken", "MLFLOW_TRACKING_INSECURE_TLS": "true",
    }  # fmt: skip
    told = direct_remark(environ)
    assert "MLFLOW_TRACKING_TOKEN, the password in MLFLOW_TRACKING_URI" in told
    assert "hunter2" not in told
    assert "t0ken" not in told
    assert "none is set" in direct_remark({"MLFLOW_TRACKING_URI": "https://mlflow.example"})


def test_a_job_logs_by_itself(
    tracked: Tracked, tracking_server: TrackingServer, sandbox: Sandbox
) -> None:
    project = tracked.project
    project.write("logs.py", LOGS)
    project.write("Snakefile", workflow(train=f"{tracked.python} logs.py {PASSWORD[::-1]}"))
    said = project.run("--mantik-track-direct").failed()
    tells(said, "127.0.0.1 means the node that it runs on", "leave the option out")
    assert not project.workspace.exists()
    # Written like this it is no address that anybody would take for one, but for resolvers.
    project.extra["MLFLOW_TRACKING_URI"] = f"http://127.1:{tracking_server.port}"

    said = project.run("--mantik-track-direct").ok().output

    tells(said, "credentials go to the sites: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD")
    run = tracked.run()
    assert run.info.status == "FINISHED", said
    assert tracked.history(run, "m") == [(3, 1.0)]
    log = tracked.client.download_artifacts(run.info.run_id, "mantik/log.txt")
    with open(log) as file:
        assert "seen {'m': 1.0} True" in file.read()
    # The job has removed it, and it is nowhere else.
    assert leaks(sandbox.directory, project.directory, words=(PASSWORD,)) == []
    assert not list(project.workspace.rglob("mlruns"))
