"""Register and unregister the models of runs in MLflow's registry. Needs mlflow."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import mlflow
from mlflow.exceptions import MlflowException

from snakemake_executor_plugin_mantik.common.errors import UserError

from .store import RunStore, quote_filter

_VERSIONS = "mlflow.modelVersions"
"""The tag of a logged model from which MLflow's pages read its registered versions."""

_LONGEST: Final = 256
"""The longest name of a model that MLflow's databases keep, in characters."""


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model.

    Attributes:
        name: the registered model's name.
        number: the version's number.
        aliases: the version's aliases.
        new: whether this call registered it.
    """

    name: str
    number: str
    aliases: tuple[str, ...] = ()
    new: bool = False


def register_model(
    store: RunStore, run: Any, name: str, model: str = "", *, new_version: bool = False
) -> ModelVersion:
    """Register the model of a run that has finished.

    Registering the same model again under the same name is no error. Without `new_version`, `name`
    must not belong to another run's model; with it, the model becomes a further version there, or
    the first. `model` chooses a logged model by name, if the run has logged several.

    Raises:
        UserError: the model cannot be registered; nothing was changed.
        MantikError: a request to MLflow fails.
    """
    run_id = run.info.run_id
    if run.info.status != "FINISHED":
        raise UserError(
            f"its status is {run.info.status}; only models of finished runs can be registered",
            where=f"run {run_id}",
            do=f"See its state: smk-mantik runs show {run_id}",
        )
    if why := _unfit(name):
        raise UserError(f"{name!r} cannot be a model's name: {why}", do="Use another name")
    logged = _chosen(store, run, model)
    with store.mlflow_errors():
        if is_new := _registered(store, name) is None:
            store.client.create_registered_model(name)
        elif (known := _again(store, name, logged)) is not None:
            return known
        elif not new_version:
            raise _taken(store, name, run_id)
        try:
            with only_store(store):
                made = store.client.create_model_version(
                    name, source=_source(logged), run_id=run_id, model_id=logged.model_id
                )
        except BaseException:
            if is_new:
                store.client.delete_registered_model(name)
            raise
        link = [{"name": name, "version": int(made.version)}]
        linked = json.loads(logged.tags.get(_VERSIONS, "[]"))
        store.client.set_logged_model_tags(logged.model_id, {_VERSIONS: json.dumps(linked + link)})
    return ModelVersion(name, str(made.version), new=True)


def _unfit(name: str) -> str:
    """Return why a model cannot be registered, or found again, by a name; empty: it can."""
    if not name.strip() or not name.isprintable():
        return "it has to be one line, and not blank"
    if set(name) & set("/:"):
        return "it may not contain / or :"
    if {"'", '"'} <= set(name):
        return "it may not contain both kinds of quotes"
    return f"it may have at most {_LONGEST} characters" if len(name) > _LONGEST else ""


def versions_of_run(store: RunStore, run: Any) -> tuple[list[str], list[ModelVersion]]:
    """Return the names of the models that a run has logged, and their registered versions."""
    with store.mlflow_errors():
        return sorted({model.name for model in _logged(store, run)}), _versions(store, run)


def _versions(store: RunStore, run: Any) -> list[ModelVersion]:
    return [
        ModelVersion(v.name, str(v.version), _aliases(store, v.name, v.version))
        for v in store.client.search_model_versions(f"run_id = {quote_filter(run.info.run_id)}")
    ]


@contextmanager
def only_store(store: RunStore) -> Iterator[None]:
    """Set MLflow's global tracking URI for a block: any client of MLflow looks up models there."""
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store.client.tracking_uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)


def _again(store: RunStore, name: str, logged: Any) -> ModelVersion | None:
    """Return the version of a model under a name; None if there is none."""
    versions = store.client.search_model_versions(f"name = {quote_filter(name)}")
    # MLflow reports a version's model in its source alone.
    for version in versions:
        if version.source == _source(logged):
            return ModelVersion(name, str(version.version), _aliases(store, name, version.version))
    return None


