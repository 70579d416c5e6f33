"""Prepares a job's store for MLflow to read: takes the metrics out of it and mends what is damaged.

A job that was killed, or had no room left, may have written half of anything, and one half line
keeps MLflow's file store from reading the run at all. It also forgets the steps of metrics that
belong to a data set (3.17), and fails on a set's name with a blank. So the metrics are read here.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

METRICS = "metrics.jsonl"
"""The file in a store's directory that its metrics are moved to: whoever begins again finds it."""


@dataclass(frozen=True)
class Logged:
    """One value of a metric, as the job logged it.

    Attributes:
        run_id: the run's id in the store.
        model_id: the model that it was logged for, if the line is from the model's own files.
        timestamp: milliseconds since the epoch.
        dataset, digest: the data set that it belongs to; both or none.
    """

    run_id: str
    model_id: str | None
    key: str
    value: float
    timestamp: int
    step: int
    dataset: str | None = None
    digest: str | None = None


def prepare(
    store: Path, run_id: str, experiment_id: str, tell: Callable[[str], None]
) -> list[Logged]:
    """Make a store readable; all metrics of all its runs.

    Args:
        store: the store's directory here.
        run_id: the job's own run, whose description is made anew if it is damaged.
        experiment_id: its experiment in the store.
        tell: called with what is dropped because it cannot be read.

    Raises:
        OSError: the files cannot be read or written.
    """
    for directory in store.glob("*"):
        own = directory.name == experiment_id
        _description(directory, _experiment(experiment_id) if own else "", tell)
    for meta in store.glob("*/*/meta.yaml"):
        own = meta.parent.name == run_id
        _description(meta.parent, _run(run_id, experiment_id) if own else "", tell)
    moved = store / METRICS
    if not moved.exists():
        lines = [json.dumps(asdict(logged)) + "\n" for logged in _all_metrics(store, tell)]
        new = store / f".{METRICS}"
        new.write_text("".join(lines), encoding="utf-8")
        new.rename(moved)
    for file in _metric_files(store):
        file.unlink()
    with moved.open(encoding="utf-8") as found:
        return [Logged(**json.loads(line)) for line in found]


def _description(directory: Path, instead: str, tell: Callable[[str], None]) -> None:
    path = directory / "meta.yaml"
    if not os.path.lexists(path) or _is_mapping(path):
        return
    tell(f"the description of {directory.name} is damaged")
    path.unlink()
    if instead:
        path.write_text(instead, encoding="utf-8")


def _is_mapping(path: Path) -> bool:
    try:
        return isinstance(YAML(typ="safe").load(path), dict)
    except (OSError, ValueError, YAMLError):
        return False


def _experiment(experiment_id: str) -> str:
    return (
        f'experiment_id: "{experiment_id}"\nname: "{experiment_id}"\n'
        'artifact_location: ""\nlifecycle_stage: active\n'
    )


def _run(run_id: str, experiment_id: str) -> str:
    return (
        f'run_id: "{run_id}"\nrun_uuid: "{run_id}"\nexperiment_id: "{experiment_id}"\n'
        'artifact_uri: ""\nlifecycle_stage: active\nstatus: 1\nuser_id: ""\n'
        "start_time: 0\nend_time: null\ntags: []\n"
    )


def _metric_files(store: Path) -> Iterator[Path]:
    for pattern in ("*/*/metrics/**/*", "*/models/*/metrics/**/*"):
        for file in list(store.glob(pattern)):
            if file.is_file() and not file.is_symlink():
                yield file


def _all_metrics(store: Path, tell: Callable[[str], None]) -> Iterator[Logged]:
    for file in _metric_files(store):
        parts = file.relative_to(store).parts
        model = parts[2] if parts[1] == "models" else None
        key = "/".join(parts[4 if model else 3 :])
        dropped = 0
        for line in file.read_bytes().splitlines(keepends=True):
            logged = _logged(line, key, parts[1], model)
            if logged is None:
                dropped += 1
            else:
                yield logged
        if dropped:
            tell(f"{dropped} damaged values of the metric {key} are dropped")


def _logged(line: bytes, key: str, run_id: str, model_id: str | None) -> Logged | None:
    """What a line says: time, value, step, (a model's: run), (name and digest of a data set)."""
    # Without its end it is cut off, wherever.
    words = line.decode(errors="replace").split() if line.endswith(b"\n") else []
    try:
        timestamp, value = int(words[0]), float(words[1])
        step = int(words[2]) if len(words) > 2 else 0
        run = run_id if model_id is None else words[3]
    except (IndexError, ValueError):
        return None
    name = words[3 if model_id is None else 4 :]
    if len(name) == 1:
        return None
    dataset, digest = (" ".join(name[:-1]), name[-1]) if name else (None, None)
    return Logged(run, model_id, key, value, timestamp, step, dataset, digest)
