"""Make a job's store readable for MLflow: take the metrics out and repair what is damaged.

A job that was killed, or had no disk space left, may have written half of any file.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import yaml
from yaml.tokens import (
    AliasToken,
    BlockEndToken,
    BlockMappingStartToken,
    BlockSequenceStartToken,
    FlowMappingEndToken,
    FlowMappingStartToken,
    FlowSequenceEndToken,
    FlowSequenceStartToken,
)

from .published import Lines

_SYSTEM: Final = "system/"
"""Prefix of the metrics of MLflow's own monitor, which counts their steps from 0 in each store."""
LONGEST_LINE: Final = 4096
"""The longest line of metrics, in bytes."""


@dataclass(frozen=True)
class LoggedMetric:
    """One value of a metric, as the job logged it.

    Attributes:
        run_id: the run's id in the store.
        model_id: the model that it was logged for, if it is from the model's own files.
        timestamp: milliseconds since the epoch.
        dataset, digest: name and digest of its data set; both or neither.
    """

    run_id: str
    model_id: str | None
    key: str
    value: float
    timestamp: int
    step: int
    dataset: str | None = None
    digest: str | None = None


class MetricValue(Protocol):
    """A value of a metric, of MLflow or of a job."""

    @property
    def key(self) -> str: ...

    @property
    def value(self) -> float: ...

    @property
    def timestamp(self) -> int:
        """Milliseconds since the epoch."""
        ...

    @property
    def step(self) -> int: ...


def metric_identity(metric: MetricValue) -> tuple[object, ...]:
    """Return what identifies a logged value; unlike NaN itself, it is equal for NaN."""
    value: object = "nan" if math.isnan(metric.value) else metric.value
    return metric.key, metric.timestamp, metric.step, value


def without_repeated(
    logged: Sequence[LoggedMetric], steps: Mapping[str, int]
) -> list[LoggedMetric]:
    """Return what a segment has logged without what it did again.

    A segment repeats what the one before did after its last checkpoint. MLflow cannot replace a
    value, so each step keeps its first one. A metric that has been logged at step 0 only has no
    steps: all values count.

    Args:
        logged: values of the job's own run.
        steps: the last step of each metric that earlier segments have logged.
    """
    found = []
    for value in logged:
        last = steps.get(value.key, 0)
        if value.key.startswith(_SYSTEM) and value.key in steps:
            found.append(replace(value, step=last + 1 + value.step))
        elif last <= 0 or value.step > last:
            found.append(value)
    return found


def metric_files(store: Path) -> Iterator[Path]:
    """Yield the files of metrics in a store, those of models before those of runs."""
    for pattern in ("*/models/*/metrics/**/*", "*/*/metrics/**/*"):
        for file in list(store.glob(pattern)):
            if file.is_file() and not file.is_symlink():
                yield file


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; a line longer than `LONGEST_LINE` comes in unterminated pieces."""
    while line := file.readline(LONGEST_LINE):
        yield line


def parse_metrics(path: str, lines: Iterable[bytes]) -> Iterator[LoggedMetric | None]:
    """Parse lines of a file of metrics; yield None for an invalid or unterminated line.

    `path` is the file's path in the store.
    """
    parts = path.split("/")
    model = parts[2] if parts[1] == "models" else None
    key = "/".join(parts[4 if model else 3 :])
    return (_logged(line, key, parts[1], model) for line in lines)


def _logged(line: bytes, key: str, run_id: str, model_id: str | None) -> LoggedMetric | None:
    """Parse a line: time, value, step, (for a model: run), (name and digest of a data set)."""
    # A line without its end may be cut off anywhere.
    words = line.decode(errors="replace").split() if line.endswith(b"\n") else []
    try:
        timestamp, value = int(words[0]), float(words[1])
        step = int(words[2]) if len(words) > 2 else 0
        run = run_id if model_id is None else words[3]
    except (IndexError, ValueError):
        return None
    name = words[3 if model_id is None else 4 :]
    # No database and no protocol can hold larger numbers.
    if len(name) == 1 or max(abs(timestamp), abs(step)) >= 1 << 63:
        return None
    dataset, digest = (" ".join(name[:-1]), name[-1]) if name else (None, None)
    return LoggedMetric(run, model_id, key, value, timestamp, step, dataset, digest)


_LONGEST: Final = 4 << 20
"""The largest description, in bytes; those of data sets hold a schema and a profile."""
MAX_YAML_DEPTH: Final = 50
"""The deepest nesting of lists and mappings."""

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""MLflow reads with it, and it is ten times as fast as the loader in Python. Its scanner goes from
token to token, at any depth."""
_BEGIN: Final = (
    BlockMappingStartToken,
    BlockSequenceStartToken,
    FlowMappingStartToken,
    FlowSequenceStartToken,
)
_END: Final = (BlockEndToken, FlowMappingEndToken, FlowSequenceEndToken)


def read_mapping(path: Path, *, aliases: bool = False) -> dict[Any, Any] | None:
    """Read a mapping; return None if the file holds something else or cannot be read.

    A file with YAML aliases is read only if `aliases` is set.
    """
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST or not _is_tame(path, aliases):
            return None
        known = yaml.load(path.read_bytes(), _LOADER)  # noqa: S506 - a safe one
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return known if isinstance(known, dict) else None


def _is_tame(path: Path, aliases: bool) -> bool:
    depth = 0
    with path.open("rb") as file:
        for token in yaml.scan(file, _LOADER):
            depth += isinstance(token, _BEGIN) - isinstance(token, _END)
            if depth > MAX_YAML_DEPTH or (isinstance(token, AliasToken) and not aliases):
                return False
    return True


