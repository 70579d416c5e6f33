"""Carries what a job logged into its own store over to its run. Part of the worker: needs mlflow.

Everything keeps its time and its step. To be repeated after it was broken off: what is there
already is not made twice. A piece that MLflow refuses (a name that it does not allow, a parameter
that has another value already) is told and left out; the rest goes on.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlflow.entities import (
    DatasetInput,
    Experiment,
    LoggedModel,
    LoggedModelInput,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from snakemake_executor_plugin_mantik.tracking.mending import Logged, prepare
from snakemake_executor_plugin_mantik.tracking.refusals import is_refusal

BATCH = 100
"""Parameters and tags per request: MLflow's limit."""
METRICS_BATCH = 1000
"""Metrics per request: MLflow's limit."""
PAGE = 1000
SOURCE_RUN = "mantik.source_run"
SOURCE_MODEL = "mantik.source_model"
"""Tags that tell from what in a job's store a run or model was made."""

_OURS = ("mantik.", "mlflow.source.", "mlflow.project.")
_NAME, _USER, _PARENT = "mlflow.runName", "mlflow.user", "mlflow.parentRunId"

T = TypeVar("T")


@dataclass(frozen=True)
class Destination:
    """The run that a store belongs to.

    Attributes:
        try_id: the try that made the store.
        run_id: MLflow's id of the run.
        experiment_id: where it is.
        source_id: the run's id in the store.
        source_experiment_id: the experiment's id there.
        name: the name that the run had in the store at first.
    """

    try_id: str
    run_id: str
    experiment_id: str
    source_id: str
    source_experiment_id: str
    name: str


@dataclass
class _Source:
    """What a store holds."""

    experiments: dict[str, Experiment]
    runs: list[Run]
    models: list[LoggedModel]
    metrics: list[Logged]


