"""Publish and register the models of a job's own store. Part of the worker: needs mlflow.

A job's MLflow numbers versions in the job's own store; the server numbers them anew. Each version
has a tag that names the one in the store, so that none is created twice.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

import mlflow
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.utils.uri import append_to_uri_path
from ruamel.yaml import YAML

from ..common.humanize import humanize_count
from .published import Replay
from .recorded import (
    REGISTRY,
    RecordedModel,
    RecordedRun,
    RecordedStore,
    RecordedVersion,
    read_mapping,
    read_texts,
    read_versions,
)
from .requests import is_refusal

VERSIONS_TAG: Final = "mlflow.modelVersions"
"""The tag in which a logged model lists its registered versions."""
_SOURCE_VERSION: Final = "mantik.source_version"
"""The tag that names the version in a job's store that a version was made from."""
_SOURCE_MODEL: Final = "mantik.source_model"
"""The tag that names the model in a job's store that a model was made from."""
_NO_REGISTRY: Final = frozenset(("ENDPOINT_NOT_FOUND", "FEATURE_DISABLED"))
_FORBIDDEN: Final = "PERMISSION_DENIED"
"""Error codes that are final here, unlike elsewhere: the run itself was just published, so neither
is the server down nor the token invalid."""


@dataclass(frozen=True)
class _Origin:
    """What a version is made from in MLflow.

    Attributes:
        uri: as `mlflow.register_model` takes it.
        source: as the registry takes it.
        model_id: of the logged model; None for artifacts of a run.
    """

    uri: str
    source: str
    run_id: str
    model_id: str | None


def register(at: Replay, source: RecordedStore) -> None:
    """Register all versions, once the models and artifacts that they name are published."""
    versions = read_versions(at.store)
    by_number = {(version.name, version.number): version for version in versions}
    for left, version in zip(reversed(range(len(versions))), versions, strict=True):
        origin = _origin(at, version, by_number, source)
        if origin is None:
            at.notify(
                f"the registered model {version.name} is left out: its source"
                f" {version.source[:100]} is not among what the job logged"
            )
            continue
        try:
            _register(at, version, origin)
        except MlflowException as error:
            none = error.error_code in _NO_REGISTRY
            if not (none or is_refusal(error) or error.error_code == _FORBIDDEN):
                raise
            further = f", and {humanize_count(left, 'further version')}" if none and left else ""
            at.notify(
                f"MLflow does not register the model {version.name}{further}; to do so later:"
                f" mlflow.register_model({origin.uri!r}, {version.name!r}) ({error})"
            )
            if none:
                return


def _origin(
    at: Replay,
    version: RecordedVersion,
    known: Mapping[tuple[str, str], RecordedVersion],
    source: RecordedStore,
) -> _Origin | None:
    """Return what a version is made from, if that has been published."""
    copied = re.fullmatch(r"models:/(.+)/(\d+)", version.source)
    if copied and not version.model_id:  # another version, whose source is recorded
        original = known.get((copied[1], copied[2]))
        before = {key: each for key, each in known.items() if each is not original}
        return _origin(at, original, before, source) if original is not None else None
    model = version.model_id or version.source.removeprefix("models:/")
    if model_id := at.published.models.get(model):
        there = at.client.get_logged_model(model_id)
        run_id, uri = there.source_run_id or at.run_id, f"models:/{model_id}"
        # The registry in a database looks for the model at MLflow's own tracking URI.
        own = at.client.tracking_uri
        found = own.startswith("http") or own == mlflow.get_tracking_uri()
        return _Origin(uri, uri if found else there.artifact_location, run_id, model_id)
    for run in source.runs:
        run_id = at.published.runs.get(run.id, "")
        path = _artifact(at, run, version.source)
        if run_id and path:
            root = at.client.get_run(run_id).info.artifact_uri
            source_uri = append_to_uri_path(root, path)
            return _Origin(f"runs:/{run_id}/{path}", source_uri, run_id, None)
    return None


def _artifact(at: Replay, run: RecordedRun, source: str) -> str:
    """Return the path of a source among a run's artifacts; empty if it is none of them."""
    root = at.store / run.experiment_id / run.id / "artifacts"
    for before in (f"/{run.experiment_id}/{run.id}/artifacts/", f"runs:/{run.id}/"):
        path = PurePosixPath(unquote(source).rpartition(before)[2])
        if before in unquote(source) and ".." not in path.parts and (root / path).is_dir():
            return str(path)
    return ""


