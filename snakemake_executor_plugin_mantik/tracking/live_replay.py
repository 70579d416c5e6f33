"""Publish what a running job has logged so far. Part of the worker: needs mlflow.

The executor extends a copy of the job's store (`engine.live_copies`) while this module reads it.
Whatever looks half written waits for the next time, or for the end, when all of the store is
downloaded.
"""

import os
import shutil
from pathlib import Path

from .published import Lines, RecordedStore, read_source
from .repair import LONGEST_LINE, LoggedMetric, metric_files, parse_metrics, repair_store
from .replay import Replay

COPY_TREE, COPY_LATER = "tree", "later"
"""Names in the copy's directory, as in `engine.live_copies`."""
_METRICS_BYTES = 4 << 20
"""The most bytes of metrics to publish at once; each value takes far more memory."""
_WRITTEN_AT_ONCE = 4096
"""The largest parameter or tag that appears to readers whole or not at all, in bytes."""


class LiveReplay(Replay):
    """Publishes a copy of a store, the directory `COPY_TREE`, as far as it has grown."""

    live = True

    def run(self) -> None:
        """Publish what is new.

        Raises:
            Exception: the server does not answer, or answers with an error; try again later.
        """
        if not self.store.is_dir():
            return
        # If this fails, it is unknown how much MLflow has received.
        self.published.doubt = True
        self._described()
        while self._metrics():
            pass
        for run in self.published.source.runs:
            self.upload(run)
        self.published.doubt = False

    def _described(self) -> None:
        """Publish runs, models and their descriptions, if any of them has changed."""
        files = [
            path
            for path in self.store.rglob("*")
            if path.is_file() and _describes(path, self.store)
        ]
        now = tuple(sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files))
        if now == self.published.descriptions:
            return
        view = self.store.parent / "view"
        try:
            source = self._view(view, files)
        except Exception:  # noqa: BLE001 - the file store raises anything of what is half written
            return  # the end of the job reads all of it
        finally:
            shutil.rmtree(view, ignore_errors=True)
        self.published.source = source
        self.describe(source, self._later())
        self.end(source)
        self.published.descriptions = now

    def _view(self, view: Path, files: list[Path]) -> RecordedStore:
        """Read the descriptions with MLflow, from links or copies that do not change."""
        shutil.rmtree(view, ignore_errors=True)
        for path in files:
            place = view / path.relative_to(self.store)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except OSError:
                shutil.copyfile(path, place)
        for meta in [*view.glob("*/*/meta.yaml"), *view.glob("*/models/*/meta.yaml")]:
            # Without these directories MLflow does not recognise a run.
            for name in ("metrics", "params", "tags", "artifacts"):
                (meta.parent / name).mkdir(exist_ok=True)
        repair_store(view, self.to.source_id, self.to.source_experiment_id, lambda _: None)
        return read_source(view)

    def _later(self) -> list[str]:
        try:
            text = (self.store.parent / COPY_LATER).read_text(
                encoding="utf-8", errors="surrogateescape"
            )
        except FileNotFoundError:
            return []
        return text.split("\0")

    def _metrics(self) -> bool:
        """Publish a part of the new lines of metrics; return whether there were any."""
        logged: dict[str, list[LoggedMetric]] = {}
        read: dict[str, bytes] = {}
        left = _METRICS_BYTES
        for file in metric_files(self.store):
            path = file.relative_to(self.store).as_posix()
            begun = self.published.lines.get(path, Lines())
            if left <= 0 or file.stat().st_size <= begun.size or not self._is_made(path):
                continue
            with file.open("rb") as lines:
                # If the job has rewritten the file, this could be the middle of a line.
                if not begun.begin(lines):
                    continue
                content = lines.read(max(left, LONGEST_LINE))
            content = content[: content.rfind(b"\n") + 1]
            if not content:
                continue
            for value in parse_metrics(path, content.splitlines(keepends=True)):
                if value is not None:
                    logged.setdefault(value.run_id, []).append(value)
            read[path] = content
            left -= len(content)
        for run_id, values in logged.items():
            self.log(values, run_id)
        for path, content in read.items():
            self.published.lines.setdefault(path, Lines()).add(content)
        return bool(read)

    def _is_made(self, path: str) -> bool:
        """Return whether the run or model of a file of metrics exists in MLflow."""
        parts = path.split("/")
        if parts[1] == "models":
            return parts[2] in self.published.models
        return parts[1] in self.published.runs


def _describes(path: Path, store: Path) -> bool:
    """Return whether a file is a description: no metric, no artifact, not half written."""
    parts = path.relative_to(store).parts
    of = parts[3:4] if len(parts) > 3 and parts[1] == "models" else parts[2:3]
    if of in (("metrics",), ("artifacts",)):
        return False
    return of not in (("params",), ("tags",)) or 0 < path.stat().st_size <= _WRITTEN_AT_ONCE
