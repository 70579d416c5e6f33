"""Record what was published of a job's store, in the memory of the worker process.

Another process does not know these records, and queries MLflow instead.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from snakemake_executor_plugin_mantik.tracking.worker.source import RecordedStore

_PIECE: Final = 1 << 20


@dataclass(frozen=True)
class Destination:
    """The run that a store belongs to.

    Attributes:
        try_id: the try that the store belongs to.
        run_id: MLflow's id of the run.
        experiment_id: the id of its experiment.
        source_id: the run's id in the store.
        source_experiment_id: the experiment's id there.
        name: the run's initial name in the store.
        steps: the last step of each metric that earlier segments of the job have logged.
        members: the runs of a group's members: MLflow's ids by their ids in the store.
    """

    try_id: str
    run_id: str
    experiment_id: str
    source_id: str
    source_experiment_id: str
    name: str
    steps: Mapping[str, int] = field(default_factory=dict)
    members: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Lines:
    """The published beginning of a file that only grows.

    Attributes:
        size: in bytes.
    """

    size: int = 0
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def add(self, content: bytes) -> None:
        """Record that more of the file was published."""
        self.size += len(content)
        self._digest.update(content)

    def begin(self, file: BinaryIO) -> bool:
        """Return whether a file begins with the published content; read it up to there."""
        digest, left = hashlib.sha256(), self.size
        while left and (piece := file.read(min(left, _PIECE))):
            digest.update(piece)
            left -= len(piece)
        return digest.digest() == self._digest.digest()


@dataclass(frozen=True)
class UploadedFile:
    """A file that has been uploaded."""

    size: int
    sha256: bytes

    @classmethod
    def of(cls, path: Path) -> "UploadedFile":
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        return cls(path.stat().st_size, digest)


@dataclass
class Published:
    """What was published of one store.

    Attributes:
        doubt: whether MLflow may have received more, from another process or without an answer.
        runs, models, experiments: ids in the store to ids in MLflow.
        lines: the published beginnings of files of metrics, by path in the store.
        files: uploaded artifacts, by path in the store.
        stamps: the local modification times of these files, in ns.
        params: (run, name) of parameters.
        tags: the values of tags by (run, name).
        over: runs and models whose ends are published.
        source: the store's content as last read.
        descriptions: the files that `source` was read from, with sizes and times.
    """

    doubt: bool
    runs: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    experiments: dict[str, str] = field(default_factory=dict)
    lines: dict[str, Lines] = field(default_factory=dict)
    files: dict[str, UploadedFile] = field(default_factory=dict)
    stamps: dict[str, int] = field(default_factory=dict)
    params: set[tuple[str, str]] = field(default_factory=set)
    tags: dict[tuple[str, str], str] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    source: RecordedStore = field(default_factory=RecordedStore)
    descriptions: tuple[object, ...] = ()
