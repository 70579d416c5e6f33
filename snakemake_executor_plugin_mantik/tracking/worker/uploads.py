"""Upload the artifacts of a job's store, each once. Part of the worker."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from snakemake_executor_plugin_mantik.tracking.worker.published import Published, UploadedFile


class ArtifactUploads:
    """Uploads directories of one store."""

    def __init__(self, store: Path, told: Published, *, live: bool) -> None:
        """Prepare.

        Args:
            store: the store's local directory.
            told: what was uploaded; kept up to date if `live`.
            live: whether files may change and appear at any time.
        """
        self._store = store
        self._told = told
        self._live = live

    def send(
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
        if len(new) == len(files) and not self._live:
            change(directory)
            upload(directory)
            return
        # Links keep the files as they are now, whatever replaces them.
        beside = Path(tempfile.mkdtemp(prefix=".uploads-", dir=self._store.parent))
        try:
            sent = {path: _link(path, beside / path.relative_to(directory)) for path in new}
            stamps = {path: link.stat().st_mtime_ns for path, link in sent.items()}
            seen = (
                {path: UploadedFile.of(link) for path, link in sent.items()} if self._live else {}
            )
            change(beside)
            upload(beside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        self._remember(seen, stamps)

    def _known(self, path: Path) -> bool:
        name = path.relative_to(self._store).as_posix()
        sent = self._told.files.get(name)
        if sent is None:
            return False
        now = path.stat()
        if now.st_size != sent.size:
            return False
        return self._told.stamps.get(name) == now.st_mtime_ns or UploadedFile.of(path) == sent

    def _remember(self, seen: dict[Path, UploadedFile], stamps: dict[Path, int]) -> None:
        for path, sent in seen.items():
            name = path.relative_to(self._store).as_posix()
            self._told.files[name], self._told.stamps[name] = sent, stamps[path]


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
