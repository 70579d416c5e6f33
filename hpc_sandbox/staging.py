"""Stage files of UNICORE jobs in and out: inline data, local files, storages of this site."""

import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .description import Export, Import

_SCRIPT_MODE = 0o600


class StagingError(Exception):
    """A file could not be staged; the message is the server's."""


def stage_in(item: Import, directory: Path, local_path: Callable[[str], Path | None]) -> None:
    """Copy one file into a job's directory; `local_path` returns the file behind a storage URL.

    If that fails and the import must succeed, raise `StagingError`.
    """
    target = directory / item.target.lstrip("/")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if item.data is not None or item.source.startswith("inline:"):
            target.write_text(item.data or "")
            target.chmod(_SCRIPT_MODE)
        else:
            shutil.copyfile(_path(item.source, local_path), target)
        if len(item.permissions) >= 3:
            owner = sum(
                bit for bit, c in zip((4, 2, 1), item.permissions, strict=False) if c != "-"
            )
            target.chmod(owner << 6)
    except (OSError, StagingError) as error:
        if item.must_succeed:
            raise StagingError(refused(item, str(error))) from error


def refused(item: Import | Export, reason: str) -> str:
    """Return the server's message for a failed transfer."""
    return f"Filetransfer FAILED: [{item.source} -> {item.target}] error message: {reason}"


def stage_out(item: Export, directory: Path, local_path: Callable[[str], Path | None]) -> None:
    """Copy one file from a job's directory to the export's target, or raise `StagingError`."""
    try:
        target = _path(item.target, local_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / item.source.lstrip("/"), target)
    except (OSError, StagingError) as error:
        raise StagingError(refused(item, str(error))) from error


def _path(url: str, local_path: Callable[[str], Path | None]) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if (path := local_path(url)) is not None:
        return path
    raise StagingError(f"the sandbox does not transfer {parts.scheme or 'plain'} URLs")
