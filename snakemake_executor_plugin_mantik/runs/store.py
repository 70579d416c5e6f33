"""Create, read and end runs in MLflow. Import late: importing mlflow takes seconds."""

import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mlflow
from mlflow.entities import Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ..common.errors import MantikError, UserError
from ..tracking.requests import find_or_make
from ..tracking.run import tracking_target, without_user, without_users
from .directories import RunRequest

_BATCH: Final = 100
ENDED: Final = ("FINISHED", "FAILED", "KILLED")
STATES: Final = ("SCHEDULED", "RUNNING", *ENDED)
_ERRORS: tuple[type[Exception], ...] = (MlflowException,)
with suppress(ImportError):  # mlflow-skinny, which supports servers only
    from sqlalchemy.exc import SQLAlchemyError

    _ERRORS += (SQLAlchemyError,)  # such as for a file that is no database

SITE: Final = "mantik.site"
KEY: Final = "mantik.key"
"""The tag by which a second request with the same key finds the run of the first."""

SUBMISSION: Final = "mantik.submission"
"""The tag by which the run of a killed submission can be found."""

_VALUE: Final = 6000
"""The longest value of a parameter that MLflow keeps, in characters."""


def tracking_uri(environ: Mapping[str, str]) -> str:
    """Return the tracking URI of the user's runs, absolute and without user and password."""
    found = tracking_target(environ, Path.cwd()).uri or without_user(mlflow.get_tracking_uri())
    return str(Path(found).absolute()) if ":" not in found else found


def store_exists(uri: str) -> bool:
    """Return whether a store may be queried: MLflow would create a SQLite file that is missing."""
    path = uri.removeprefix("sqlite:///")
    return path == uri or Path(path.partition("?")[0]).exists()


class RunStore:
    """An MLflow store: a server, or a SQLite file.

    All methods raise `MantikError` if the store does not answer or refuses.
    """

    def __init__(self, uri: str) -> None:
        """Connect to a store; `uri` has no user and password, which come from the environment."""
        self.uri = uri
        given = os.environ.get("MLFLOW_TRACKING_URI", "")
        with self.mlflow_errors():
            self.client = MlflowClient(given if without_user(given) == uri else uri)

    @contextmanager
    def mlflow_errors(self) -> Iterator[None]:
        """Turn MLflow's errors into `MantikError`."""
        try:
            yield
        except _ERRORS as error:
            raise MantikError(
                f"MLflow: {' '.join(without_users(str(error)).split())[:500]}",
                where=without_user(self.uri),
                do="Check that MLFLOW_TRACKING_URI is right and that the store is available",
            ) from None

    # Creating and ending

    def make(
        self, request: RunRequest, tags: Mapping[str, str], params: Mapping[str, str]
    ) -> RunRequest:
        """Create a run that is about to be submitted, with status SCHEDULED, and its experiment.

        Return the request with their ids and names. Long values of `params` are cut.
        """
        with self.mlflow_errors():
            found = find_or_make(self.client, request.experiment, request.experiment_id)
            if found.lifecycle_stage != "active":
                raise UserError(
                    f"the experiment {found.name} was deleted in MLflow", where=self.uri,
                    do="Restore it, or use another one",
                )  # fmt: skip
            made = self.client.create_run(
                found.experiment_id, start_time=int(time.time() * 1000), tags=dict(tags),
                run_name=request.name or None,
            )  # fmt: skip
            run_id = made.info.run_id
            logged = [Param(key, value[:_VALUE]) for key, value in params.items()]
            for at in range(0, len(logged), _BATCH):
                self.client.log_batch(run_id, params=logged[at : at + _BATCH])
            self.client.update_run(run_id, status="SCHEDULED")
        return replace(
            request, run_id=run_id, name=made.info.run_name,
            experiment_id=found.experiment_id, experiment=found.name,
        )  # fmt: skip

    def end(self, run_id: str, status: str, reason: str = "") -> None:
        """Set a run's final status, unless it has one, and a tag with the reason of a failure."""
        with self.mlflow_errors():
            if self.client.get_run(run_id).info.status in ENDED:
                return
            if reason and status != "FINISHED":
                self.client.log_batch(run_id, tags=[RunTag("mantik.reason", reason)])
            # MLflow prints the address of a server's run, into output that may be read as JSON.
            with redirect_stdout(io.StringIO()):
                self.client.set_terminated(run_id, status)

    # Reading

    def run(self, run_id: str) -> Any:
        """Return a run; None if it does not exist or was deleted."""
        with self.mlflow_errors():
            found = _existing(lambda: self.client.get_run(run_id))
        return found if found is not None and found.info.lifecycle_stage == "active" else None

    def search(self, condition: str, experiment: str = "", limit: int = 50) -> list[Any]:
        """Return the runs that match a filter of MLflow, the latest first."""
        with self.mlflow_errors():
            if experiment:
                found = self.client.get_experiment_by_name(experiment)
                ids = [found.experiment_id] if found is not None else []
            else:
                ids = [*self.experiments().values()]
            if not ids:
                return []
            order = ["attributes.start_time DESC"]
            return list(self.client.search_runs(ids, condition, max_results=limit, order_by=order))

    def experiments(self) -> dict[str, str]:
        """Return the ids of all experiments by their names."""
        with self.mlflow_errors():
            page = self.client.search_experiments()
            found = [*page]
            while page.token:
                page = self.client.search_experiments(page_token=page.token)
                found += page
        return {str(each.name): str(each.experiment_id) for each in found}

    def experiment_name(self, experiment_id: str) -> str:
        with self.mlflow_errors():
            return str(self.client.get_experiment(experiment_id).name)

    def delete(self, run_id: str) -> None:
        """Mark a run as deleted; `mlflow gc` removes it for good."""
        with self.mlflow_errors():
            self.client.delete_run(run_id)


