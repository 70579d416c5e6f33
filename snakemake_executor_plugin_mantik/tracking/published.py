"""What of a job's store was published, and to which run; upload its files. Needs mlflow."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from .recorded import RecordedRun, RecordedStore

_PIECE: Final = 1 << 20


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
    """A file as it was uploaded; `changed` is its local modification time in ns."""

    size: int
    changed: int
    sha256: bytes

    @classmethod
    def of(cls, path: Path) -> "UploadedFile":
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        return cls(path.stat().st_size, path.stat().st_mtime_ns, digest)

    def is_now(self, path: Path) -> bool:
        now = path.stat()
        if now.st_size != self.size:
            return False
        return now.st_mtime_ns == self.changed or self.of(path).sha256 == self.sha256


@dataclass
class Published:
    """What was published of one store. Another process does not know it, and queries MLflow.

    Attributes:
        doubt: whether MLflow may have received more, from another process or without an answer.
        runs, models, experiments: ids in the store to ids in MLflow.
        described: the runs of the store as they were published, by their ids in it.
        linked: (run, model) of models that runs made, by their ids in the store.
        lines: the published beginnings of files of metrics, by path in the store.
        files: uploaded artifacts, by path in the store.
        over: runs, models and traces whose ends are published.
        source, stamp: what the store held when it was last described, and its files then.
    """

    doubt: bool
    runs: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    experiments: dict[str, str] = field(default_factory=dict)
    described: dict[str, RecordedRun] = field(default_factory=dict)
    linked: set[tuple[str, str]] = field(default_factory=set)
    lines: dict[str, Lines] = field(default_factory=dict)
    files: dict[str, UploadedFile] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    source: RecordedStore | None = None
    stamp: tuple[object, ...] = ()


@dataclass
class Replay:
    """One publication of a store, as `replay.publish_store` makes it.

    Attributes:
        published: what was published before; kept up to date.
        notify: called with what is left out, and why.
        run_id, experiment_id: MLflow's ids of its run and experiment.
        source_id, source_experiment_id: their ids in the store.
        name: the run's initial name in the store.
        steps: the last step of each metric that earlier segments of the job have logged.
        members: the runs of a group's members: MLflow's ids by their ids in the store.
        again: whether MLflow may have received more than `published` holds.
        live: whether the job still writes to the store.
        later: the paths in the store of files that are not complete yet.
        made_before: MLflow's ids of the runs that the job did not make, by their ids in the store.
        fetched: runs as MLflow holds them.
        for_models: values that were logged for models, by MLflow's ids of runs.
    """

    client: MlflowClient
    store: Path
    published: Published
    notify: Callable[[str], None]
    attempt_id: str
    run_id: str
    experiment_id: str
    source_id: str
    source_experiment_id: str
    name: str
    steps: Mapping[str, int] = field(default_factory=dict)
    members: Mapping[str, str] = field(default_factory=dict)
    live: bool = False
    later: Sequence[str] = ()
    order: dict[str, int] = field(default_factory=dict)
    fetched: dict[str, Run] = field(default_factory=dict)
    for_models: dict[str, set[tuple[object, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.again = self.published.doubt
        self.made_before = {self.source_id: self.run_id, **self.members}
        self.published.runs |= self.made_before
        self.published.experiments[self.source_experiment_id] = self.experiment_id

    def upload_new(
        self,
        directory: Path,
        upload: Callable[[Path], object],
        change: Callable[[Path], object] = lambda _: None,
    ) -> None:
        """Upload the files of a directory of artifacts that are not uploaded yet.

        If there are any, call `change` with a directory that holds them, in which it may replace
        files, and then `upload` with the same directory.
        """
        files = {
            path: path.relative_to(self.store).as_posix()
            for path in directory.rglob("*")
            if path.is_file()
        }
        known = self.published.files
        new = {
            path: name
            for path, name in files.items()
            if name not in known or not known[name].is_now(path)
        }
        if not new:
            return
        if len(new) == len(files) and not self.live:
            change(directory)
            upload(directory)
            return
        # Links keep the files as they are now, whatever replaces them.
        beside = Path(tempfile.mkdtemp(prefix=".uploads-", dir=self.store.parent))
        try:
            links = {name: link_file(path, beside / path.relative_to(directory))
                     for path, name in new.items()}  # fmt: skip
            sent = {name: UploadedFile.of(link) for name, link in links.items() if self.live}
            change(beside)
            upload(beside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        known |= sent


def link_file(path: Path, place: Path) -> Path:
    """Link or copy a file to a place where there is none; return the place."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path.resolve(), place)
    except OSError:
        shutil.copy2(path, place)
    return place