LONGEST_VALUE: Final = 64 << 10
"""The largest parameter or tag, in bytes; MLflow keeps 8,000 characters at most."""
MOST_VALUES: Final = 256 << 20
"""The approximate memory for the parameters and tags of a store, in bytes."""

_DESCRIBED: Final = ("*/*", "*/models/*", "*/datasets/*", "*/*/inputs/*", "*/*/outputs/*")
_VALUES: Final = tuple(
    f"{place}/{kind}" for place in ("*", "*/*", "*/models/*") for kind in ("params", "tags")
)
# MLflow's own rule for names of parameters, metrics and tags (utils/validation.py, 3.17).
_NAME: Final = re.compile(r"[/\w.\- :]+")

METRICS = "metrics.jsonl"
"""The file in a store that its metrics are moved to; a later attempt continues with it."""


def prepare_store(
    store: Path,
    run_id: str,
    experiment_id: str,
    notify: Callable[[str], None],
    published: Mapping[str, Lines] | None = None,
) -> Iterator[LoggedMetric]:
    """Make a store readable, and return the unpublished metrics of all its runs, models' first.

    Args:
        store: the store's local directory.
        run_id: the job's own run, whose description is rewritten if it is damaged.
        experiment_id: its experiment in the store.
        notify: called with what is dropped because it cannot be read.
        published: the published beginnings of files of metrics, by path in the store.

    Raises:
        OSError: the files cannot be read or written.
    """
    repair_store(store, run_id, experiment_id, notify)
    moved = store / METRICS
    if not moved.is_file():
        if moved.is_dir():  # an experiment with that name
            shutil.rmtree(moved)
        new = store / f".{METRICS}"
        with new.open("w", encoding="utf-8") as lines:
            for value in _all_metrics(store, notify, published or {}):
                lines.write(json.dumps(vars(value)) + "\n")
        new.rename(moved)
    for told_of in metric_files(store):
        told_of.unlink()
    return _moved(moved)


def _moved(moved: Path) -> Iterator[LoggedMetric]:
    with moved.open(encoding="utf-8") as found:
        for line in found:
            yield LoggedMetric(**json.loads(line))


def repair_store(
    store: Path, run_id: str, experiment_id: str, notify: Callable[[str], None]
) -> None:
    """Repair or remove unreadable descriptions, parameters and tags; see `prepare_store`."""
    for directory in store.glob("*"):
        own = directory.name == experiment_id
        _description(directory, _experiment(experiment_id) if own else "", notify)
    for pattern in _DESCRIBED:
        for meta in store.glob(f"{pattern}/meta.yaml"):
            own = meta.parent.relative_to(store).parts == (experiment_id, run_id)
            _description(meta.parent, _run(run_id, experiment_id) if own else "", notify)
    left = MOST_VALUES
    for directory in [path for pattern in _VALUES for path in store.glob(pattern)]:
        for file in [path for path in directory.rglob("*") if not path.is_dir()]:
            name = file.relative_to(directory).as_posix()
            why = _unreadable(name, file) or ("there are too many" if left <= 0 else "")
            if why:
                notify(f"{directory.name[:-1]} {name[:250]} is left out: {why}")
                file.unlink()
            else:
                left -= file.stat().st_size + 1000


def exclude_in_turn(store: Path, run_id: str, experiment_id: str) -> Iterator[str]:
    """Remove one kind of content from a store after the other.

    The job's own run stays; its tags and parameters are removed last.

    Yields:
        The kind that was just removed.
    """
    for what, patterns in (
        ("the models and data sets", ("*/models", "*/datasets", "*/*/inputs", "*/*/outputs")),
        ("all runs but the job's own", ("*/*/meta.yaml", "*/meta.yaml")),
        ("the tags and parameters", ("*/*/tags/*", "*/*/params/*", "*/tags/*")),
    ):
        for path in [path for pattern in patterns for path in store.glob(pattern)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        own = store / experiment_id
        if own.is_dir() and not (own / "meta.yaml").exists():
            (own / "meta.yaml").write_text(_experiment(experiment_id), encoding="utf-8")
            if (own / run_id).is_dir():
                text = _run(run_id, experiment_id)
                (own / run_id / "meta.yaml").write_text(text, encoding="utf-8")
        yield what


def _unreadable(name: str, file: Path) -> str:
    """Return why MLflow can read neither a parameter or tag nor those beside it; empty: it can."""
    if not _NAME.fullmatch(name) or os.path.normpath(name) != name:
        return "MLflow does not allow its name"
    if file.stat().st_size > LONGEST_VALUE:
        return f"it is longer than {LONGEST_VALUE >> 10} KiB"
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "it is not UTF-8 text"
    return ""


def _description(directory: Path, instead: str, notify: Callable[[str], None]) -> None:
    path = directory / "meta.yaml"
    if not os.path.lexists(path) or read_mapping(path) is not None:
        return
    notify(f"the description of {directory.name} is damaged")
    if directory.parent.name in ("inputs", "outputs", "datasets"):
        shutil.rmtree(directory)  # it holds nothing else, and MLflow fails without the description
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if instead:
        path.write_text(instead, encoding="utf-8")


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
    store: Path, notify: Callable[[str], None], published: Mapping[str, Lines]
) -> Iterator[LoggedMetric]:
    for path in metric_files(store):
        name = path.relative_to(store).as_posix()
        dropped = 0
        with path.open("rb") as file:
            if name not in published or not published[name].begin(file):
                file.seek(0)
            for value in parse_metrics(name, read_lines(file)):
                if value is not None:
                    yield value
                else:
                    dropped += 1
        if dropped:
            key = name.partition("/metrics/")[2]
            notify(f"{dropped} damaged values of the metric {key} are dropped")
