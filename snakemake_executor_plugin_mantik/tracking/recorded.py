"""Read what a job logged into its own store, as far as it can be read. Needs mlflow.

The store has the layout of MLflow's file store. A job that was killed, or had no disk space left,
may have written half of any file, and its user may have written anything. MLflow reads all of a
store or nothing; here what is damaged is left out alone, and the files stay as they are.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from mlflow.entities import Metric
from yaml import tokens

PARENT_TAG: Final = "mlflow.parentRunId"
REGISTRY: Final = "models"
"""The directory of a store that holds its registered models; those of runs lie elsewhere."""
LONGEST_LINE: Final = 4096
"""The longest line of metrics, in bytes."""
LONGEST_VALUE: Final = 64 << 10
"""The largest parameter or tag, in bytes; MLflow keeps 8,000 characters at most."""
MOST_VALUES: Final = 256 << 20
"""The approximate memory for the parameters and tags of a store, in bytes."""
MAX_YAML_DEPTH: Final = 50
"""The deepest nesting of lists and mappings."""
_LONGEST: Final = 4 << 20
"""The largest description, in bytes; those of data sets hold a schema and a profile."""
_WRITTEN_AT_ONCE: Final = 4096
"""The largest parameter or tag that appears to readers whole or not at all, in bytes."""
_STATUS: Final = dict(zip("12345", ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"),
                          strict=True))  # fmt: skip
_MODEL_STATUS: Final = {"2": "READY", "3": "FAILED"}
# MLflow's own rule for names of parameters, metrics and tags (utils/validation.py, 3.17).
_NAME: Final = re.compile(r"[/\w.\- :]+")
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast as the loader in Python; its scanner goes from token to token, at any depth."""
_BEGIN: Final = (
    tokens.BlockMappingStartToken,
    tokens.BlockSequenceStartToken,
    tokens.FlowMappingStartToken,
    tokens.FlowSequenceStartToken,
)
_END: Final = (tokens.BlockEndToken, tokens.FlowMappingEndToken, tokens.FlowSequenceEndToken)


@dataclass(frozen=True)
class RecordedRun:
    """A run of a store.

    Attributes:
        start, end: milliseconds since the epoch; None if unknown, or while it goes on.
        datasets: the attributes of the data sets that it used, and their tags for this use.
        used, made: the ids of models; those that it made with the step.
    """

    id: str
    experiment_id: str
    name: str
    status: str
    start: int | None
    end: int | None
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    datasets: tuple[tuple[Mapping[str, Any], Mapping[str, str]], ...] = ()
    used: tuple[str, ...] = ()
    made: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RecordedModel:
    """A logged model of a store; `status` is empty until it is final."""

    id: str
    experiment_id: str
    name: str
    type: str | None
    status: str
    run_id: str
    params: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class RecordedVersion:
    """A version of a registered model, as a job's store describes it."""

    name: str
    number: str
    source: str
    model_id: str
    description: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class RecordedStore:
    """The content of a store without metrics and artifacts.

    Attributes:
        experiments: names by id.
        runs: parents come before their children.
    """

    experiments: Mapping[str, str]
    runs: tuple[RecordedRun, ...]
    models: tuple[RecordedModel, ...]


def read_store(
    store: Path, own: tuple[str, str], notify: Callable[[str], None], *, live: bool
) -> RecordedStore:
    """Read what can be read of a store.

    `own` are the ids of the job's experiment and run, which are read whatever their descriptions
    hold. `notify` is called with what is left out, and why. If it is `live`, the job still writes
    to the store: what may be half written is left out, and not reported.

    Raises:
        OSError: the files cannot be read.
    """
    return _Reader(store, own, (lambda _: None) if live else notify, live).read()