class Replay:
    """Carries one store over."""

    def __init__(
        self,
        client: MlflowClient,
        store: Path,
        destination: Destination,
        *,
        again: bool,
        status: str,
        tell: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            client: of the server that the run is at.
            store: the store's directory here.
            destination: where it goes.
            again: whether an earlier attempt may have been broken off.
            status: how runs ended that the job did not end.
            tell: called with what is left out, and why.
        """
        self._client = client
        self._store = store
        self._to = destination
        self._again = again
        self._status = status
        self._tell = tell
        self._runs = {destination.source_id: destination.run_id}
        self._models: dict[str, str] = {}
        self._experiments = {destination.source_experiment_id: destination.experiment_id}

    def run(self) -> None:
        """Carry it over.

        Raises:
            Exception: the server does not answer, or not well; to be repeated later.
        """
        source = self._read()
        children = [run for run in source.runs if run.info.run_id != self._to.source_id]
        for run in _parents_first(children):
            self._make_run(source, run)
        for model in source.models:
            self._piece(f"the model {model.name}", partial(self._make_model, model))
        for run in source.runs:
            self._fill(source, run)
        for run in children:
            if run.info.run_id in self._runs:
                ended = run.info.status if run.info.end_time else self._status
                self._client.set_terminated(
                    self._runs[run.info.run_id], ended, run.info.end_time or None
                )

    def _piece(self, what: str, act: Callable[[], T]) -> T | None:
        """Do something that MLflow may refuse without harm to the rest."""
        try:
            return act()
        except MlflowException as error:
            if not is_refusal(error):
                raise
            self._tell(f"{what} is left out: {_line(error)}")
            return None

    # What there is

    def _read(self) -> _Source:
        metrics = prepare(
            self._store, self._to.source_id, self._to.source_experiment_id, self._tell
        )
        client = MlflowClient(tracking_uri=self._store.as_uri())
        experiments = {
            e.experiment_id: e
            for e in _pages(
                lambda token: client.search_experiments(
                    view_type=ViewType.ACTIVE_ONLY, max_results=PAGE, page_token=token
                )
            )
        }
        ids = [e for e in experiments if (self._store / e).is_dir()]
        runs = list(
            _pages(lambda token: client.search_runs(ids, max_results=PAGE, page_token=token))
        )
        if self._to.source_id not in {run.info.run_id for run in runs}:
            self._tell("the job has removed or damaged its run in its own store")
        models: list[LoggedModel] = []
        if any((self._store / e / "models").is_dir() for e in ids):
            models = list(
                _pages(
                    lambda token: client.search_logged_models(
                        ids, max_results=PAGE, page_token=token
                    )
                )
            )
        return _Source(experiments, runs, models, metrics)

    # Runs

    def _make_run(self, source: _Source, run: Run) -> None:
        """A run that the job made besides its own."""
        info, name = run.info, f"{self._to.try_id}/{run.info.run_id}"
        experiment = self._experiment(source, info.experiment_id)
        if self._again and (known := self._find_run(experiment, name)):
            self._runs[info.run_id] = known
            return
        tags = {**run.data.tags, SOURCE_RUN: name}
        parent = tags.get(_PARENT)
        if parent is not None:
            tags[_PARENT] = self._runs.get(parent, parent)
        made = self._piece(
            f"the run {info.run_name}",
            lambda: self._client.create_run(
                experiment, start_time=info.start_time, tags=tags, run_name=info.run_name
            ),
        )
        if made is not None:
            self._runs[info.run_id] = made.info.run_id

    def _find_run(self, experiment: str, source: str) -> str | None:
        found = self._client.search_runs([experiment], f"tags.`{SOURCE_RUN}` = '{source}'")
        return found[0].info.run_id if found else None

    def _experiment(self, source: _Source, source_id: str) -> str:
        if source_id not in self._experiments:
            name = source.experiments[source_id].name
            known = self._client.get_experiment_by_name(name)
            self._experiments[source_id] = (
                known.experiment_id if known else self._client.create_experiment(name)
            )
        return self._experiments[source_id]

    def _fill(self, source: _Source, run: Run) -> None:
        run_id = self._runs.get(run.info.run_id)
        if run_id is None:
            return
        known = self._client.get_run(run_id)
        own = run.info.run_id == self._to.source_id
        self._metrics(source, run, run_id)
        self._params(run, known)
        if own:
            self._tags(run, run_id)
        self._inputs(run, known)
        self._outputs(run, known)
        artifacts = self._store / run.info.experiment_id / run.info.run_id / "artifacts"
        if artifacts.is_dir() and any(artifacts.iterdir()):
            self._client.log_artifacts(run_id, str(artifacts))

    def _params(self, run: Run, known: Run) -> None:
        new = []
        for name, value in run.data.params.items():
            there = known.data.params.get(name)
            if there is None:
                new.append(Param(name, value))
            elif there != value:
                self._tell(f"the parameter {name} stays {there!r}; the job logged {value!r}")
        self._batches("parameters", new, lambda some: {"params": some}, known.info.run_id)

    def _tags(self, run: Run, run_id: str) -> None:
        tags = [
            RunTag(name, value)
            for name, value in run.data.tags.items()
            if not name.startswith(_OURS)
            and name != _USER
            and not (name == _NAME and value == self._to.name)
        ]
        self._batches("tags", tags, lambda some: {"tags": some}, run_id)

    def _metrics(self, source: _Source, run: Run, run_id: str) -> None:
        """The metrics of a run, each for the model that it was logged for."""
        mine = [logged for logged in source.metrics if logged.run_id == run.info.run_id]
        # A run's own file does not tell of all its metrics for which model they are.
        of_model = {_key(m): m.model_id for m in mine if m.model_id is not None}
        there: set[tuple[object, ...]] = set()
        if self._again:
            for name in {m.key for m in mine}:
                there |= {_key(m) for m in self._client.get_metric_history(run_id, name)}
        unique = {_key(m): m for m in sorted(mine, key=lambda m: (m.timestamp, m.step))}
        metrics = [
            self._moved(logged, of_model.get(key), run_id)
            for key, logged in unique.items()
            if key not in there
        ]
        self._batches(
            "metrics", metrics, lambda some: {"metrics": some}, run_id, size=METRICS_BATCH
        )

    def _moved(self, logged: Logged, model: str | None, run_id: str) -> Metric:
        model_id = self._models.get(model) if model is not None else None
        if model_id is None:
            return Metric(logged.key, logged.value, logged.timestamp, logged.step)
        return Metric(
            logged.key, logged.value, logged.timestamp, logged.step, model_id=model_id,
            dataset_name=logged.dataset, dataset_digest=logged.digest, run_id=run_id,
        )  # fmt: skip

    def _batches(
        self,
        what: str,
        items: Sequence[Any],
        arguments: Callable[[Sequence[Any]], Mapping[str, Any]],
        run_id: str,
        *,
        size: int = BATCH,
    ) -> None:
        """Log all; where a batch is refused, one by one."""
        for start in range(0, len(items), size):
            some = items[start : start + size]
            try:
                self._client.log_batch(run_id, **arguments(some))
            except MlflowException as error:
                if not is_refusal(error):
                    raise
                for item in some:
                    self._piece(
                        f"{item.key} (of the {what})",
                        partial(self._client.log_batch, run_id, **arguments([item])),
                    )

    def _inputs(self, run: Run, known: Run) -> None:
        """The data sets that were used; a set is the same if name and digest are."""
        if run.inputs is None:
            return
        there = {(d.dataset.name, d.dataset.digest) for d in _inputs_of(known)}
        new = [d for d in _inputs_of(run) if (d.dataset.name, d.dataset.digest) not in there]
        used = [
            LoggedModelInput(self._models.get(m.model_id, m.model_id))
            for m in getattr(run.inputs, "model_inputs", None) or []
        ]
        if new or used:
            self._piece(
                "the data sets",
                lambda: self._client.log_inputs(known.info.run_id, datasets=new, models=used),
            )

    def _outputs(self, run: Run, known: Run) -> None:
        there = {m.model_id for m in getattr(known.outputs, "model_outputs", None) or []}
        new = [
            LoggedModelOutput(self._models[m.model_id], m.step)
            for m in getattr(run.outputs, "model_outputs", None) or []
            if m.model_id in self._models and self._models[m.model_id] not in there
        ]
        if new:
            self._piece(
                "the models' place in the run",
                lambda: self._client.log_outputs(known.info.run_id, new),
            )

    # Models

    def _make_model(self, model: LoggedModel) -> None:
        run_id = self._runs.get(model.source_run_id or "", self._to.run_id)
        experiment = self._experiments.get(model.experiment_id, self._to.experiment_id)
        name = f"{self._to.try_id}/{model.model_id}"
        known = self._find_model(experiment, name) if self._again else None
        if known is None:
            known = self._client.create_logged_model(
                experiment, name=model.name, source_run_id=run_id,
                tags={**(model.tags or {}), SOURCE_MODEL: name},
                params=dict(model.params or {}), model_type=model.model_type,
            )  # fmt: skip
        self._models[model.model_id] = known.model_id
        files = self._store / model.experiment_id / "models" / model.model_id / "artifacts"
        if files.is_dir() and any(files.iterdir()):
            _rename(files / "MLmodel", known, run_id)
            self._client.log_model_artifacts(known.model_id, str(files))
        if model.status in (LoggedModelStatus.READY, LoggedModelStatus.FAILED):
            self._client.finalize_logged_model(known.model_id, model.status)

    def _find_model(self, experiment: str, source: str) -> LoggedModel | None:
        found = self._client.search_logged_models(
            [experiment], filter_string=f"tags.`{SOURCE_MODEL}` = '{source}'"
        )
        return found[0] if found else None


def _rename(description: Path, model: LoggedModel, run_id: str) -> None:
    """Give a model's description the model's own names; it holds those that the job saw."""
    yaml = YAML(typ="safe")
    try:
        known = yaml.load(description)
    except (OSError, ValueError, YAMLError):
        return  # whatever it is, it is kept as it is
    if not isinstance(known, dict):
        return
    new = {
        "model_id": model.model_id,
        "model_uuid": model.model_id,
        "run_id": run_id,
        "artifact_path": model.artifact_location,
    }
    changed = known | {key: value for key, value in new.items() if key in known}
    if changed != known:
        yaml.dump(changed, description)


def _inputs_of(run: Run) -> list[DatasetInput]:
    return list(run.inputs.dataset_inputs or []) if run.inputs is not None else []


def _key(metric: Metric | Logged) -> tuple[object, ...]:
    """What makes a logged value the one that it is; NaN is equal to itself here."""
    value: object = "nan" if math.isnan(metric.value) else metric.value
    return metric.key, metric.timestamp, metric.step, value


def _parents_first(runs: Sequence[Run]) -> list[Run]:
    by_id = {run.info.run_id: run for run in runs}
    ordered: dict[str, Run] = {}

    def add(run: Run, above: frozenset[str] = frozenset()) -> None:
        parent = by_id.get(run.data.tags.get(_PARENT, ""))
        if parent is not None and parent.info.run_id not in above:
            add(parent, above | {run.info.run_id})
        ordered.setdefault(run.info.run_id, run)

    for run in sorted(runs, key=lambda run: run.info.start_time or 0):
        add(run)
    return list(ordered.values())


def _pages(page: Callable[[str | None], Any]) -> Iterator[Any]:
    token: str | None = None
    while True:
        found: Iterable[Any] = page(token)
        yield from found
        token = getattr(found, "token", None)
        if not token:
            return


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