def _existing(ask: Callable[[], Any]) -> Any:
    """Return what MLflow has; None if it does not exist."""
    try:
        return ask()
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def quote_filter(text: str) -> str:
    """Quote a text for a filter of MLflow.

    Raises:
        UserError: the text holds both kinds of quotes, which MLflow's filters cannot express.
    """
    for sign in ("'", '"'):
        if sign not in text:
            return f"{sign}{text}{sign}"
    raise UserError(
        f"MLflow cannot search for a name with both kinds of quotes: {text}",
        do="Use the id of a run, or leave the filter out",
    )


def join_conditions(parts: Sequence[str]) -> str:
    """Join filters with AND; leave out empty ones."""
    return " AND ".join(part for part in parts if part)


_VERSIONS = "mlflow.modelVersions"
"""The tag of a logged model from which MLflow's pages read its registered versions."""

_LONGEST: Final = 256
"""The longest name of a model that MLflow's databases keep, in characters."""


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model.

    Attributes:
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
    source = f"models:/{logged.model_id}"
    with store.mlflow_errors():
        if is_new := _existing(lambda: store.client.get_registered_model(name)) is None:
            store.client.create_registered_model(name)
        else:
            versions = store.client.search_model_versions(f"name = {quote_filter(name)}")
            for known in versions:
                if known.source == source:  # MLflow reports a version's model there alone
                    return _version(store, known)
            if not new_version:
                whose = ", ".join(sorted({str(v.run_id) for v in versions})) or "no run"
                raise UserError(
                    f"the name {name} is taken by a model of {whose}",
                    where=f"run {run_id}",
                    do="Register it as a further version with --new-version, or use another name",
                )
        try:
            with only_store(store):
                made = store.client.create_model_version(
                    name, source=source, run_id=run_id, model_id=logged.model_id
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
    condition = f"run_id = {quote_filter(run.info.run_id)}"
    return [_version(store, found) for found in store.client.search_model_versions(condition)]


@contextmanager
def only_store(store: RunStore) -> Iterator[None]:
    """Set MLflow's global tracking URI for a block: any client of MLflow looks up models there."""
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store.client.tracking_uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)


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


def _version(store: RunStore, found: Any) -> ModelVersion:
    name, number = found.name, str(found.version)
    there = store.client.get_registered_model(name).aliases
    return ModelVersion(name, number, tuple(a for a, held in there.items() if str(held) == number))


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
