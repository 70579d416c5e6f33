"""MLflow's tracking server on a real database, with artifacts in a real S3 storage of its own.

What it holds in the end, as seen where it keeps it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real import mariadb
from tests.support.daemons import Daemon
from tests.support.needs import require
from tests.support.ports import free_port
from tests.support.s3 import S3, rclone
from tests.support.sandbox import wait_for
from tests.tracking import test_life
from tests.tracking.conftest import HEAD, Tracked, TrackingServer, python, rule, tracked

__all__ = ["python", "tracked"]

pytestmark = pytest.mark.software("MLflow")

BUCKET = "artifacts"


@pytest.fixture(scope="session")
def artifact_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A storage for the tracking server alone."""
    with rclone(tmp_path_factory.mktemp("artifact-store")) as s3:
        s3.client().create_bucket(Bucket=BUCKET)
        yield s3


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty database on a server of its own."""
    require([name for name in mariadb.PROGRAMS if mariadb.found(name) is None], "MLflow")
    directory = tmp_path_factory.mktemp("database")
    port = free_port()
    arguments = mariadb.prepare(directory, port, "mlflow", "a-password", "runs")
    program = mariadb.found("mariadbd")
    assert program is not None
    server = Daemon([program, *arguments], directory, directory / "log")
    server.start()
    try:
        wait_for(lambda: mariadb.answers(port), mariadb.INSTALL_S)
        yield f"mysql+pymysql://mlflow:a-password@127.0.0.1:{port}/runs"
    finally:
        server.stop()


@pytest.fixture(scope="session")
def tracking_server(
    database: str, artifact_store: S3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrackingServer]:
    server = TrackingServer(
        tmp_path_factory.mktemp("mlflow"), free_port(), database, f"s3://{BUCKET}/of/mlflow",
        {
            "MLFLOW_S3_ENDPOINT_URL": artifact_store.url,
            "AWS_ACCESS_KEY_ID": artifact_store.access_key,
            "AWS_SECRET_ACCESS_KEY": artifact_store.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        },
    )  # fmt: skip
    server.start()
    yield server
    server.stop()


@pytest.mark.nightly
def test_what_a_job_logs(tracked: Tracked) -> None:
    test_life.test_what_a_job_logs(tracked)


CODE = """
import mlflow
import sklearn.linear_model
model = sklearn.linear_model.LinearRegression().fit([[0], [1]], [0, 2])
with mlflow.start_run():
    mlflow.log_metric("loss", 0.5)
    mlflow.sklearn.log_model(model, name="line")
    with open("large.bin", "wb") as file:
        file.write(b"x" * (6 << 20))
    mlflow.log_artifact("large.bin", "deep/er")
"""


@pytest.mark.nightly
def test_what_lies_where(
    tracked: Tracked, artifact_store: S3, database: str, tmp_path: Path
) -> None:
    """Rows in the database, objects in the storage, a model that is registered and loaded again."""
    import mlflow
    import sqlalchemy

    tracked.project.write("code.py", CODE)
    tracked.project.write("Snakefile", HEAD + rule(f"{sys.executable} code.py", arguments={}))

    said = tracked.project.run().ok().output

    run = tracked.runs()["train"]
    assert run.data.metrics["loss"] == 0.5, said
    with sqlalchemy.create_engine(database).connect() as connection:
        rows = connection.execute(
            sqlalchemy.text("SELECT value FROM metrics WHERE run_uuid = :run AND `key` = 'loss'"),
            {"run": run.info.run_id},
        ).all()
    assert [row.value for row in rows] == [0.5]
    stored = artifact_store.client().list_objects_v2(Bucket=BUCKET)["Contents"]
    sizes = {each["Key"].rpartition("/")[2]: each["Size"] for each in stored}
    assert sizes["large.bin"] == 6 << 20
    (model,) = tracked.client.search_logged_models([run.info.experiment_id])
    mlflow.set_tracking_uri(tracked.uri)
    registered = mlflow.register_model(f"models:/{model.model_id}", "line")
    loaded = mlflow.sklearn.load_model(f"models:/line/{registered.version}")
    assert loaded.predict([[2]]) == pytest.approx([4])
