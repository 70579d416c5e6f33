"""Read the metrics in a job's store, line by line, without MLflow.

MLflow's file store (3.17) loses the steps of metrics that belong to a data set, fails on a blank in
a data set's name, and cannot read a run at all because of one half line.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, Protocol

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
