"""Local files as they go up: their content's checksum, taken once per content."""

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

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import local_path
from snakemake_executor_plugin_mantik.journal import FileLedger, FileRecord
from snakemake_executor_plugin_mantik.staging.secret_files import CredentialFiles

_CHUNK = 1 << 20

Key = tuple[str, int, int, int, int]
"""A content: path, size, modification and change time in ns, inode.

Size and modification time can be those of another content (`cp -p`, `rsync -t`, archives); no
program can set the change time."""

SETTLED_NS = 50_000_000
"""File systems tell times in steps of some ms: a file that was changed less than so many ns ago may
change again and keep its times, so that its checksum is not remembered."""

_Found = tuple[str, Path, os.stat_result]
"""Path in the workspace, local path, status."""


@dataclass(frozen=True)
class LocalFile:
    """A local file or empty directory and where it belongs in the workspace.

    Attributes:
        path: where it belongs, relative to the workspace.
        local: where it is here.
        size: bytes; 0 for a directory.
        key: what tells its content from another one's, as it was when it was looked at; None if
            there is no such file here.
        sha256: checksum of its content; empty for a directory.
        directory: whether it is a directory.
        source: whether it goes up as one of the working directory's sources.
        content: what it holds, if there is no such file here; `local` is then its path.
    """

    path: str
    local: Path
    size: int
    key: Key | None = None
    sha256: str = ""
    directory: bool = False
    source: bool = False
    content: bytes | None = None

    @classmethod
    def holding(cls, path: str, content: bytes | None) -> "LocalFile":
        """A file at `path` of the workspace that no file of this machine is the origin of.

        Without any content it is an empty directory.
        """
        if content is None:
            return cls(path, Path(path), 0, directory=True, content=b"")
        digest = hashlib.sha256(content).hexdigest()
        return cls(path, Path(path), len(content), sha256=digest, content=content)

    def is_touched(self) -> bool:
        """Whether it may be another one than when it was looked at; it may be gone."""
        try:
            return file_key(self.local, self.local.stat()) != self.key
        except OSError:
            return True

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
        self._inodes: dict[str, int] = {}
        self._reading: dict[Key, asyncio.Task[dict[Key, str | OSError]]] = {}

    async def look_at(
        self, wanted: Iterable[tuple[str, Path | None]], *, source: bool = False
    ) -> list[LocalFile]:
        """Files, and all files and empty directories below directories.

        Args:
            wanted: where each belongs in the workspace, and where it is, if not where that tells
                (`jobs.paths.local_path`).
            source: whether they go up as sources; one that is no longer there is none.

        Raises:
            UserError: there is no such file, it cannot be read, or a credential is read from it.
        """
        roots = [
            (local or local_path(path, self._workdir), path, self._ledger.links(path))
            for path, local in wanted
        ]
        if not roots:
            return []  # a thread is not worth it
        found = await asyncio.to_thread(_walk_all, roots, may_go=source)
        checksums = await self._checksums(found)
        return [
            LocalFile(at, here, 0, file_key(here, status), directory=True, source=source)
            if stat.S_ISDIR(status.st_mode)
            else LocalFile(
                at, here, status.st_size, file_key(here, status), checksums[file_key(here, status)],
                source=source,
            )
            for at, here, status in found
        ]  # fmt: skip

    async def _checksums(self, found: Iterable[_Found]) -> dict[Key, str]:
        """The checksums of files: known, being taken for another job, or taken now."""
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
        """Files have just come here, verified."""
        for file in files:
            with suppress(OSError):
                self._inodes[file.path] = local_path(file.path, self._workdir).stat().st_ino

    def touched(self, files: Iterable[FileRecord]) -> None:
        """Snakemake has touched files that had `settled`: note it, so that none is read again."""
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
    """What tells a file's content from any other that it had or will have."""
    return str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _unreadable(path: object, error: OSError) -> UserError:
    return UserError(
        f"the file cannot be read ({error.strerror or error})",
        where=str(path),
        do="See to it that it exists and is readable",
    )


def _walk_all(
    roots: Iterable[tuple[Path, str, Mapping[str, str]]], *, may_go: bool
) -> list[_Found]:
    """What `_walk` finds at each of several places; with `may_go` there may be nothing.

    Raises:
        UserError: there is no such file, or it cannot be sent.
    """
    found: list[_Found] = []
    credentials = CredentialFiles.named_by(os.environ)
    for root, path, made in roots:
        try:
            here = _walk(root, path, made)
            for at, local, status in here:
                at.encode()
                credentials.refuse(local, status)
        except UnicodeEncodeError as error:
            raise UserError(
                f"a file has the name {error.object!r}, which is not UTF-8",
                where=str(root).encode(errors="replace").decode(),
                do="Give it another name",
            ) from error
        except OSError as error:
            if may_go and error.errno == errno.ENOENT:
                continue
            raise _unreadable(root, error) from error
        found += here
    return found


def _walk(root: Path, path: str, made: Mapping[str, str]) -> list[_Found]:
    """A file, or all that is below a directory.

    Symbolic links count as what they lead to; left out are those that lead nowhere or back to a
    directory above them, and what is neither a file nor a directory. A link that a job made, one of
    `made` (path to target), means a place at its site: nothing of this machine that it happens to
    lead to here goes up.

    Raises:
        UserError: the path itself is neither a file nor a directory.
        OSError: it cannot be looked at.
    """
    found: list[_Found] = []

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
            if stat.S_ISREG(status.st_mode):
                found.append((at, local, status))
            elif local == root:  # reading a named pipe might never end
                raise UserError(
                    "it is neither a file nor a directory, and cannot be sent",
                    where=str(root),
                    do="Name a file as input, or run the rule here (localrules:)",
                )
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


def _checksums(keys: Iterable[Key]) -> dict[Key, str | OSError]:
    """The checksum of each file, or why it cannot be read."""
    digests: dict[Key, str | OSError] = {}
    for key in keys:
        try:
            digests[key] = sha256_of(Path(key[0]))
        except OSError as error:
            digests[key] = error
    return digests


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
