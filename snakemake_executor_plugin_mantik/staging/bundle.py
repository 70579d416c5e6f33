"""Bundles: one gzipped tar of the files that a job needs and that the workspace does not hold yet.

A bundle is never written to this machine's disk: it is read from its files piece by piece, and from
any offset, so that an upload that broke off goes on where it stopped. It may end as several gzip
members, one for each uploaded part; `tar -xz` reads them as one.

A file that the site's server imports from another one (`Site.start_import`) lies beside the
bundle's parts; the tar has a link in its place, `.mantik/imported/MODE/NAME`.

A file that is needed under several names (through symbolic links, mostly) is packed once. Its other
names are links in the tar; the job that unpacks it turns them into copies.
"""

import asyncio
import gzip
import hashlib
import os
import tarfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from ..common.errors import TransferError, UserError
from ..jobs.paths import IMPORTED, OURS, display_path
from ..journal import is_checksum
from .local import LocalFile, file_key

Fetch = Callable[[LocalFile, int], AsyncGenerator[bytes, None]]
"""Reads the content of a file that is stored at another place, from an offset to its end."""

_CHUNK: Final = 1 << 20
_SAMPLE: Final = 1 << 16
_WORTH_IT: Final = 0.9
"""Ratio of compressed to plain size above which a part is not compressed: most data sets and images
do not shrink. Its first `_SAMPLE` bytes decide."""


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


class ContentDiffers(TransferError):  # noqa: N818 - a plain name
    """A file that was read at another place is not the one that a job made there.

    `found` is its path in the workspace, and the checksum of what was read.
    """

    def __init__(self, file: LocalFile, sha256: str) -> None:
        super().__init__(
            f"{display_path(file.path)} is not what the job made (its checksum differs)",
            where=f"place {file.stored}",
            do="It was changed at the site or during the transfer; run its rule again",
        )
        self.found = (file.path, sha256)


@dataclass(frozen=True)
class _Member:
    """One entry of the tar; `size` is that of its content, without the padding."""

    header: bytes
    file: LocalFile
    size: int

    @property
    def padding(self) -> int:
        return -self.size % tarfile.BLOCKSIZE