def _register(at: Replay, version: RecordedVersion, origin: _Origin) -> None:
    _describe_model(at, version.name)
    mark = f"{at.attempt_id}/{version.name}/{version.number}"
    made = _find(at, origin.run_id, mark) if at.again else None
    if made is None:
        made = at.client.create_model_version(
            version.name, origin.source, origin.run_id, model_id=origin.model_id,
            tags={**version.tags, _SOURCE_VERSION: mark},
            description=version.description or None, await_creation_for=0,
        )  # fmt: skip
    for alias in version.aliases:
        at.client.set_registered_model_alias(version.name, alias, str(made.version))
    if origin.model_id is not None:
        _link(at, origin.model_id, {"name": version.name, "version": made.version})


def _describe_model(at: Replay, name: str) -> None:
    """Create a registered model or, if it exists, give it the job's tags and description."""
    place = at.store / REGISTRY / name
    tags = read_texts(place / "tags")
    description = str((read_mapping(place / "meta.yaml") or {}).get("description") or "")
    try:
        at.client.create_registered_model(name, tags, description or None)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
        for key, value in tags.items():
            at.client.set_registered_model_tag(name, key, value)
        if description:
            at.client.update_registered_model(name, description)


def _find(at: Replay, run_id: str, mark: str) -> Any:
    found = at.client.search_model_versions(f"run_id='{run_id}'")
    return next((each for each in found if each.tags.get(_SOURCE_VERSION) == mark), None)


def _link(at: Replay, model_id: str, version: Mapping[str, Any]) -> None:
    """List a version in its logged model, as MLflow's client does."""
    known = at.client.get_logged_model(model_id).tags.get(VERSIONS_TAG)
    versions: list[Any] = json.loads(known) if known else []
    if (version["name"], str(version["version"])) not in {
        (each["name"], str(each["version"])) for each in versions
    }:
        listed = json.dumps([*versions, version])
        at.client.set_logged_model_tags(model_id, {VERSIONS_TAG: listed})


# Logged models


def publish_model(at: Replay, model: RecordedModel) -> None:
    """Create a model of the store in MLflow, if needed, and publish its files."""
    known = at.published.models.get(model.id)
    place = at.store / model.experiment_id / "models" / model.id
    below = place.relative_to(at.store).as_posix()
    # A model that still changes is of no use, and MLflow cannot change its first values later.
    whole = model.status and not any(path.startswith(f"{below}/") for path in at.later)
    if at.live and (not whole or known in at.published.over):
        return
    run_id = at.published.runs.get(model.run_id, at.run_id)
    model_id, location = _model(at, model, run_id)
    files = place / "artifacts"
    names = {
        "model_id": model_id, "model_uuid": model_id, "run_id": run_id,
        "artifact_path": location,
    }  # fmt: skip
    at.upload_new(
        files,
        lambda directory: at.client.log_model_artifacts(model_id, str(directory)),
        lambda directory: _rename(directory / "MLmodel", names),
    )
    if model.status and model_id not in at.published.over:
        at.client.finalize_logged_model(model_id, LoggedModelStatus(model.status))
        at.published.over.add(model_id)


def _model(at: Replay, model: RecordedModel, run_id: str) -> tuple[str, str]:
    """Return the id and the artifact location of a model in MLflow; create it if needed."""
    experiment = at.published.experiments.get(model.experiment_id, at.experiment_id)
    name = f"{at.attempt_id}/{model.id}"
    known = None
    if model.id in at.published.models:
        known = at.client.get_logged_model(at.published.models[model.id])
    elif at.again:
        known = _find_model(at, experiment, name)
    if known is None:
        tags = {tag: value for tag, value in model.tags.items() if tag != VERSIONS_TAG}
        known = at.client.create_logged_model(
            experiment, name=model.name, source_run_id=run_id,
            tags={**tags, _SOURCE_MODEL: name},
            params=dict(model.params), model_type=model.type,
        )  # fmt: skip
    at.published.models[model.id] = known.model_id
    return known.model_id, known.artifact_location


def _find_model(at: Replay, experiment: str, source: str) -> Any:
    found = at.client.search_logged_models(
        [experiment], filter_string=f"tags.`{_SOURCE_MODEL}` = '{source}'"
    )
    return found[0] if found else None


def _rename(description: Path, names: Mapping[str, str]) -> None:
    """Replace the ids of the job's store in a model's description by those in MLflow."""
    known = read_mapping(description, aliases=True)
    if known is None:
        return  # not a valid description: keep the file as it is
    changed = known | {key: value for key, value in names.items() if key in known}
    if changed != known:
        # It may be a hard link to the job's own file.
        description.unlink()
        YAML(typ="safe").dump(changed, description)
