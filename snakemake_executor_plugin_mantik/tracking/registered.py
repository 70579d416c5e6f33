"""Publish and register the models of a job's own store. Part of the worker: needs mlflow.

A job's MLflow numbers versions in the job's own store; the server numbers them anew. Each version
has a tag that names the one in the store, so that none is created twice.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

import mlflow
from mlflow.entities import LoggedModel, LoggedModelStatus, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.uri import append_to_uri_path
from ruamel.yaml import YAML

from snakemake_executor_plugin_mantik.common.humanize import humanize_count

from .overview import is_refusal
from .published import Carrier, RecordedStore, none_below
from .repair import LONGEST_VALUE, read_mapping

REGISTRY: Final = "models"
"""The directory of a store that holds its registered models; those of runs lie elsewhere."""
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
class _Version:
    """A version of a registered model, as a job's store describes it."""

    name: str
    number: str
    source: str
    model_id: str
    description: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]


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


class Models(Carrier):
    """Publishes and registers the models of a store."""

    def register(self, source: RecordedStore) -> None:
        """Register all versions, once the models and artifacts that they name are published.

        Raises:
            Exception: the server does not answer, or answers with an error; try again later.
        """
        versions = list(_read_versions(self.store))
        by_number = {(version.name, version.number): version for version in versions}
        for left, version in zip(reversed(range(len(versions))), versions, strict=True):
            origin = self._origin(version, by_number, source)
            if origin is None:
                self.notify(
                    f"the registered model {version.name} is left out: its source"
                    f" {version.source[:100]} is not among what the job logged"
                )
                continue
            try:
                self._register(version, origin)
            except MlflowException as error:
                none = error.error_code in _NO_REGISTRY
                if not (none or is_refusal(error) or error.error_code == _FORBIDDEN):
                    raise
                further = (
                    f", and {humanize_count(left, 'further version')}" if none and left else ""
                )
                self.notify(
                    f"MLflow does not register the model {version.name}{further}; to do so later:"
                    f" mlflow.register_model({origin.uri!r}, {version.name!r}) ({error})"
                )
                if none:
                    return

    def _origin(
        self,
        version: _Version,
        known: Mapping[tuple[str, str], _Version],
        source: RecordedStore,
    ) -> _Origin | None:
        """Return what a version is made from, if that has been published."""
        copied = re.fullmatch(r"models:/(.+)/(\d+)", version.source)
        if copied and not version.model_id:  # another version, whose source is recorded
            original = known.get((copied[1], copied[2]))
            before = {key: each for key, each in known.items() if each is not original}
            return self._origin(original, before, source) if original is not None else None
        model = version.model_id or version.source.removeprefix("models:/")
        if model_id := self.published.models.get(model):
            there = self.client.get_logged_model(model_id)
            run_id, uri = there.source_run_id or self.to.run_id, f"models:/{model_id}"
            # The registry in a database looks for the model at MLflow's own tracking URI.
            own = self.client.tracking_uri
            found = own.startswith("http") or own == mlflow.get_tracking_uri()
            return _Origin(uri, uri if found else there.artifact_location, run_id, model_id)
        for run in source.runs:
            run_id = self.published.runs.get(run.info.run_id, "")
            path = self._artifact(run, version.source)
            if run_id and path:
                root = self.client.get_run(run_id).info.artifact_uri
                source_uri = append_to_uri_path(root, path)
                return _Origin(f"runs:/{run_id}/{path}", source_uri, run_id, None)
        return None

    def _artifact(self, run: Run, source: str) -> str:
        """Return the path of a source among a run's artifacts; empty if it is none of them."""
        root = self.store / run.info.experiment_id / run.info.run_id / "artifacts"
        for before in (
            f"/{run.info.experiment_id}/{run.info.run_id}/artifacts/",
            f"runs:/{run.info.run_id}/",
        ):
            path = PurePosixPath(unquote(source).rpartition(before)[2])
            if before in unquote(source) and ".." not in path.parts and (root / path).is_dir():
                return str(path)
        return ""

    def _register(self, version: _Version, origin: _Origin) -> None:
        self._describe_model(version.name)
        mark = f"{self.to.try_id}/{version.name}/{version.number}"
        made = self._find(origin.run_id, mark) if self.published.doubt else None
        if made is None:
            made = self.client.create_model_version(
                version.name, origin.source, origin.run_id, model_id=origin.model_id,
                tags={**version.tags, _SOURCE_VERSION: mark},
                description=version.description or None, await_creation_for=0,
            )  # fmt: skip
        for alias in version.aliases:
            self.client.set_registered_model_alias(version.name, alias, str(made.version))
        if origin.model_id is not None:
            self._link(origin.model_id, {"name": version.name, "version": made.version})

    def _describe_model(self, name: str) -> None:
        """Create a registered model or, if it exists, give it the job's tags and description."""
        place = self.store / REGISTRY / name
        tags = _read_tags(place / "tags")
        description = str((read_mapping(place / "meta.yaml") or {}).get("description") or "")
        try:
            self.client.create_registered_model(name, tags, description or None)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
                raise
            for key, value in tags.items():
                self.client.set_registered_model_tag(name, key, value)
            if description:
                self.client.update_registered_model(name, description)

    def _find(self, run_id: str, mark: str) -> ModelVersion | None:
        found = self.client.search_model_versions(f"run_id='{run_id}'")
        return next((each for each in found if each.tags.get(_SOURCE_VERSION) == mark), None)

    def _link(self, model_id: str, version: Mapping[str, Any]) -> None:
        """List a version in its logged model, as MLflow's client does."""
        known = self.client.get_logged_model(model_id).tags.get(VERSIONS_TAG)
        versions: list[Any] = json.loads(known) if known else []
        if (version["name"], str(version["version"])) not in {
            (each["name"], str(each["version"])) for each in versions
        }:
            listed = json.dumps([*versions, version])
            self.client.set_logged_model_tags(model_id, {VERSIONS_TAG: listed})

    # Logged models

    def carry_model(self, model: LoggedModel, later: Collection[str]) -> None:
        """Create a model of the store in MLflow, if needed, and publish its files.

        `later` holds the paths in the store of files that are not complete yet.

        Raises:
            Exception: the server does not answer, answers with an error, or refuses.
        """
        known = self.published.models.get(model.model_id)
        over = model.status in (LoggedModelStatus.READY, LoggedModelStatus.FAILED)
        place = self.store / model.experiment_id / "models" / model.model_id
        below = place.relative_to(self.store).as_posix()
        # A model that still changes is of no use, and MLflow cannot change its first values later.
        if self.live and (not (over and none_below(later, below)) or known in self.published.over):
            return
        run_id = self.published.runs.get(model.source_run_id or "", self.to.run_id)
        model_id, location = self._model(model, run_id)
        files = place / "artifacts"
        names = {
            "model_id": model_id, "model_uuid": model_id, "run_id": run_id,
            "artifact_path": location,
        }  # fmt: skip
        self.send_files(
            files,
            lambda directory: self.client.log_model_artifacts(model_id, str(directory)),
            lambda directory: _rename(directory / "MLmodel", names),
        )
        if over and model_id not in self.published.over:
            self.client.finalize_logged_model(model_id, model.status)
            self.published.over.add(model_id)

    def _model(self, model: LoggedModel, run_id: str) -> tuple[str, str]:
        """Return the id and the artifact location of a model in MLflow; create it if needed."""
        experiment = self.published.experiments.get(model.experiment_id, self.to.experiment_id)
        name = f"{self.to.try_id}/{model.model_id}"
        known = None
        if model.model_id in self.published.models:
            known = self.client.get_logged_model(self.published.models[model.model_id])
        elif self._again:
            known = self._find_model(experiment, name)
        if known is None:
            tags = {tag: value for tag, value in (model.tags or {}).items() if tag != VERSIONS_TAG}
            known = self.client.create_logged_model(
                experiment, name=model.name, source_run_id=run_id,
                tags={**tags, _SOURCE_MODEL: name},
                params=dict(model.params or {}), model_type=model.model_type,
            )  # fmt: skip
        self.published.models[model.model_id] = known.model_id
        return known.model_id, known.artifact_location

    def _find_model(self, experiment: str, source: str) -> LoggedModel | None:
        found = self.client.search_logged_models(
            [experiment], filter_string=f"tags.`{_SOURCE_MODEL}` = '{source}'"
        )
        return found[0] if found else None


def _read_versions(store: Path) -> Iterator[_Version]:
    """Read the registered versions of a store, the oldest first; leave out what is damaged."""
    found = []
    for meta in store.glob(f"{REGISTRY}/*/version-*/meta.yaml"):
        known = read_mapping(meta)
        if known is None or not known.get("source"):
            continue
        name, number = meta.parent.parent.name, meta.parent.name.removeprefix("version-")
        aliases = _read_tags(meta.parent.parent / "aliases")
        version = _Version(
            name, number, str(known["source"]), str(known.get("model_id") or ""),
            str(known.get("description") or ""), _read_tags(meta.parent / "tags"),
            tuple(alias for alias, of in sorted(aliases.items()) if of.strip() == number),
        )  # fmt: skip
        found.append((str(known.get("creation_timestamp")), name, len(number), number, version))
    yield from (version for *_, version in sorted(found, key=lambda each: each[:4]))


def _read_tags(directory: Path) -> dict[str, str]:
    """Read the files of a directory: their contents by their names."""
    tags = {}
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size <= LONGEST_VALUE:
            name = path.relative_to(directory).as_posix()
            tags[name] = path.read_text(encoding="utf-8", errors="replace")
    return tags


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
