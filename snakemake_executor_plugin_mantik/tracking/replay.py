"""Publish what a job logged into its own store to its run. Part of the worker: needs mlflow.

All values keep their times and steps. A replay that failed can be repeated: nothing is created
twice. A piece that MLflow refuses (a name that it does not allow, a parameter that already has
another value) is reported and left out; the rest continues.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from mlflow.entities import (
    DatasetInput,
    LoggedModelInput,
    LoggedModelOutput,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.exceptions import MlflowException

from snakemake_executor_plugin_mantik.common.humanize import humanize_count

from .overview import is_refusal
from .published import PARENT_TAG, RecordedStore, read_source
from .registered import Models
from .repair import LoggedMetric, exclude_in_turn, metric_identity, prepare_store, without_repeated
from .run import without_users

BATCH = 100
"""Parameters and tags per request: MLflow's limit."""
_METRICS_AT_ONCE = 20_000
"""Most metric values of an ended job that are held in memory at once."""
_METRICS_BATCH = 1000
"""Metrics per request: MLflow's limit."""
_SOURCE_RUN = "mantik.source_run"
"""The tag that names the run in a job's store that this run copies."""

_OURS = "mantik."
"""Prefix of our own tags, which a job must not overwrite."""
_FROM = ("mlflow.source.", "mlflow.project.")
_NAME, _USER = "mlflow.runName", "mlflow.user"

_T = TypeVar("_T")


