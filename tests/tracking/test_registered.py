"""Models that a job registered in its own store are registered in MLflow: all of them, once."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND
from mlflow.tracking import MlflowClient

from tests.tracking.test_replay import (
    OVERLOADED,
    SOURCE,
    Killed,
    Mortal,
    Replayed,
    begin,
    each_death,
    target,
    told,
)

__all__ = ["target", "told"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The store of a job that registered a logged model twice, and artifacts of its run."""
    root = tmp_path / "site" / "mlruns"
    begin(root, "digits")
    client = MlflowClient(tracking_uri=root.as_uri(), registry_uri=root.as_uri())
    model = client.create_logged_model("7", name="net", source_run_id=SOURCE)
    (root / "7" / "models" / model.model_id / "artifacts").mkdir(exist_ok=True)
    (root / "7" / "models" / model.model_id / "artifacts" / "MLmodel").write_text("flavors: {}\n")
    client.finalize_logged_model(model.model_id, "READY")
    client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": '[{"name": "not this"}]'})
    old = root / "7" / SOURCE / "artifacts" / "old ü"
    old.mkdir()
    (old / "MLmodel").write_text("flavors: {}\n")
    client.create_registered_model("digits", {"team": "vision"}, "Reads digits")
    # As the file store at the site writes them.
    at_site = "file:///at/the/site/.snakemake/mantik/tracking/ATTEMPT/mlruns"
    for source, model_id in (
        (f"models:/{model.model_id}", model.model_id),
        (f"{at_site}/7/{SOURCE}/artifacts/old%20%C3%BC", None),
        ("models:/digits/1", None),
        ("/scratch/elsewhere", None),
    ):
        number = str(
            client.create_model_version(
                "digits", "file:///x", SOURCE, {"source": source}, description=f"of {source}"
            ).version
        )
        meta = root / "models" / "digits" / f"version-{number}" / "meta.yaml"
        text = meta.read_text().replace("source: file:///x", f"source: {source}")
        if model_id:
            text = text.replace("model_id: null", f"model_id: {model_id}")
        meta.write_text(text)
    client.set_registered_model_alias("digits", "champion", "2")
    trace = root / "7" / "traces" / "tr-1"
    trace.mkdir(parents=True)
    (trace / "trace_info.yaml").write_text("trace_id: tr-1\n")
    return root


def versions(client: MlflowClient) -> dict[str, Any]:
    return {
        str(version.version): (version.tags["source"], version.description, version.aliases)
        for version in client.search_model_versions("name='digits'")
    }


def test_versions_come_over(told: Replayed) -> None:
    told.client.create_registered_model("digits")
    told.client.create_model_version("digits", "s3://elsewhere/model", tags={"source": "first"})

    told.replay()

    (model,) = told.client.search_logged_models([told.experiment_id])
    second, third, fourth = (told.client.get_model_version("digits", n) for n in "234")
    assert {second.source, fourth.source} == {model.artifact_location}
    artifacts = told.client.get_run(told.run_id).info.artifact_uri
    assert third.source == f"{artifacts}/old ü"
    assert {version.run_id for version in (second, third, fourth)} == {told.run_id}
    assert third.aliases == ["champion"]
    assert '"not this"' not in model.tags["mlflow.modelVersions"]
    assert model.tags["mlflow.modelVersions"].count('"digits"') == 2
    assert third.description.endswith("old%20%C3%BC")
    registered = told.client.get_registered_model("digits")
    assert (registered.description, registered.tags) == ("Reads digits", {"team": "vision"})
    line, trace = told.said
    assert trace.startswith("1 trace is left out: only a tracking server takes them")
    assert "digits is left out: its source /scratch/elsewhere is not among" in line
    assert len(versions(told.client)) == 4


@each_death
def test_killed_anywhere_and_repeated(told: Replayed, tmp_path: Path, step: int) -> None:
    whole = tmp_path / "whole.db"
    shutil.copyfile(tmp_path / "mlflow.db", whole)
    told.replay()
    expected = versions(told.client)
    assert len(expected) == 3
    died, alive = 0, False
    while not alive:
        copy = tmp_path / f"{died}.db"
        shutil.copyfile(whole, copy)
        client = MlflowClient(tracking_uri=f"sqlite:///{copy}")
        again = Replayed(client, told.store, told.run_id, told.experiment_id, [])
        mortal = Mortal(client, died + 1, (Killed(), OVERLOADED)[died % 2])
        with suppress(Killed, MlflowException):
            again.replay(mortal)
        alive = mortal._left > 0
        again.replay(again=True)
        assert versions(client) == expected, died
        died += step
    assert died > 12


def test_a_server_without_a_registry(told: Replayed, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(told.store / "models" / "digits" / "version-4")
    none = Mock(side_effect=MlflowException("no such endpoint", ENDPOINT_NOT_FOUND))
    monkeypatch.setattr(told.client, "create_registered_model", none)

    told.replay()

    (model,) = told.client.search_logged_models([told.experiment_id])
    line, _ = told.said
    assert "does not register the model digits, and 2 further versions; to do so later" in line
    assert f"mlflow.register_model('models:/{model.model_id}', 'digits')" in line