class _Reader:
    def __init__(
        self, store: Path, own: tuple[str, str], notify: Callable[[str], None], live: bool
    ) -> None:
        self._store = store
        self._own = own
        self._notify = notify
        self._live = live
        self._left = MOST_VALUES

    def read(self) -> RecordedStore:
        experiments = {}
        for directory in _directories(self._store):
            if known := self._description(directory, experiment_id=directory.name):
                experiments[directory.name] = str(known.get("name") or directory.name)
        experiments.setdefault(self._own[0], self._own[0])
        places = [self._store / experiment_id for experiment_id in experiments]
        runs = [run for at in places for each in _directories(at) if (run := self._run(each))]
        models = [
            model
            for at in places
            for each in _directories(at / "models")
            if (model := self._model(each))
        ]
        return RecordedStore(experiments, tuple(_parents_first(runs)), tuple(models))

    def _description(self, directory: Path, **ids: str) -> dict[Any, Any] | None:
        """Return what is said of something; empty if that is damaged, None if it is deleted.

        With other `ids` it counts as damaged.
        """
        path = directory / "meta.yaml"
        if not os.path.lexists(path):
            return None
        known = read_mapping(path)
        if known is None or any(str(known.get(key)) != value for key, value in ids.items()):
            self._notify(f"the description of {directory.name} is damaged")
            return {}
        return None if known.get("lifecycle_stage") == "deleted" else known

    def _run(self, directory: Path) -> RecordedRun | None:
        ids = (directory.parent.name, directory.name)
        known = self._description(directory, experiment_id=ids[0], run_id=ids[1])
        status = known and _STATUS.get(str(known.get("status")))
        if known is None or not (status or ids == self._own):
            return None
        datasets, used = [], []
        for each in self._linked(directory / "inputs"):
            source, tags = str(each.get("source_id")), each.get("tags")
            if each.get("source_type") == "MODEL":
                used.append(source)
            elif "/" not in source and (found := self._dataset(directory, source)):
                tags = tags if isinstance(tags, dict) else {}
                datasets.append((found, {str(name): str(value) for name, value in tags.items()}))
        return RecordedRun(
            ids[1], ids[0], str(known.get("run_name") or ""), status or "RUNNING",
            _moment(known.get("start_time")), _moment(known.get("end_time")),
            self._values(directory / "params"), self._values(directory / "tags"),
            tuple(datasets), tuple(used),
            tuple((str(each.get("destination_id")), _moment(each.get("step")) or 0)
                  for each in self._linked(directory / "outputs")),
        )  # fmt: skip

    def _linked(self, directory: Path) -> Iterator[dict[Any, Any]]:
        for each in _directories(directory):
            if known := self._description(each):
                yield known

    def _dataset(self, run: Path, name: str) -> dict[str, Any] | None:
        known = self._description(run.parent / "datasets" / name)
        if not known or not all(known.get(key) for key in ("name", "digest")):
            return None
        texts = {
            key: str(known.get(key) or "") for key in ("name", "digest", "source_type", "source")
        }
        return texts | {k: str(known[k]) for k in ("schema", "profile") if known.get(k) is not None}

    def _model(self, directory: Path) -> RecordedModel | None:
        ids = (directory.parent.parent.name, directory.name)
        known = self._description(directory, experiment_id=ids[0], model_id=ids[1])
        if not known:
            return None
        return RecordedModel(
            ids[1], ids[0], str(known.get("name") or ""),
            str(known.get("model_type") or "") or None,
            _MODEL_STATUS.get(str(known.get("status")), ""), str(known.get("source_run_id") or ""),
            self._values(directory / "params"), self._values(directory / "tags"),
        )  # fmt: skip

    def _values(self, directory: Path) -> dict[str, str]:
        """Read parameters or tags, a file each."""
        found = {}
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            name, size = file.relative_to(directory).as_posix(), file.stat().st_size
            if self._live and not 0 < size <= _WRITTEN_AT_ONCE:
                continue
            why = ""
            if not _NAME.fullmatch(name):
                why = "MLflow does not allow its name"
            elif size > LONGEST_VALUE:
                why = f"it is longer than {LONGEST_VALUE >> 10} KiB"
            elif self._left <= 0:
                why = "there are too many"
            else:
                try:
                    found[name] = file.read_bytes().decode("utf-8")  # line ends are kept
                except UnicodeDecodeError:
                    why = "it is not UTF-8 text"
                self._left -= size + 1000
            if why:
                self._notify(f"{directory.name[:-1]} {name[:250]} is left out: {why}")
        return found


