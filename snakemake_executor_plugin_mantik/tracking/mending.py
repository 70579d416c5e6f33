"""Prepares a job's store for MLflow to read: takes the metrics out of it and mends what is damaged.

A job that was killed, or had no room left, may have written half of anything.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from snakemake_executor_plugin_mantik.tracking.metrics import Logged, metric_files, parse
from snakemake_executor_plugin_mantik.tracking.told import Lines

METRICS = "metrics.jsonl"
"""The file in a store's directory that its metrics are moved to: whoever begins again finds it."""


def prepare(
    store: Path,
    run_id: str,
    experiment_id: str,
    tell: Callable[[str], None],
    told: Mapping[str, Lines] | None = None,
) -> list[Logged]:
    """Make a store readable; all metrics of all its runs that are still to be told.

    Args:
        store: the store's directory here.
        run_id: the job's own run, whose description is made anew if it is damaged.
        experiment_id: its experiment in the store.
        tell: called with what is dropped because it cannot be read.
        told: beginnings of files of metrics that MLflow has been told, by their paths in the store.

    Raises:
        OSError: the files cannot be read or written.
    """
    mend(store, run_id, experiment_id, tell)
    moved = store / METRICS
    if not moved.exists():
        logged = _all_metrics(store, tell, told or {})
        new = store / f".{METRICS}"
        with new.open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(asdict(value)) + "\n" for value in logged)
        new.rename(moved)
    for told_of in metric_files(store):
        told_of.unlink()
    with moved.open(encoding="utf-8") as found:
        return [Logged(**json.loads(line)) for line in found]


def mend(store: Path, run_id: str, experiment_id: str, tell: Callable[[str], None]) -> None:
    """See to it that the descriptions of experiments and runs can be read; see `prepare`."""
    for directory in store.glob("*"):
        own = directory.name == experiment_id
        _description(directory, _experiment(experiment_id) if own else "", tell)
    for meta in store.glob("*/*/meta.yaml"):
        own = meta.parent.name == run_id
        _description(meta.parent, _run(run_id, experiment_id) if own else "", tell)


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


def _all_metrics(
    store: Path, tell: Callable[[str], None], told: Mapping[str, Lines]
) -> Iterator[Logged]:
    for file in metric_files(store):
        path = file.relative_to(store).as_posix()
        content = file.read_bytes()
        if path in told and told[path].begin(content):
            content = content[told[path].size :]
        logged, dropped = parse(path, content)
        yield from logged
        if dropped:
            key = path.partition("/metrics/")[2]
            tell(f"{dropped} damaged values of the metric {key} are dropped")
