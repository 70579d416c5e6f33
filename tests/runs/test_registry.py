"""Models of runs in a real registry: checked first, and nothing half done."""

import json
from pathlib import Path

import pytest
from mlflow.entities.logged_model_status import LoggedModelStatus
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from snakemake_executor_plugin_mantik.cli.runs import runs_app
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.runs.store import (
    ModelVersion,
    RunStore,
    only_store,
    register_model,
    unregister_model,
    versions_of_run,
)
from tests.tracking.conftest import TrackingServer, tracking_server

__all__ = ["tracking_server"]


SERVER = pytest.param("server", marks=pytest.mark.software("MLflow server"))


@pytest.fixture(params=["file", pytest.param("server", marks=[*SERVER.marks, pytest.mark.nightly])])
def store(request: pytest.FixtureRequest) -> RunStore:
    if request.param == "file":
        return RunStore(request.getfixturevalue("store_uri"))
    server: TrackingServer = request.getfixturevalue("tracking_server")
    return RunStore(server.uri)


def logged(client: MlflowClient, *models: str, status: str = "FINISHED") -> str:
    """A run that has logged models."""
    run_id: str = client.create_run("0").info.run_id
    for name in models:
        made = client.create_logged_model("0", name=name, source_run_id=run_id)
        client.finalize_logged_model(made.model_id, LoggedModelStatus.READY)
    client.set_terminated(run_id, status)
    return run_id


def names(store: RunStore) -> set[str]:
    return {model.name for model in store.client.search_registered_models()}


@pytest.mark.parametrize("store", ["file", SERVER], indirect=True)
def test_registered_once_and_taken_out(store: RunStore, tmp_path: Path) -> None:
    client, name = store.client, tmp_path.name
    one, two = logged(client, "model"), logged(client, "model", "other")

    made = register_model(store, client.get_run(one), name)
    assert made == ModelVersion(name, "1", new=True)
    version = client.get_model_version(name, "1")
    assert version.run_id == one
    (model,) = client.search_logged_models(["0"], f"source_run_id = '{one}'")
    assert version.source == f"models:/{model.model_id}"
    assert register_model(store, client.get_run(one), name) == ModelVersion(name, "1")
    with pytest.raises(UserError, match=f"taken by a model of {one}.*--new-version"):
        register_model(store, client.get_run(two), name, "model")
    # A version that somebody has added by hand stays, and so do its aliases.
    with only_store(store):
        client.create_model_version(name, version.source, two, model_id=model.model_id)
    client.set_registered_model_alias(name, "best", "2")
    client.set_registered_model_alias(name, "first", "1")

    with pytest.raises(UserError, match=f"it has aliases: {name}@first"):
        unregister_model(store, client.get_run(one))
    assert len(client.search_model_versions(f"name = '{name}'")) == 2
    unregister_model(store, client.get_run(one), force=True)
    aliases = client.get_registered_model(name).aliases.items()
    assert {alias: str(number) for alias, number in aliases} == {"best": "2"}
    # A server tells the model of the version that was added by hand, too.
    linked = json.loads(client.get_logged_model(model.model_id).tags["mlflow.modelVersions"])
    assert 1 not in [each["version"] for each in linked]

    other = f"{name}-other"
    register_model(store, client.get_run(two), other, "other")
    assert unregister_model(store, client.get_run(two), other) == [ModelVersion(other, "1")]
    assert other not in names(store)


def test_a_further_version(
    store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, name = store.client, tmp_path.name
    runs = [client.get_run(logged(client, "model")) for _ in range(3)]
    for run, number in [(runs[0], "1"), (runs[1], "2")]:
        made = register_model(store, run, name, new_version=True)
        assert made == ModelVersion(name, number, new=True)
    assert register_model(store, runs[0], name, new_version=True) == ModelVersion(name, "1")
    assert register_model(store, runs[1], name) == ModelVersion(name, "2")

    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(client, "create_model_version", broken)
        with pytest.raises(KeyboardInterrupt):
            register_model(store, runs[2], name, new_version=True)
    assert len(client.search_model_versions(f"name = '{name}'")) == 2


def test_what_cannot_be_registered(store: RunStore, tmp_path: Path) -> None:
    client, name = store.client, tmp_path.name
    cases: list[tuple[str, tuple[str, ...], str]] = [
        (logged(client), (name,), "it has logged no model"),
        (logged(client, "a", "b"), (name,), "several models: a, b"),
        (logged(client, "a"), (name, "b"), "logged no model b. Use one of: a"),
        (logged(client, "a"), ("x/y",), "may not contain / or :"),
        (logged(client, "a"), (" ",), "one line, and not blank"),
        (logged(client, "a"), ("x\ny",), "one line, and not blank"),
        (logged(client, "a"), ('it\'s "x"',), "both kinds of quotes"),
        (logged(client, "a"), ("x" * 257,), "256 characters"),
        (logged(client, "a", status="FAILED"), (name,), "its status is FAILED"),
    ]
    for run_id, given, told in cases:
        with pytest.raises(UserError, match=told):
            register_model(store, client.get_run(run_id), *given)
        with pytest.raises(UserError, match="no model of it is registered"):
            unregister_model(store, client.get_run(run_id))
    # No empty model is left behind.
    assert not names(store) & {given[0] for _, given, _ in cases}


def test_names_that_mlflow_cannot_search_for(store: RunStore, tmp_path: Path) -> None:
    client, names_of = store.client, [f"a {tmp_path.name}", f"both ' and \" {tmp_path.name}"]
    run_id = logged(client, "model")
    (model,) = client.search_logged_models(["0"], f"source_run_id = '{run_id}'")
    with only_store(store):
        for name in names_of:  # by somebody else's hand
            client.create_registered_model(name)
            client.create_model_version(
                name, f"models:/{model.model_id}", run_id, model_id=model.model_id
            )
    client.set_registered_model_alias(names_of[0], "best", "1")
    logged_as, registered = versions_of_run(store, client.get_run(run_id))
    assert logged_as == ["model"]
    assert sorted((v.name, v.aliases) for v in registered) == [
        (names_of[0], ("best",)), (names_of[1], ()),
    ]  # fmt: skip

    gone = unregister_model(store, client.get_run(run_id), force=True)

    assert sorted(version.name for version in gone) == names_of
    assert not names(store) & set(names_of)


def test_a_version_that_cannot_be_made_leaves_nothing(
    store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = logged(store.client, "model")

    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.client, "create_model_version", broken)
    with pytest.raises(KeyboardInterrupt):
        register_model(store, store.client.get_run(run_id), tmp_path.name)
    assert tmp_path.name not in names(store)


def test_mlflow_says_nothing_of_an_end_where_others_read_json(
    store: RunStore, capfd: pytest.CaptureFixture[str]
) -> None:
    run_id = store.client.create_run("0").info.run_id
    store.end(run_id, "KILLED", "why")
    assert store.run(run_id).info.status == "KILLED"
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    "words", [["name", "--force"], ["--remove", "--model", "m"], ["--remove", "--new-version"]]
)
def test_options_of_the_other_way_are_refused(words: list[str]) -> None:
    done = CliRunner().invoke(runs_app, ["register", "0" * 32, *words])
    assert isinstance(done.exception, UserError)
    assert words[1] in str(done.exception)
