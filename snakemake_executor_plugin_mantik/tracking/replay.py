"""Publish what a job logged into its own store to its run. Part of the worker: needs mlflow.

All values keep their times and steps. A replay that failed can be repeated: nothing is created
twice. A piece that MLflow refuses (a name that it does not allow, a parameter that already has
another value) is reported and left out; the rest continues.

While the job runs, the store is a copy that the executor extends (`engine.live_copies`). Whatever
looks half written waits for the next time, or for the end, when all of the store is downloaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelInput,
    LoggedModelOutput,
    Metric,
    Param,
    Run,
    RunTag,
)

from . import registered
from .published import Lines, Replay
from .recorded import (
    LONGEST_LINE,
    PARENT_TAG,
    RecordedRun,
    RecordedStore,
    metric_files,
    metric_identity,
    parse_metric,
    read_store,
)
from .requests import log_values, unless_refused
from .traces import publish_traces

COPY_TREE, COPY_LATER = "tree", "later"
"""Names in a copy's directory, as in `engine.live_copies`."""
_METRICS_BYTES: Final = 2 << 20
"""The most bytes of metrics that are held at once; each value takes far more memory."""
_SYSTEM: Final = "system/"
"""Prefix of the metrics of MLflow's own monitor, which counts their steps from 0 in each store."""
_SOURCE_RUN: Final = "mantik.source_run"
"""The tag that names the run in a job's store that this run copies."""
_OURS: Final = "mantik."
"""Prefix of our own tags, which a job must not overwrite."""
_FROM: Final = ("mlflow.source.", "mlflow.project.")
_NAME, _USER = "mlflow.runName", "mlflow.user"


def publish_store(at: Replay, status: str = "") -> None:
    """Publish what is new.

    `status` is the final status for runs that the job did not end; empty while the job runs.
    """
    if not at.store.is_dir():
        return
    at.live = not status
    if at.live:
        at.later = _read_later(at)
    # If this fails, it is unknown how much MLflow has received.
    at.published.doubt = True
    source, stamp = at.published.source, _stamp(at.store)
    if source is None or not at.live or at.published.stamp != stamp:
        own = (at.source_experiment_id, at.source_id)
        source = read_store(at.store, own, at.notify, live=at.live)
        if not at.live and at.source_id not in {run.id for run in source.runs}:
            at.notify("the job has removed its run in its own store")
        _describe(at, source)
        at.published.source, at.published.stamp = source, stamp
    _metrics(at)
    for run in source.runs:
        _upload(at, run)
    if not at.live:
        registered.register(at, source)
    _end(at, source, status)
    if not at.live:
        publish_traces(at, source, partial(_experiment, at))
    at.published.doubt = False


def _stamp(store: Path) -> tuple[object, ...]:
    """Return sizes and times of a store's files, without those of metrics and artifacts."""

    def describes(path: Path) -> bool:
        parts = path.relative_to(store).parts
        kind = parts[3:4] if parts[1:2] == ("models",) else parts[2:3]
        return kind not in (("metrics",), ("artifacts",))

    files = [(str(path), path.lstat()) for path in store.rglob("*") if describes(path)]
    return tuple(sorted((name, found.st_size, found.st_mtime_ns) for name, found in files))


def _read_later(at: Replay) -> list[str]:
    try:
        text = (at.store.parent / COPY_LATER).read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return []
    return text.split("\0")


def _refused(at: Replay, what: str) -> Callable[[str], None]:
    return lambda why: at.notify(f"MLflow refused {what}, which is left out: {why}")


# Runs