class Replay(Models):
    """Publishes one store, as a whole or as far as it has grown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        to = self.to
        self._fetched: dict[str, Run] = {}
        self._order: dict[str, int] = {}
        self._for_models: dict[str, set[tuple[object, ...]]] = {}
        self._made_before = {to.source_id: to.run_id, **to.members}
        self.published.runs |= self._made_before
        self.published.experiments[to.source_experiment_id] = to.experiment_id

    def whole(self, status: str) -> None:
        """Publish all of the store.

        `status` is the final status for runs that the job did not end.

        Raises:
            Exception: the server does not answer, or answers with an error; try again later.
        """
        metrics = prepare_store(
            self.store, self.to.source_id, self.to.source_experiment_id, self.notify,
            self.published.lines,
        )  # fmt: skip
        source = self._read()
        if self.to.source_id not in {run.info.run_id for run in source.runs}:
            self.notify("the job has removed or damaged its run in its own store")
        self.describe(source)
        # Not all at once: there may be any number of values.
        while some := list(islice(metrics, _METRICS_AT_ONCE)):
            of_runs: dict[str, list[LoggedMetric]] = {}
            for value in some:
                of_runs.setdefault(value.run_id, []).append(value)
            for run_id, values in of_runs.items():
                self.log(values, run_id)
        for run in source.runs:
            self.upload(run)
        self.register(source)
        if traces := sum(1 for _ in self.store.glob("*/traces/*/trace_info.yaml")):
            self.notify(
                f"{humanize_count(traces, 'trace is', 'traces are')} left out: only jobs that log"
                " to the server themselves (--mantik-track-direct) can have traces"
            )
        self.end(source, status)

    def _read(self) -> RecordedStore:
        """Read what can be read of the store, leaving out what cannot."""
        leaving_out = exclude_in_turn(self.store, self.to.source_id, self.to.source_experiment_id)
        while True:
            try:
                return read_source(self.store)
            except Exception as error:  # noqa: BLE001 - the file store raises anything
                if (left_out := next(leaving_out, None)) is None:
                    self.notify(f"what the job logged cannot be read: {_line(error)}")
                    return RecordedStore()
                self.notify(f"{left_out} cannot be read and are left out: {_line(error)}")

    def describe(self, source: RecordedStore, later: Collection[str] = ()) -> None:
        """Create missing runs and models, and publish their descriptions.

        `later` holds the paths in the store of files that are not complete yet.
        """
        self._order = {run.info.run_id: number for number, run in enumerate(source.runs)}
        for run in source.runs:
            if run.info.run_id not in self.published.runs:
                self._make_run(source, run)
        for model in source.models:
            self._piece(f"the model {model.name}", partial(self.carry_model, model, later))
        for run in source.runs:
            if (run_id := self.published.runs.get(run.info.run_id)) is not None:
                self._params(run, run_id)
                self._tags(run, run_id)
                self._inputs(run, run_id)
                self._outputs(run, run_id)

    def upload(self, run: Run) -> None:
        """Upload the artifacts of a run, if the run exists in MLflow."""
        run_id = self.published.runs.get(run.info.run_id)
        artifacts = self.store / run.info.experiment_id / run.info.run_id / "artifacts"
        if run_id is not None and artifacts.is_dir():
            self._piece(
                "the remaining artifacts",
                lambda: self.send_files(
                    artifacts, lambda directory: self.client.log_artifacts(run_id, str(directory))
                ),
            )

    def end(self, source: RecordedStore, status: str = "") -> None:
        """End the runs that are over; with `status`, also all others that the job began."""
        for run in source.runs:
            run_id = self.published.runs.get(run.info.run_id)
            made_before = run.info.run_id in self._made_before
            if made_before or run_id is None or run_id in self.published.over:
                continue
            if run.info.end_time or status:
                ended = run.info.status if run.info.end_time else status
                self.client.set_terminated(run_id, ended, run.info.end_time or None)
                self.published.over.add(run_id)

    def _piece(self, what: str, act: Callable[[], _T]) -> _T | None:
        """Call `act`; if MLflow refuses, report that and return None."""
        try:
            return act()
        except MlflowException as error:
            if not is_refusal(error):
                raise
            self.notify(f"MLflow refused {what}, which is left out: {_line(error)}")
            return None

    # Runs

    def _make_run(self, source: RecordedStore, run: Run) -> None:
        """Create a run that the job made besides its own."""
        info, name = run.info, f"{self.to.try_id}/{run.info.run_id}"
        experiment = self._piece(
            f"the run {info.run_name}", lambda: self._experiment(source, info.experiment_id)
        )
        if experiment is None:
            return
        if self._again and (known := self._find_run(experiment, name)):
            self.published.runs[info.run_id] = known
            return
        tags = {tag: self._meant(run, tag) for tag in _others(run.data.tags)}
        made = self._piece(
            f"the run {info.run_name}",
            lambda: self.client.create_run(
                experiment,
                start_time=info.start_time,
                tags={**tags, _SOURCE_RUN: name},
                run_name=info.run_name,
            ),
        )
        if made is not None:
            self.published.runs[info.run_id] = made.info.run_id
            self.published.tags |= {
                (made.info.run_id, tag): value for tag, value in run.data.tags.items()
            }

    def _find_run(self, experiment: str, source: str) -> str | None:
        found = self.client.search_runs([experiment], f"tags.`{_SOURCE_RUN}` = '{source}'")
        return found[0].info.run_id if found else None

    def _experiment(self, source: RecordedStore, source_id: str) -> str:
        if source_id not in self.published.experiments:
            name = source.experiments[source_id].name
            known = self.client.get_experiment_by_name(name)
            self.published.experiments[source_id] = (
                known.experiment_id if known else self.client.create_experiment(name)
            )
        return self.published.experiments[source_id]

    def _there(self, run_id: str) -> Run:
        """Return a run from MLflow; each is fetched once."""
        if run_id not in self._fetched:
            self._fetched[run_id] = self.client.get_run(run_id)
        return self._fetched[run_id]

    def _params(self, run: Run, run_id: str) -> None:
        published = self.published.params
        params = {n: v for n, v in run.data.params.items() if (run_id, n) not in published}
        new = []
        for name, value in params.items():
            there = self._there(run_id).data.params.get(name)
            if there is None:
                new.append(Param(name, value))
            elif there != value:
                self.notify(
                    f"the parameter {name} is already {there!r} in MLflow; the job logged {value!r}"
                )
        self._batches("parameters", new, lambda some: {"params": some}, run_id)
        published |= {(run_id, name) for name in params}

    def _tags(self, run: Run, run_id: str) -> None:
        own = run.info.run_id in self._made_before
        published = self.published.tags
        new = {
            name: value
            for name, value in _others(run.data.tags).items()
            if not (own and self._is_ours(name, value))
            if published.get((run_id, name)) != value
        }
        tags = [RunTag(name, self._meant(run, name)) for name in new]
        self._batches("tags", tags, lambda some: {"tags": some}, run_id)
        published |= {(run_id, name): value for name, value in new.items()}

    def _is_ours(self, name: str, value: str) -> bool:
        """Return whether a tag of a run that was made before the job must not replace ours."""
        return (
            name.startswith(_FROM)
            or name in (_USER, PARENT_TAG)
            or (name, value) == (_NAME, self.to.name)
        )

    def _meant(self, run: Run, tag: str) -> str:
        """Return a tag's value for MLflow, with a parent's id in the store replaced by MLflow's.

        A parent that does not precede the run, as in a cycle, or is no run of the store, becomes
        the job's own run.
        """
        value: str = run.data.tags[tag]
        order = self._order
        if tag != PARENT_TAG:
            return value
        above = order.get(value, len(order)) < order[run.info.run_id]
        return self.published.runs.get(value, self.to.run_id) if above else self.to.run_id

    def log(self, logged: Sequence[LoggedMetric], source_run: str) -> None:
        """Publish metrics of a run, each with the model that it was logged for.

        `logged` holds values from the run's own files and from its models'. `source_run` is the
        run's id in the store; nothing is published if the run does not exist in MLflow.
        """
        run_id = self.published.runs.get(source_run)
        if source_run == self.to.source_id:
            logged = without_repeated(logged, self.to.steps)
        if run_id is None or not logged:
            return
        # A run's own file does not name the model of each value.
        of_model = {metric_identity(m): m.model_id for m in logged if m.model_id is not None}
        published_for_models = self._for_models.setdefault(run_id, set())
        logged = [m for m in logged if m.model_id or metric_identity(m) not in published_for_models]
        there: set[tuple[object, ...]] = set()
        if self._again:
            there = self._history(run_id, {m.key for m in logged})
            # The run may have the value without its model, which did not exist then.
            models = {model for model in of_model.values() if model in self.published.models}
            published = set().union(*map(self._of_model, models))
            there -= {key for key, model in of_model.items() if model in models} - published
        unique = {
            metric_identity(m): m for m in sorted(logged, key=lambda m: (m.timestamp, m.step))
        }
        metrics = [
            self._moved(value, of_model.get(key), run_id)
            for key, value in unique.items()
            if key not in there
        ]
        self._batches(
            "metrics", metrics, lambda some: {"metrics": some}, run_id, size=_METRICS_BATCH
        )
        published_for_models |= of_model.keys()

    def _history(self, run_id: str, names: Collection[str]) -> set[tuple[object, ...]]:
        """Return all values of some metrics that a run has in MLflow."""
        history = self.client.get_metric_history
        return {metric_identity(metric) for name in names for metric in history(run_id, name)}

    def _of_model(self, model: str) -> set[tuple[object, ...]]:
        """Return the last values of metrics that a model of the store has in MLflow."""
        known = self.client.get_logged_model(self.published.models[model]).metrics or []
        return {metric_identity(metric) for metric in known}

    def _moved(self, logged: LoggedMetric, model: str | None, run_id: str) -> Metric:
        model_id = self.published.models.get(model) if model is not None else None
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
        """Log in batches; if MLflow refuses a batch, log its items one by one."""
        for start in range(0, len(items), size):
            some = items[start : start + size]
            try:
                self.client.log_batch(run_id, **arguments(some))
            except MlflowException as error:
                if not is_refusal(error):
                    raise
                for item in some:
                    self._piece(
                        f"{item.key} (of the {what})",
                        partial(self.client.log_batch, run_id, **arguments([item])),
                    )

    def _inputs(self, run: Run, run_id: str) -> None:
        """Log the data sets and models that a run used; name and digest identify a data set."""
        sets = _inputs_of(run)
        if sets:
            there = {(d.dataset.name, d.dataset.digest) for d in _inputs_of(self._there(run_id))}
            sets = [d for d in sets if (d.dataset.name, d.dataset.digest) not in there]
        used = [
            LoggedModelInput(self.published.models.get(m.model_id, m.model_id))
            for m in getattr(run.inputs, "model_inputs", None) or []
        ]
        if sets or used:
            self._piece(
                "the data sets and models that it used",
                lambda: self.client.log_inputs(run_id, datasets=sets, models=used),
            )

    def _outputs(self, run: Run, run_id: str) -> None:
        made = [
            LoggedModelOutput(self.published.models[m.model_id], m.step)
            for m in getattr(run.outputs, "model_outputs", None) or []
            if m.model_id in self.published.models
        ]
        if made:
            known = getattr(self._there(run_id).outputs, "model_outputs", None) or []
            there = {m.model_id for m in known}
            made = [m for m in made if m.model_id not in there]
        if made:
            self._piece(
                "the links from the run to its models",
                lambda: self.client.log_outputs(run_id, made),
            )


def _others(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags without ours, which a job must not overwrite."""
    return {name: value for name, value in tags.items() if not name.startswith(_OURS)}


def _inputs_of(run: Run) -> list[DatasetInput]:
    return list(run.inputs.dataset_inputs or []) if run.inputs is not None else []


def _line(error: Exception) -> str:
    return " ".join(without_users(str(error)).split())[:300]
