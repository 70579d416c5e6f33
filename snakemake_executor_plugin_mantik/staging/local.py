"""Local files to be uploaded, and their checksums, computed once per content."""

import asyncio
import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import UserError
from ..jobs.paths import local_path
from ..journal import FileLedger, FileRecord
from .secret_files import CredentialFiles, Found, walk

Key = tuple[str, int, int, int, int]
"""A content: path, size, modification and change time in ns, inode.

Another content can have the same size and modification time (`cp -p`, `rsync -t`, archives); no
program can set the change time."""

SETTLED_NS = 50_000_000
"""File systems record times in steps of some ms: a file that was changed less than so many ns ago
may change again and keep its times, so its checksum is not stored."""


@dataclass(frozen=True)
class LocalFile:
    """A local file or empty directory, and its path in the workspace.

    Attributes:
        path: relative to the workspace.
        local: the local path; equals `path` if there is no local file.
        size: bytes; 0 for a directory.
        key: identifies the content at the time of the check; None if there is no local file.
        sha256: checksum of its content; empty for a directory.
        project: whether it is one of the project files.
        content: its bytes if there is no local file.
        stored: identity of the place that it lies at, if it is a remote output: then there is no
            local file, either, and `local` is its path there.
        mode, modified: of a remote output, its permission bits, and when it was modified by the
            clock of its site, where they are known.
    """

    path: str
    local: Path
    size: int
    key: Key | None = None
    sha256: str = ""
    directory: bool = False
    project: bool = False
    content: bytes | None = None
    stored: str = ""
    mode: int = 0
    modified: float = 0.0

    @classmethod
    def holding(cls, path: str, content: bytes | None) -> "LocalFile":
        """Make a file at `path` of the workspace that does not come from a local file.

        Without content it is an empty directory.
        """
        if content is None:
            return cls(path, Path(path), 0, directory=True, content=b"")
        digest = hashlib.sha256(content).hexdigest()
        return cls(path, Path(path), len(content), sha256=digest, content=content)

    @classmethod
    def at(cls, place: str, file: FileRecord) -> "LocalFile":
        """Make a file or empty directory of a remote output."""
        return cls(
            file.path, Path(file.path), file.size, sha256=file.sha256,
            directory=not file.sha256, stored=place, mode=file.mode, modified=file.modified,
        )  # fmt: skip

    def is_touched(self) -> bool:
        """Check whether it changed, or vanished, since it was examined."""
        if self.stored:
            return False
        try:
            return file_key(self.local, self.local.stat()) != self.key
        except OSError:
            return True

    @property
    def record(self) -> FileRecord:
        """The manifest's record of it once it is at a site."""
        return FileRecord(self.path, self.size, self.sha256, self.project)