def _describe(at: Replay, source: RecordedStore) -> None:
    """Create missing runs and models, and publish their descriptions."""
    published = at.published
    at.order = {run.id: number for number, run in enumerate(source.runs)}
    for run in source.runs:
        if run.id not in published.runs:
            _make_run(at, source, run)
    for model in source.models:
        unless_refused(
            partial(registered.publish_model, at, model),
            _refused(at, f"the model {model.name}"),
        )
    for run in source.runs:
        run_id = published.runs.get(run.id)
        if run_id is None:
            continue
        before = published.described.get(run.id)
        if before != run:
            _params(at, run, run_id, before.params if before is not None else {})
            _tags(at, run, run_id, before.tags if before is not None else {})
            _inputs(at, run, run_id)
            published.described[run.id] = run
        _outputs(at, run, run_id)


def _make_run(at: Replay, source: RecordedStore, run: RecordedRun) -> None:
    """Create a run that the job made besides its own."""
    refused = _refused(at, f"the run {run.name}")
    experiment = unless_refused(
        lambda: _experiment(at, run.experiment_id, source.experiments[run.experiment_id]),
        refused,
    )
    if experiment is None:
        return
    mark = f"{at.attempt_id}/{run.id}"
    if at.again and (
        found := at.client.search_runs([experiment], f"tags.`{_SOURCE_RUN}` = '{mark}'")
    ):
        at.published.runs[run.id] = found[0].info.run_id
        return
    tags = {tag: _meant(at, run, tag) for tag in _others(run.tags)}
    made = unless_refused(
        lambda: at.client.create_run(
            experiment, start_time=run.start, tags={**tags, _SOURCE_RUN: mark},
            run_name=run.name or None,
        ),
        refused,
    )  # fmt: skip
    if made is not None:
        at.published.runs[run.id] = made.info.run_id
        at.published.described[run.id] = replace(run, params={}, datasets=(), used=())


def _experiment(at: Replay, source_id: str, name: str) -> str:
    known = at.published.experiments
    if source_id not in known:
        there = at.client.get_experiment_by_name(name)
        known[source_id] = there.experiment_id if there else at.client.create_experiment(name)
    return known[source_id]


def _there(at: Replay, run_id: str) -> Run:
    """Return a run from MLflow; each is fetched once."""
    if run_id not in at.fetched:
        at.fetched[run_id] = at.client.get_run(run_id)
    return at.fetched[run_id]


def _params(at: Replay, run: RecordedRun, run_id: str, before: Mapping[str, str]) -> None:
    new = []
    for name, value in run.params.items():
        if name in before:
            continue
        there = _there(at, run_id).data.params.get(name)
        if there is None:
            new.append(Param(name, value))
        elif there != value:
            at.notify(
                f"the parameter {name} is already {there!r} in MLflow; the job logged {value!r}"
            )
    _log(at, run_id, "params", new)


def _tags(at: Replay, run: RecordedRun, run_id: str, before: Mapping[str, str]) -> None:
    own = run.id in at.made_before
    new = [
        RunTag(name, _meant(at, run, name))
        for name, value in _others(run.tags).items()
        if not (own and _is_ours(at, name, value)) and before.get(name) != value
    ]
    _log(at, run_id, "tags", new)


def _log(at: Replay, run_id: str, kind: str, values: Sequence[Param | RunTag | Metric]) -> None:
    what = {"params": "parameters"}.get(kind, kind)
    log_values(
        at.client, run_id, kind, values,
        lambda value, why: _refused(at, f"{value.key} (of the {what})")(why),
    )  # fmt: skip


def _is_ours(at: Replay, name: str, value: str) -> bool:
    """Return whether a tag of a run that was made before the job must not replace ours."""
    return (
        name.startswith(_FROM) or name in (_USER, PARENT_TAG) or (name, value) == (_NAME, at.name)
    )


def _meant(at: Replay, run: RecordedRun, tag: str) -> str:
    """Return a tag's value for MLflow, with a parent's id in the store replaced by MLflow's.

    A parent that does not precede the run, as in a cycle, or is no run of the store, becomes
    the job's own run.
    """
    value, order = run.tags[tag], at.order
    if tag != PARENT_TAG:
        return value
    above = order.get(value, len(order)) < order[run.id]
    return at.published.runs.get(value, at.run_id) if above else at.run_id