def _directories(place: Path) -> list[Path]:
    return sorted(path for path in place.glob("*") if path.is_dir())


def _moment(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else None


def _parents_first(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    by_id = {run.id: run for run in runs}
    ordered: dict[str, RecordedRun] = {}

    def add(run: RecordedRun, above: frozenset[str] = frozenset()) -> None:
        parent = by_id.get(run.tags.get(PARENT_TAG, ""))
        if parent is not None and parent.id not in above:
            add(parent, above | {run.id})
        ordered.setdefault(run.id, run)

    for run in sorted(runs, key=lambda run: run.start or 0):
        add(run)
    return list(ordered.values())


def read_versions(store: Path) -> list[RecordedVersion]:
    """Read the registered versions of a store, the oldest first; leave out what is damaged."""
    found = []
    for meta in store.glob(f"{REGISTRY}/*/version-*/meta.yaml"):
        known = read_mapping(meta)
        if known is None or not known.get("source"):
            continue
        name, number = meta.parent.parent.name, meta.parent.name.removeprefix("version-")
        aliases = read_texts(meta.parent.parent / "aliases")
        version = RecordedVersion(
            name, number, str(known["source"]), str(known.get("model_id") or ""),
            str(known.get("description") or ""), read_texts(meta.parent / "tags"),
            tuple(alias for alias, of in sorted(aliases.items()) if of.strip() == number),
        )  # fmt: skip
        found.append((str(known.get("creation_timestamp")), name, len(number), number, version))
    return [version for *_, version in sorted(found, key=lambda each: each[:4])]


def read_texts(directory: Path) -> dict[str, str]:
    """Read the files of a directory of the registry: their contents by their names."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes().decode("utf-8", "replace")
        for path in directory.rglob("*")
        if path.is_file() and path.stat().st_size <= LONGEST_VALUE
    }


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
            if depth > MAX_YAML_DEPTH or (isinstance(token, tokens.AliasToken) and not aliases):
                return False
    return True


# Metrics


def metric_files(store: Path) -> Iterator[Path]:
    """Yield the files of metrics in a store, those of models before those of runs."""
    for pattern in ("*/models/*/metrics/**/*", "*/*/metrics/**/*"):
        for file in list(store.glob(pattern)):
            if file.is_file() and not file.is_symlink():
                yield file


def parse_metric(path: str, line: bytes) -> Metric | None:
    """Parse a line: time, value, step, (for a model: run), (name and digest of a data set).

    `path` is the file's path in the store. Return None for an invalid or unterminated line. The
    metric has a model only if it is from the model's own files.
    """
    parts = path.split("/")
    model = parts[2] if parts[1] == "models" else None
    # A line without its end may be cut off anywhere.
    words = line.decode(errors="replace").split() if line.endswith(b"\n") else []
    try:
        timestamp, value = int(words[0]), float(words[1])
        step = int(words[2]) if len(words) > 2 else 0
        run = parts[1] if model is None else words[3]
    except (IndexError, ValueError):
        return None
    name = words[3 if model is None else 4 :]
    # No database and no protocol can hold larger numbers.
    if len(name) == 1 or max(abs(timestamp), abs(step)) >= 1 << 63:
        return None
    dataset, digest = (" ".join(name[:-1]), name[-1]) if name else (None, None)
    key = "/".join(parts[4 if model else 3 :])
    return Metric(key, value, timestamp, step, model, dataset, digest, run)


def metric_identity(metric: Metric) -> tuple[object, ...]:
    """Return what identifies a logged value; unlike NaN itself, it is equal for NaN."""
    value: object = "nan" if math.isnan(metric.value) else metric.value
    return metric.key, metric.timestamp, metric.step, value