class LocalFiles:
    """Examines files in the workflow's directory and reads each content once.

    Belongs to the event loop's thread; files are read in worker threads.
    """

    def __init__(self, workdir: Path, ledger: FileLedger) -> None:
        self._workdir = workdir
        self._ledger = ledger
        self._inodes: dict[str, int] = {}
        self._reading: dict[Key, asyncio.Task[dict[Key, str | OSError]]] = {}

    async def look_at(
        self, wanted: Iterable[tuple[str, Path | None]], *, project: bool = False
    ) -> list[LocalFile]:
        """Examine files, and all files and empty directories below directories.

        `wanted` has the path of each in the workspace, and its local path if that does not follow
        from the former (`jobs.paths.local_path`). Project files may be missing.

        Raises:
            UserError: a file is missing, cannot be read or uploaded, or holds a credential that is
                in use.
        """
        roots = [
            (local or local_path(path, self._workdir), path, self._ledger.links(path))
            for path, local in wanted
        ]
        if not roots:
            return []  # not worth a thread
        found = await asyncio.to_thread(_walk_all, roots, may_go=project)
        checksums = await self._checksums(found)
        return [
            LocalFile(at, here, 0, file_key(here, status), directory=True, project=project)
            if stat.S_ISDIR(status.st_mode)
            else LocalFile(
                at, here, status.st_size, file_key(here, status), checksums[file_key(here, status)],
                project=project,
            )
            for at, here, status in found
        ]  # fmt: skip

    async def _checksums(self, found: Iterable[Found]) -> dict[Key, str]:
        """Return checksums that are known, being computed for another job, or computed now."""
        keys = [file_key(here, s) for _, here, s in found if not stat.S_ISDIR(s.st_mode)]
        checksums = {key: sha for key in keys if (sha := self._ledger.local_file(*key)) is not None}
        unknown = dict.fromkeys(key for key in keys if key not in checksums)
        fresh = [key for key in unknown if key not in self._reading]
        if fresh:
            self._reading |= dict.fromkeys(fresh, asyncio.create_task(self._read(fresh)))
        for reading in {self._reading[key] for key in unknown}:
            digests = await reading
            for key in unknown.keys() & digests.keys():
                digest = digests[key]
                if isinstance(digest, OSError):
                    raise _unreadable(key[0], digest)
                checksums[key] = digest
        return checksums

    async def _read(self, keys: list[Key]) -> dict[Key, str | OSError]:
        try:
            fresh = time.time_ns() - SETTLED_NS
            digests = await asyncio.to_thread(_checksums, keys)
            known = [
                (*key, digest)
                for key, digest in digests.items()
                if isinstance(digest, str) and key[3] < fresh
            ]
            self._ledger.set_local_files(known)
            return digests
        finally:
            for key in keys:
                self._reading.pop(key, None)

    def settled(self, files: Iterable[FileRecord]) -> None:
        """Note files that have just been downloaded and verified."""
        for file in files:
            with suppress(OSError):
                self._inodes[file.path] = local_path(file.path, self._workdir).stat().st_ino

    def touched(self, files: Iterable[FileRecord]) -> None:
        """Note that Snakemake has touched files that had `settled`, so that none is read again."""
        known = []
        for file in files:
            local = local_path(file.path, self._workdir)
            try:
                key = file_key(local, local.stat())
            except OSError:
                continue  # a temp() file that is gone already needs no checksum
            if file.sha256 and (key[1], key[4]) == (file.size, self._inodes.pop(file.path, None)):
                known.append((*key, file.sha256))
        if known:
            self._ledger.set_local_files(known)


def file_key(path: Path, status: os.stat_result) -> Key:
    """Return the key that identifies a file's content among all its past and future contents."""
    return str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _unreadable(path: object, error: OSError) -> UserError:
    return UserError(
        f"the file cannot be read ({error.strerror or error})",
        where=str(path),
        do="Check that it exists and is readable",
    )


def _walk_all(roots: Iterable[tuple[Path, str, Mapping[str, str]]], *, may_go: bool) -> list[Found]:
    """Walk several roots; with `may_go` missing ones are skipped.

    Raises:
        UserError: a file is missing or cannot be uploaded.
    """
    found: list[Found] = []
    credentials = CredentialFiles(os.environ)
    for root, path, made in roots:
        try:
            here = walk(root, path, made)
            for at, local, status in here:
                at.encode()
                credentials.refuse(local, status)
        except UnicodeEncodeError as error:
            raise UserError(
                f"a file has the name {error.object!r}, which is not UTF-8",
                where=str(root).encode(errors="replace").decode(),
                do="Rename the file",
            ) from error
        except OSError as error:
            if may_go and error.errno == errno.ENOENT:
                continue
            raise _unreadable(root, error) from error
        found += here
    return found


def _checksums(keys: Iterable[Key]) -> dict[Key, str | OSError]:
    digests: dict[Key, str | OSError] = {}
    for key in keys:
        try:
            digests[key] = sha256_of(Path(key[0]))
        except OSError as error:
            digests[key] = error
    return digests


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