def _inputs(at: Replay, run: RecordedRun, run_id: str) -> None:
    """Log the data sets and models that a run used; name and digest identify a data set."""
    sets = [
        DatasetInput(Dataset(**about), [InputTag(name, value) for name, value in tags.items()])
        for about, tags in run.datasets
    ]
    if sets:
        inputs = _there(at, run_id).inputs
        known = inputs.dataset_inputs if inputs is not None else ()
        there = {(d.dataset.name, d.dataset.digest) for d in known or ()}
        sets = [d for d in sets if (d.dataset.name, d.dataset.digest) not in there]
    used = [LoggedModelInput(at.published.models.get(model, model)) for model in run.used]
    if sets or used:
        unless_refused(
            lambda: at.client.log_inputs(run_id, datasets=sets, models=used),
            _refused(at, "the data sets and models that it used"),
        )


def _outputs(at: Replay, run: RecordedRun, run_id: str) -> None:
    published = at.published
    new = {
        model: step
        for model, step in run.made
        if model in published.models and (run.id, model) not in published.linked
    }
    if not new:
        return
    known = getattr(_there(at, run_id).outputs, "model_outputs", None) or []
    there = {m.model_id for m in known}
    links = [(published.models[model], step) for model, step in new.items()]
    made = [LoggedModelOutput(*link) for link in links if link[0] not in there]
    if made:
        unless_refused(
            lambda: at.client.log_outputs(run_id, made),
            _refused(at, "the links from the run to its models"),
        )
    published.linked |= {(run.id, model) for model in new}


def _end(at: Replay, source: RecordedStore, status: str) -> None:
    """End the runs that are over; with `status`, also all others that the job began."""
    for run in source.runs:
        run_id = at.published.runs.get(run.id)
        if run.id in at.made_before or run_id is None or run_id in at.published.over:
            continue
        if run.end or status:
            at.client.set_terminated(run_id, run.status if run.end else status, run.end)
            at.published.over.add(run_id)


# Metrics


def _metrics(at: Replay) -> None:
    """Publish the new lines of the files of metrics, some at a time."""
    for some in _new_lines(at):
        of_runs: dict[str, list[Metric]] = {}
        for path, lines in some.items():
            values = [parse_metric(path, line) for line in lines]
            known = [value for value in values if value is not None]
            if not at.live and len(known) < len(values):
                key = path.partition("/metrics/")[2]
                dropped = len(values) - len(known)
                at.notify(f"{dropped} damaged values of the metric {key} are dropped")
            for value in known:
                of_runs.setdefault(str(value.run_id), []).append(value)
        for source_run, logged in of_runs.items():
            _log_metrics(at, logged, source_run)
        for path, lines in some.items():
            at.published.lines.setdefault(path, Lines()).add(b"".join(lines))


def _new_lines(at: Replay) -> Iterator[dict[str, list[bytes]]]:
    """Yield new lines by their files' paths in the store; each time they count as published."""
    some: dict[str, list[bytes]] = {}
    size = 0
    for file in metric_files(at.store):
        path = file.relative_to(at.store).as_posix()
        begun = at.published.lines.get(path, Lines())
        if at.live and (file.stat().st_size <= begun.size or not _is_made(at, path)):
            continue
        with file.open("rb") as lines:
            # If the job has rewritten the file, this could be the middle of a line.
            if not begun.begin(lines):
                if at.live:
                    continue
                del at.published.lines[path]
                lines.seek(0)
            while line := lines.readline(LONGEST_LINE):
                if at.live and not line.endswith(b"\n"):
                    break
                some.setdefault(path, []).append(line)
                size += len(line)
                if size >= _METRICS_BYTES:
                    yield some
                    some, size = {}, 0
    yield some


