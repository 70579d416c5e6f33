"""Read a store with MLflow's own client. Part of the worker: needs mlflow."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow.entities import Experiment, LoggedModel, Run, ViewType
from mlflow.tracking import MlflowClient

PARENT_TAG = "mlflow.parentRunId"
PAGE = 1000


@dataclass(frozen=True)
class RecordedStore:
    """The content of a store without metrics and artifacts.

    Attributes:
        experiments: by id.
        runs: parents come before their children.
    """

    experiments: Mapping[str, Experiment] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    models: tuple[LoggedModel, ...] = ()


def read_source(store: Path) -> RecordedStore:
    """Read all of a store that MLflow can read.

    Raises:
        Exception: MLflow cannot read the store, or not now.
    """
    client = MlflowClient(tracking_uri=store.as_uri())
    experiments = {
        e.experiment_id: e
        for e in _pages(
            lambda token: client.search_experiments(
                view_type=ViewType.ACTIVE_ONLY, max_results=PAGE, page_token=token
            )
        )
    }
    ids = [e for e in experiments if _is_in(store, e)]
    found = _pages(lambda token: client.search_runs(ids, max_results=PAGE, page_token=token))
    runs = [run for run in found if _is_in(store / run.info.experiment_id, run.info.run_id)]
    models: list[LoggedModel] = []
    if any((store / e / "models").is_dir() for e in ids):
        models = list(
            _pages(
                lambda token: client.search_logged_models(ids, max_results=PAGE, page_token=token)
            )
        )
    known = [m for m in models if m.experiment_id in ids]
    inside = [m for m in known if _is_in(store / m.experiment_id / "models", m.model_id)]
    return RecordedStore(experiments, tuple(_parents_first(runs)), tuple(inside))


def _is_in(directory: Path, name: object) -> bool:
    """Return whether an id, which a description may forge, names a directory in its place."""
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        return False
    return (directory / name).is_dir()


def _parents_first(runs: Sequence[Run]) -> list[Run]:
    by_id = {run.info.run_id: run for run in runs}
    ordered: dict[str, Run] = {}

    def add(run: Run, above: frozenset[str] = frozenset()) -> None:
        parent = by_id.get(run.data.tags.get(PARENT_TAG, ""))
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
