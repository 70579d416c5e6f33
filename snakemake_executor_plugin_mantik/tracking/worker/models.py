"""Publish the logged models of a job's store. Part of the worker: needs mlflow."""

from collections.abc import Collection, Mapping
from pathlib import Path

from mlflow.entities import LoggedModel, LoggedModelStatus
from mlflow.tracking import MlflowClient
from ruamel.yaml import YAML

from snakemake_executor_plugin_mantik.tracking.worker.descriptions import read_mapping
from snakemake_executor_plugin_mantik.tracking.worker.published import Destination, Published
from snakemake_executor_plugin_mantik.tracking.worker.registered import VERSIONS_TAG
from snakemake_executor_plugin_mantik.tracking.worker.uploads import ArtifactUploads, none_below

_SOURCE_MODEL = "mantik.source_model"
"""The tag that names the model in a job's store that a model was made from."""


class Models:
    """Publishes the models of one store."""

    def __init__(
        self,
        client: MlflowClient,
        store: Path,
        destination: Destination,
        told: Published,
        *,
        live: bool,
    ) -> None:
        """Prepare; the arguments are those of `Replay`."""
        self._client = client
        self._store = store
        self._to = destination
        self._told = told
        self._again = told.doubt
        self._live = live
        self._uploads = ArtifactUploads(store, told, live=live)
        self._models = told.models

    def carry(self, model: LoggedModel, later: Collection[str]) -> None:
        """Create a model of the store in MLflow, if needed, and publish its files.

        `later` holds the paths in the store of files that are not complete yet.

        Raises:
            Exception: the server does not answer, answers with an error, or refuses.
        """
        over = model.status in (LoggedModelStatus.READY, LoggedModelStatus.FAILED)
        place = self._store / model.experiment_id / "models" / model.model_id
        below = place.relative_to(self._store).as_posix()
        # A model that still changes is of no use, and MLflow cannot change its first values later.
        if self._live and (not (over and none_below(later, below)) or self._is_over(model)):
            return
        run_id = self._told.runs.get(model.source_run_id or "", self._to.run_id)
        model_id, location = self._model(model, run_id)
        files = place / "artifacts"
        names = {
            "model_id": model_id, "model_uuid": model_id, "run_id": run_id,
            "artifact_path": location,
        }  # fmt: skip
        self._uploads.send(
            files,
            lambda directory: self._client.log_model_artifacts(model_id, str(directory)),
            lambda directory: _rename(directory / "MLmodel", names),
        )
        if over and model_id not in self._told.over:
            self._client.finalize_logged_model(model_id, model.status)
            self._told.over.add(model_id)

    def _is_over(self, model: LoggedModel) -> bool:
        return self._models.get(model.model_id) in self._told.over

    def _model(self, model: LoggedModel, run_id: str) -> tuple[str, str]:
        """Return the id and the artifact location of a model in MLflow; create it if needed."""
        experiment = self._told.experiments.get(model.experiment_id, self._to.experiment_id)
        name = f"{self._to.try_id}/{model.model_id}"
        known = None
        if model.model_id in self._models:
            known = self._client.get_logged_model(self._models[model.model_id])
        elif self._again:
            known = self._find_model(experiment, name)
        if known is None:
            tags = {tag: value for tag, value in (model.tags or {}).items() if tag != VERSIONS_TAG}
            known = self._client.create_logged_model(
                experiment, name=model.name, source_run_id=run_id,
                tags={**tags, _SOURCE_MODEL: name},
                params=dict(model.params or {}), model_type=model.model_type,
            )  # fmt: skip
        self._models[model.model_id] = known.model_id
        return known.model_id, known.artifact_location

    def _find_model(self, experiment: str, source: str) -> LoggedModel | None:
        found = self._client.search_logged_models(
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