def _is_made(at: Replay, path: str) -> bool:
    """Return whether the run or model of a file of metrics exists in MLflow."""
    _, of, name, *_ = [*path.split("/"), ""]
    return name in at.published.models if of == "models" else of in at.published.runs


def _log_metrics(at: Replay, logged: Sequence[Metric], source_run: str) -> None:
    """Publish metrics of a run, each with the model that it was logged for.

    `logged` holds values from the run's own files and from its models'. `source_run` is the
    run's id in the store; nothing is published if the run does not exist in MLflow.
    """
    run_id = at.published.runs.get(source_run)
    if source_run == at.source_id:
        logged = without_repeated(logged, at.steps)
    if run_id is None or not logged:
        return
    # A run's own file does not name the model of each value.
    of_model = {metric_identity(m): m.model_id for m in logged if m.model_id is not None}
    published_for_models = at.for_models.setdefault(run_id, set())
    logged = [m for m in logged if m.model_id or metric_identity(m) not in published_for_models]
    there: set[tuple[object, ...]] = set()
    if at.again:
        history = at.client.get_metric_history
        names = {m.key for m in logged}
        there = {metric_identity(m) for name in names for m in history(run_id, name)}
        # The run may have the value without its model, which did not exist then.
        models = {model for model in of_model.values() if model in at.published.models}
        published = set().union(*map(partial(_of_model, at), models))
        there -= {key for key, model in of_model.items() if model in models} - published
    unique = {metric_identity(m): m for m in sorted(logged, key=lambda m: (m.timestamp, m.step))}
    new = [
        _moved(at, value, of_model.get(key), run_id)
        for key, value in unique.items()
        if key not in there
    ]
    _log(at, run_id, "metrics", new)
    published_for_models |= of_model.keys()


def _of_model(at: Replay, model: str) -> set[tuple[object, ...]]:
    """Return the last values of metrics that a model of the store has in MLflow."""
    known = at.client.get_logged_model(at.published.models[model]).metrics or []
    return {metric_identity(metric) for metric in known}


def _moved(at: Replay, logged: Metric, model: str | None, run_id: str) -> Metric:
    model_id = at.published.models.get(model) if model is not None else None
    if model_id is None:
        return Metric(logged.key, logged.value, logged.timestamp, logged.step)
    return Metric(
        logged.key, logged.value, logged.timestamp, logged.step, model_id,
        logged.dataset_name, logged.dataset_digest, run_id,
    )  # fmt: skip


# Artifacts


def _upload(at: Replay, run: RecordedRun) -> None:
    """Upload the artifacts of a run, if the run exists in MLflow."""
    run_id = at.published.runs.get(run.id)
    artifacts = at.store / run.experiment_id / run.id / "artifacts"
    if run_id is not None and artifacts.is_dir():
        unless_refused(
            lambda: at.upload_new(
                artifacts, lambda directory: at.client.log_artifacts(run_id, str(directory))
            ),
            _refused(at, "the remaining artifacts"),
        )


def _others(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags without ours, which a job must not overwrite."""
    return {name: value for name, value in tags.items() if not name.startswith(_OURS)}


def without_repeated(logged: Sequence[Metric], steps: Mapping[str, int]) -> list[Metric]:
    """Return what a segment has logged in the job's own run, without what it did again.

    A segment repeats what the one before did after its last checkpoint. MLflow cannot replace a
    value, so each step keeps its first one. `steps` are the last steps that earlier segments have
    logged. A metric that has been logged at step 0 only has no steps: all values count.
    """
    found = []
    for value in logged:
        last = steps.get(value.key, 0)
        if value.key.startswith(_SYSTEM) and value.key in steps:
            found.append(
                Metric(
                    value.key, value.value, value.timestamp, last + 1 + value.step, value.model_id,
                    value.dataset_name, value.dataset_digest, value.run_id,
                )
            )  # fmt: skip
        elif last <= 0 or value.step > last:
            found.append(value)
    return found