class Bundle:
    """The tar of some files, not compressed yet. Its bytes depend on the files alone.

    Attributes:
        size: bytes of the tar.
    """

    def __init__(
        self, files: Sequence[LocalFile], imported: Mapping[str, str] | None = None
    ) -> None:
        """Look at `files`; call it in a thread of its own.

        `imported` has the names of those that the site imports, by path.

        Raises:
            FileChanged: a file has changed or vanished since it was examined.
            OSError: a file cannot be examined.
        """
        originals: dict[tuple[int, int], str] = {}
        # A file may be named by itself and also lie in a named directory.
        distinct = {file.path: file for file in files}.values()
        names = imported or {}
        self._members = [
            _imported(file, names[file.path]) if file.path in names else _member(file, originals)
            for file in distinct
        ]
        self._end = bytes(2 * tarfile.BLOCKSIZE)
        self.size = len(self._end) + sum(
            len(one.header) + one.size + one.padding for one in self._members
        )

    async def read(self, fetch: Fetch, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the tar's bytes from `offset` on.

        Files of another place that are read from their beginning are compared with their checksums.

        Raises:
            FileChanged: a local file has changed or vanished since it was examined.
            ContentDiffers: a file at another place has.
            SiteError: a file at another place cannot be read.
            OSError: a local file cannot be read.
        """
        for one in self._members:
            for part in (one.header, one, bytes(one.padding)):
                length = one.size if isinstance(part, _Member) else len(part)
                if offset >= length:
                    offset -= length
                elif isinstance(part, _Member):
                    async with aclosing(_content(part, fetch, offset)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    offset = 0
                else:
                    yield part[offset:]
                    offset = 0
        yield self._end[offset:]

    def read_now(self) -> Iterator[bytes]:
        """Yield the bytes of a tar of local files; for small ones.

        Raises:
            FileChanged, OSError: as `read`.
        """
        for one in self._members:
            yield one.header
            if one.size:
                yield from _local_content(one.file)
            yield bytes(one.padding)
        yield self._end


def pack(files: Sequence[LocalFile]) -> bytes:
    """Make the bundle of `files` in memory; for small ones that travel in the script.

    Raises:
        FileChanged: a file has changed or vanished since it was examined.
        OSError: a file cannot be read.
    """
    return gzip.compress(b"".join(Bundle(files).read_now()), 1, mtime=0)


def compress(part: bytes | bytearray) -> bytes:
    """Make a gzip member of a part of a bundle, smaller than the part if that is worth the time."""
    sample = part[:_SAMPLE]
    shrinks = len(gzip.compress(sample, 1)) < _WORTH_IT * len(sample)
    return gzip.compress(part, 1 if shrinks else 0, mtime=0)


def _imported(file: LocalFile, name: str) -> _Member:
    """Make the entry of an imported file; the script that unpacks it reads the link."""
    member = tarfile.TarInfo(file.path)
    member.type = tarfile.SYMTYPE
    member.linkname = f"{OURS}/{IMPORTED}/{file.mode & 0o777 | 0o600:o}/{name}"
    member.mtime = int(file.modified)
    return _with_header(member, file)


def _member(file: LocalFile, originals: dict[tuple[int, int], str]) -> _Member:
    """Make the entry of a file; `originals` are the files before it, by device and inode."""
    member = tarfile.TarInfo(file.path)
    member.size = file.size
    if file.content is not None or file.stored:
        member.mode = 0o700 if file.content is not None else file.mode & 0o777 | 0o600
        member.mtime = int(file.modified)
        if file.directory:
            member.type, member.mode = tarfile.DIRTYPE, 0o700
        return _with_header(member, file)
    try:
        status = file.local.stat()
    except FileNotFoundError as error:
        raise FileChanged(file) from error
    member.mode = status.st_mode & 0o777 | 0o600
    # Keep the mtime: programs compare it (an index with its data). Owners are dropped.
    member.mtime = status.st_mtime_ns // 10**9
    if file.directory:
        member.type, member.size = tarfile.DIRTYPE, 0
        member.mode |= 0o100
        return _with_header(member, file)
    if file_key(file.local, status) != file.key:
        raise FileChanged(file)
    original = originals.setdefault((status.st_dev, status.st_ino), file.path)
    if original != file.path:
        member.type, member.size = tarfile.SYMTYPE, 0
        member.linkname = os.path.relpath(original, os.path.dirname(file.path))
    return _with_header(member, file)


def _with_header(member: tarfile.TarInfo, file: LocalFile) -> _Member:
    header = member.tobuf(tarfile.PAX_FORMAT, tarfile.ENCODING, "surrogateescape")
    return _Member(header, file, member.size)


async def _content(member: _Member, fetch: Fetch, offset: int) -> AsyncGenerator[bytes, None]:
    file = member.file
    if not file.stored:
        chunks = _local_content(file, offset)
        while chunk := await asyncio.to_thread(next, chunks, b""):
            yield chunk
        return
    digest = hashlib.sha256() if is_checksum(file.sha256) and not offset else None
    async with aclosing(fetch(file, offset)) as fetched:
        async for chunk in fetched:
            if digest is not None:
                await asyncio.to_thread(digest.update, chunk)
            yield chunk
    if digest is not None and digest.hexdigest() != file.sha256:
        raise ContentDiffers(file, digest.hexdigest())


def _local_content(file: LocalFile, offset: int = 0) -> Iterator[bytes]:
    """Yield a file's content from `offset` on; check before and after that it has not changed."""
    if file.content is not None:
        yield file.content[offset:]
        return
    try:
        with file.local.open("rb", buffering=0) as content:
            left = file.size - offset
            content.seek(offset)
            while left and not file.is_touched() and (chunk := content.read(min(_CHUNK, left))):
                left -= len(chunk)
                yield chunk
    except FileNotFoundError as error:
        raise FileChanged(file) from error
    if left or file.is_touched():
        raise FileChanged(file)
