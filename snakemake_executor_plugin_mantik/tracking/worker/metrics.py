"""The metrics in a job's store: read here, line by line.

MLflow's file store forgets the steps of metrics that belong to a data set (3.17), fails on a set's
name with a blank, and one half line keeps it from reading the run at all.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

LONGEST_LINE: Final = 4096
"""Bytes of a line of metrics."""


@dataclass(frozen=True)
class LoggedMetric:
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


class MetricValue(Protocol):
    """A value of a metric, as MLflow or a job has it."""

    @property
    def key(self) -> str:
        """The metric's name."""
        ...

    @property
    def value(self) -> float:
        """The value."""
        ...

    @property
    def timestamp(self) -> int:
        """Milliseconds since the epoch."""
        ...

    @property
    def step(self) -> int:
        """The step."""
        ...


def metric_identity(metric: MetricValue) -> tuple[object, ...]:
    """What makes a logged value the one that it is; NaN is equal to itself here."""
    value: object = "nan" if math.isnan(metric.value) else metric.value
    return metric.key, metric.timestamp, metric.step, value


def metric_files(store: Path) -> Iterator[Path]:
    """The files of metrics in a store, those of models before those of runs."""
    for pattern in ("*/models/*/metrics/**/*", "*/*/metrics/**/*"):
        for file in list(store.glob(pattern)):
            if file.is_file() and not file.is_symlink():
                yield file


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; one that is longer than any of metrics comes in pieces without ends."""
    while line := file.readline(LONGEST_LINE):
        yield line


def parse_metrics(path: str, lines: Iterable[bytes]) -> Iterator[LoggedMetric | None]:
    """The values in some lines of a file of metrics; None for a line that makes no sense.

    Args:
        path: the file's, in the store.
        lines: of it; one that is cut off makes no sense.
    """
    parts = path.split("/")
    model = parts[2] if parts[1] == "models" else None
    key = "/".join(parts[4 if model else 3 :])
    return (_logged(line, key, parts[1], model) for line in lines)


def _logged(line: bytes, key: str, run_id: str, model_id: str | None) -> LoggedMetric | None:
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
    # No database and no protocol has room for larger ones.
    if len(name) == 1 or max(abs(timestamp), abs(step)) >= 1 << 63:
        return None
    dataset, digest = (" ".join(name[:-1]), name[-1]) if name else (None, None)
    return LoggedMetric(run, model_id, key, value, timestamp, step, dataset, digest)
