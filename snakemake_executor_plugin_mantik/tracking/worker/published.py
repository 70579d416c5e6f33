"""What MLflow has been told of a job's store: values that a worker process keeps while it lives.

Another process knows nothing of it, and asks MLflow.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from snakemake_executor_plugin_mantik.tracking.worker.source import RecordedStore

_PIECE: Final = 1 << 20


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
class Lines:
    """The beginning of a file that is only added to.

    Attributes:
        size: its bytes.
    """

    size: int = 0
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def add(self, content: bytes) -> None:
        """More of the file has been told."""
        self.size += len(content)
        self._digest.update(content)

    def begin(self, file: BinaryIO) -> bool:
        """Whether a file begins with what has been told; it is read as far as that."""
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
        """A file as it is now."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        return cls(path.stat().st_size, digest)


@dataclass
class Published:
    """What MLflow has been told of one store.

    Attributes:
        doubt: whether it may have been told more: by another process, or when it did not answer.
        runs, models, experiments: what there is in the store, and what it is at MLflow.
        lines: of files of metrics, by their paths in the store.
        files: artifacts, by their paths in the store.
        stamps: when these files had last changed here, in ns.
        params: (run, name) of parameters.
        tags: the values of tags by (run, name).
        over: runs and models whose ends have been told.
        source: what was read of the store.
        descriptions: of what files, with their sizes and times.
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
