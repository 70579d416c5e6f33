"""Local files as they go up: their content's checksum, taken once per content."""

import asyncio
import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snakemake_executor_plugin_mantik.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import local_path
from snakemake_executor_plugin_mantik.journal import FileLedger, FileRecord

_CHUNK = 1 << 20


@dataclass(frozen=True)
class LocalFile:
    """A local file or empty directory and where it belongs in the workspace.

    Attributes:
        path: where it belongs, relative to the workspace.
        local: where it is here.
        size: bytes; 0 for a directory.
        mtime_ns: its modification time when it was looked at, in ns.
        sha256: checksum of its content; empty for a directory.
        directory: whether it is a directory.
        source: whether it goes up as one of the working directory's sources.
        content: what it holds, if there is no such file here; `local` is then its path.
    """

    path: str
    local: Path
    size: int
    mtime_ns: int
    sha256: str = ""
    directory: bool = False
    source: bool = False
    content: bytes | None = None

    @classmethod
    def holding(cls, path: str, content: bytes) -> "LocalFile":
        """A file at `path` of the workspace that no file of this machine is the origin of."""
        digest = hashlib.sha256(content).hexdigest()
        return cls(path, Path(path), len(content), 0, digest, content=content)

    @property
    def record(self) -> FileRecord:
        """What the manifest says of it once it lies at a site."""
        return FileRecord(self.path, self.size, self.sha256, self.source)


class LocalFiles:
    """Looks at files in the workflow's directory; reads each content once.

    Belongs to the event loop's thread; the reading itself happens in worker threads.
    """

    def __init__(self, workdir: Path, ledger: FileLedger) -> None:
        self._workdir = workdir
        self._ledger = ledger
        self._reading: dict[tuple[str, int, int], asyncio.Task[str]] = {}

    async def look(
        self, path: str, *, local: Path | None = None, source: bool = False
    ) -> list[LocalFile]:
        """The file at `path`, or all files and empty directories below it.

        Args:
            path: where it belongs in the workspace.
            local: where it is, if not where `path` itself tells (`jobs.paths.local_path`).
            source: whether it goes up as a source.

        Raises:
            UserError: there is no such file, or it cannot be read.
        """
        root = local or local_path(path, self._workdir)
        try:
            found = await asyncio.to_thread(_walk, root, path, self._ledger.links(path))
            for at, _, _ in found:
                at.encode()
            return [
                LocalFile(at, here, 0, status.st_mtime_ns, directory=True, source=source)
                if stat.S_ISDIR(status.st_mode)
                else LocalFile(
                    at, here, status.st_size, status.st_mtime_ns,
                    await self._checksum(here, status), source=source,
                )
                for at, here, status in found
            ]  # fmt: skip
        except UnicodeEncodeError as error:
            raise UserError(
                f"a file has the name {error.object!r}, which is not UTF-8",
                where=str(root).encode(errors="replace").decode(),
                do="Give it another name",
            ) from error
        except OSError as error:
            raise UserError(
                f"the file cannot be read ({error.strerror or error})",
                where=str(root),
                do="See to it that it exists and is readable",
            ) from error

    async def _checksum(self, path: Path, status: os.stat_result) -> str:
        known = self._ledger.local_file(str(path), status.st_size, status.st_mtime_ns)
        if known is not None:
            return known
        key = (str(path), status.st_size, status.st_mtime_ns)
        if key not in self._reading:
            self._reading[key] = asyncio.create_task(asyncio.to_thread(checksum, path))
        try:
            digest = await self._reading[key]
        finally:
            self._reading.pop(key, None)
        self._ledger.set_local_files([(*key, digest)])
        return digest

    def touched(self, path: str, size: int, sha256: str) -> None:
        """Note that a file whose content is known was touched, so that it is not read again."""
        local = local_path(path, self._workdir)
        try:
            status = local.stat()
        except OSError:
            return  # a temp() file that is gone already needs no checksum
        if status.st_size == size:
            self._ledger.set_local_files([(str(local), size, status.st_mtime_ns, sha256)])


def _walk(root: Path, path: str, made: Mapping[str, str]) -> list[tuple[str, Path, os.stat_result]]:
    """(path in the workspace, local path, status) of a file, or of all that is below a directory.

    Symbolic links count as what they lead to; left out are those that lead nowhere or back to a
    directory above them, and what is neither a file nor a directory. A link that a job made, one of
    `made` (path to target), means a place at its site: nothing of this machine that it happens to
    lead to here goes up.
    """
    found: list[tuple[str, Path, os.stat_result]] = []

    def add(local: Path, at: str, above: frozenset[tuple[int, int]]) -> None:
        if at in made and local.is_symlink() and os.readlink(local) == made[at]:
            inside = os.path.realpath(root.parent if local == root else root)
            if not os.path.realpath(local).startswith(f"{inside}{os.sep}"):
                return
        try:
            status = local.stat()
        except OSError as error:
            if local != root and error.errno in (errno.ENOENT, errno.ELOOP):
                return  # a link to nowhere, or a file that has just gone
            raise
        if not stat.S_ISDIR(status.st_mode):
            if stat.S_ISREG(status.st_mode) or local == root:
                found.append((at, local, status))
            return
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            return
        names = sorted(os.listdir(local))
        if not names:
            found.append((at, local, status))
        for name in names:
            add(local / name, f"{at}/{name}", above | {identity})

    add(root, path, frozenset())
    return found


def checksum(path: Path) -> str:
    """The SHA-256 of a file's content, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