def _taken(store: RunStore, name: str, run_id: str) -> UserError:
    versions = store.client.search_model_versions(f"name = {quote_filter(name)}")
    whose = ", ".join(sorted({str(v.run_id) for v in versions})) or "no run"
    return UserError(
        f"the name {name} is taken by a model of {whose}",
        where=f"run {run_id}",
        do="Register it as a further version with --new-version, or use another name",
    )


def unregister_model(
    store: RunStore, run: Any, name: str = "", *, force: bool = False
) -> list[ModelVersion]:
    """Remove the versions of a run's models from the registry and return them.

    Also removes a registered model without a version left. With `name`, removes only versions of
    this registered model. With `force`, also removes versions with aliases, and the aliases.

    Raises:
        UserError: no version is registered, or one has an alias and `force` is not set; nothing
            was changed.
        MantikError: a request to MLflow fails.
    """
    run_id = run.info.run_id
    with store.mlflow_errors():
        found = [v for v in _versions(store, run) if not name or v.name == name]
        if not found:
            which = f" as {name}" if name else ""
            raise UserError(
                f"no model of it is registered{which}", where=f"run {run_id}",
                do=f"See what is: smk-mantik runs show {run_id}",
            )  # fmt: skip
        held = [f"{v.name}@{alias}" for v in found for alias in v.aliases]
        if held and not force:
            raise UserError(
                f"it has aliases: {', '.join(held)}",
                where=f"run {run_id}",
                do="Move them to another version, or add --force",
            )
        for version in found:
            for alias in version.aliases:
                store.client.delete_registered_model_alias(version.name, alias)
            store.client.delete_model_version(version.name, version.number)
            # Not by a search: MLflow's conditions cannot hold a name with both kinds of quotes.
            if not store.client.get_registered_model(version.name).latest_versions:
                store.client.delete_registered_model(version.name)
        _unlink(store, run, found)
    return found


def _unlink(store: RunStore, run: Any, gone: Sequence[ModelVersion]) -> None:
    names = {(v.name, v.number) for v in gone}
    for model in _logged(store, run):
        with suppress(ValueError):
            known = json.loads(model.tags.get(_VERSIONS, "[]"))
            left = [v for v in known if (v["name"], str(v["version"])) not in names]
            if left != known:
                store.client.set_logged_model_tags(model.model_id, {_VERSIONS: json.dumps(left)})


def _source(logged: Any) -> str:
    return f"models:/{logged.model_id}"


def _registered(store: RunStore, name: str) -> Any:
    try:
        return store.client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _aliases(store: RunStore, name: str, version: object) -> tuple[str, ...]:
    there = store.client.get_registered_model(name).aliases
    return tuple(alias for alias, number in there.items() if str(number) == str(version))


def _logged(store: RunStore, run: Any) -> list[Any]:
    condition = f"source_run_id = {quote_filter(run.info.run_id)}"
    return list(store.client.search_logged_models([run.info.experiment_id], condition))


def _chosen(store: RunStore, run: Any, name: str) -> Any:
    """Return the logged model of a name, the latest of several; empty: of the only name."""
    with store.mlflow_errors():
        logged = _logged(store, run)
    names = sorted({model.name for model in logged})
    where = f"run {run.info.run_id}"
    if not logged:
        raise UserError(
            "it has logged no model", where=where,
            do="Log one where it is trained, such as with mlflow.sklearn.log_model(…)",
        )  # fmt: skip
    if name and name not in names:
        raise UserError(
            f"it has logged no model {name}", where=where, do=f"Use one of: {', '.join(names)}"
        )
    if not name and len(names) > 1:
        raise UserError(
            f"it has logged several models: {', '.join(names)}", where=where,
            do="Choose one with --model",
        )  # fmt: skip
    meant = [model for model in logged if model.name == (name or names[0])]
    return max(meant, key=lambda model: model.creation_timestamp)
