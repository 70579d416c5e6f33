"""Read tars that jobs made: plain files, and packs of what a running job has logged (`live.sh`).

A tar may hold anything, because the job's own user can write it. Python's own module unpacks
compressed content, makes files of a size that only a header claims, and runs out of stack or memory
on nested headers; `read_tar` prevents that. Paths of a pack that lead outside the directory, packs
that are too large, and malformed ones raise `TarDamaged`, too.
"""

import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Final, cast

from .paths import MAX_PATH_DEPTH

MOST_ENTRIES: Final = 1_000_000
"""Maximum number of entries in a tar; each takes about a thousand bytes of memory."""
_LONGEST_HEADER: Final = 16 << 20
"""Maximum size of one read in bytes; headers with the longest names have a few thousand."""
_CHUNK: Final = 1 << 20
_DAMAGED: Final = (tarfile.TarError, ValueError, OverflowError, RecursionError)
PACK_BYTES: Final = 2 << 20
"""A pack holds about so many bytes of unpacked files, and one file more: any site can download
that much without a transfer job (firecREST: three quarters of 5 MiB)."""
PIECE_BYTES: Final = 64 << 10
"""After so many bytes a new piece begins: some APIs download only whole files."""
LONGEST_PACK: Final = 64 << 20
"""Maximum size of a pack in bytes, packed or not."""

_PART = re.compile(r"part/(?P<start>[0-9]{1,15})/(?P<path>.+)", re.DOTALL)


class TarDamaged(Exception):  # noqa: N818 - reads as what it says
    """The data is not a tar, or not one that a job script makes."""


class _Sparing:
    """A file that refuses large reads, because a header may claim any size for itself."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def read_tar(file: IO[bytes]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the names and contents of the plain files in an uncompressed tar.

    Contents come in pieces; read them before you advance to the next file.

    Raises:
        TarDamaged: the tar cannot be read, has too many entries, or is truncated.
    """
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], _Sparing(file)), mode="r:", errors="surrogateescape"
        ) as tar:
            for number, member in enumerate(tar):
                if number >= MOST_ENTRIES:
                    raise TarDamaged(f"it has more than {MOST_ENTRIES} entries")
                # Sparse files can have holes of any size.
                if member.isreg() and not member.issparse():
                    content = tar.extractfile(member)
                    assert content is not None
                    yield member.name, _pieces(content)
    except _DAMAGED as error:
        raise TarDamaged(str(error)) from error


def _pieces(content: IO[bytes]) -> Iterator[bytes]:
    try:
        while piece := content.read(_CHUNK):
            yield piece
    except _DAMAGED as error:
        raise TarDamaged(str(error)) from error


@dataclass(frozen=True)
class Packed:
    """A file that a job has written, or a part of it.

    Attributes:
        path: relative to the reported directory, without `..`.
        content: the file's content from byte `start` on.
        start: offset in bytes; None if `content` is the whole file.
    """

    path: PurePosixPath
    content: bytes
    start: int | None = None


@dataclass(frozen=True)
class Pack:
    """The files of one pack.

    Attributes:
        size: bytes that the pack takes in the piece.
        later: paths of files that have changed but are too large to report now.
    """

    size: int
    files: tuple[Packed, ...]
    later: tuple[PurePosixPath, ...]


def read_packs(data: bytes) -> Iterator[Pack]:
    """Yield the complete packs at the beginning of `data`; stop at a truncated one.

    Raises:
        TarDamaged: the next bytes are not a pack.
    """
    while data:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            tar = unpacker.decompress(data, LONGEST_PACK)
        except zlib.error as error:
            raise TarDamaged(str(error)) from error
        if len(tar) >= LONGEST_PACK:
            raise TarDamaged(f"it unpacks to {LONGEST_PACK} bytes or more")
        if not unpacker.eof:
            return
        rest = unpacker.unused_data
        yield _pack(tar, len(data) - len(rest))
        data = rest


def _pack(tar: bytes, size: int) -> Pack:
    files: list[Packed] = []
    later: list[PurePosixPath] = []
    for name, pieces in read_tar(io.BytesIO(tar)):
        content = b"".join(pieces)
        if name == "later":
            text = content.decode("utf-8", "surrogateescape")
            later += [_path(path) for path in text.split("\0")[:-1]]
        elif (part := _PART.fullmatch(name)) is not None:
            files.append(Packed(_path(part["path"]), content, int(part["start"])))
        else:
            files.append(Packed(_path(name), content))
    return Pack(size, tuple(files), tuple(later))


def _path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    outside = path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name
    if outside or len(path.parts) > MAX_PATH_DEPTH:
        raise TarDamaged(f"a file {name!r}")
    return path
