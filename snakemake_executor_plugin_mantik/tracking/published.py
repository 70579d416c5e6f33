"""Read a job's store, upload its files, and record in memory what was published of it.

Another process does not know these records, and queries MLflow instead.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

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


@dataclass
class Carrier:
    """What publishes one store: the base of `Replay`.

    Attributes:
        client: for the run's server.
        store: the store's local directory.
        to: the run that it belongs to.
        published: what was published before; kept up to date.
        notify: called with what is left out, and why.
        live: whether the job still writes to the store.
    """

    client: MlflowClient
    store: Path
    to: Destination
    published: Published
    notify: Callable[[str], None]
    live: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._again = self.published.doubt

    def send_files(
        self,
        directory: Path,
        upload: Callable[[Path], object],
        change: Callable[[Path], object] = lambda _: None,
    ) -> None:
        """Upload the files of a directory of artifacts that are not uploaded yet.

        If there are any, call `change` with a directory that holds them, in which it may replace
        files, and then `upload` with the same directory.
        """
        files = [path for path in directory.rglob("*") if path.is_file()]
        new = [path for path in files if not self._known(path)]
        if not new:
            return
        if len(new) == len(files) and not self.live:
            change(directory)
            upload(directory)
            return
        # Links keep the files as they are now, whatever replaces them.
        beside = Path(tempfile.mkdtemp(prefix=".uploads-", dir=self.store.parent))
        try:
            sent = {path: _link(path, beside / path.relative_to(directory)) for path in new}
            stamps = {path: link.stat().st_mtime_ns for path, link in sent.items()}
            seen = {path: UploadedFile.of(link) for path, link in sent.items()} if self.live else {}
            change(beside)
            upload(beside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        for path, file in seen.items():
            name = path.relative_to(self.store).as_posix()
            self.published.files[name], self.published.stamps[name] = file, stamps[path]

    def _known(self, path: Path) -> bool:
        name = path.relative_to(self.store).as_posix()
        sent = self.published.files.get(name)
        if sent is None:
            return False
        now = path.stat()
        if now.st_size != sent.size:
            return False
        return self.published.stamps.get(name) == now.st_mtime_ns or UploadedFile.of(path) == sent


def _link(path: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path.resolve(), place)
    except OSError:
        shutil.copy2(path, place)
    return place


def none_below(paths: Iterable[str], below: str) -> bool:
    """Return whether none of `paths` lies below a directory."""
    return not any(path.startswith(f"{below}/") for path in paths)
