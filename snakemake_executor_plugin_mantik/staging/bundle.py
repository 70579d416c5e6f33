"""Bundles: one gzipped tar of the files that a job needs and that the workspace does not hold yet.

A file that is needed under several names (through symbolic links, mostly) is packed once. Its other
names are links in the tar; the job that unpacks it turns them into copies.
"""

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.staging.local import LocalFile, file_key


class FileChanged(UserError):  # noqa: N818 - a plain name
    """A file changed, or vanished, between its first check and the end of its packing.

    `path` is its path in the workspace.
    """

    def __init__(self, file: LocalFile) -> None:
        super().__init__(
            "the file changed while it was being uploaded",
            where=str(file.local),
            do="Start again when no program writes to it any more",
        )
        self.path = file.path


_STORE_ABOVE = 64 << 20
"""Bytes above which a bundle is not compressed: data sets and images rarely shrink."""


def pack(files: Sequence[LocalFile]) -> bytes:
    """Make the bundle of `files` in memory; for small ones that travel in the script.

    Raises:
        FileChanged: a file has changed or vanished since it was examined.
        OSError: a file cannot be read.
    """
    buffer = io.BytesIO()
    _write(files, buffer)
    return buffer.getvalue()


def pack_to(files: Sequence[LocalFile], target: Path) -> None:
    """Write the bundle of `files` to the local path `target`.

    Raises:
        FileChanged: a file has changed or vanished since it was examined.
        OSError: a file cannot be read, or `target` not written.
    """
    with target.open("wb") as file:
        _write(files, file)


def _write(files: Sequence[LocalFile], target: IO[bytes]) -> None:
    level = 0 if sum(file.size for file in files) > _STORE_ABOVE else 1
    with tarfile.open(
        fileobj=target, mode="w:gz", compresslevel=level, format=tarfile.PAX_FORMAT
    ) as tar:
        originals: dict[tuple[int, int], str] = {}
        # A file may be named by itself and also lie in a named directory.
        for file in {file.path: file for file in files}.values():
            _add(tar, file, originals)


def _add(tar: tarfile.TarFile, file: LocalFile, originals: dict[tuple[int, int], str]) -> None:
    """Add one file; `originals` are the files already packed, by device and inode."""
    if file.content is not None:
        member = tarfile.TarInfo(file.path)
        member.mode, member.size = 0o700, file.size
        member.type = tarfile.DIRTYPE if file.directory else tarfile.REGTYPE
        tar.addfile(member, io.BytesIO(file.content))
        return
    try:
        status = file.local.stat()
    except FileNotFoundError as error:
        raise FileChanged(file) from error
    member = tarfile.TarInfo(file.path)
    member.mode = status.st_mode & 0o777 | 0o600
    # Keep the mtime: programs compare it (an index with its data). Owners are dropped.
    member.mtime = status.st_mtime_ns // 10**9
    if file.directory:
        member.type = tarfile.DIRTYPE
        member.mode |= 0o100
        tar.addfile(member)
        return
    original = originals.setdefault((status.st_dev, status.st_ino), file.path)
    if original != file.path and not file.is_touched():
        member.type = tarfile.SYMTYPE
        member.linkname = os.path.relpath(original, os.path.dirname(file.path))
        tar.addfile(member)
        return
    member.size = status.st_size
    with file.local.open("rb") as content:
        if file_key(file.local, status) == file.key:
            tar.addfile(member, content)
            status = file.local.stat()
    if file_key(file.local, status) != file.key:
        raise FileChanged(file)
