"""Read what a running job has logged, as its script packs it (`live.sh`).

A pack may hold anything, because the job's own user can write it. So paths outside the directory,
packs that are too large, and malformed ones raise `TarDamaged`.
"""

import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from .paths import MAX_PATH_DEPTH
from .tar_reader import TarDamaged, read_tar

PACK_BYTES: Final = 2 << 20
"""A pack holds about so many bytes of unpacked files, and one file more: any site can download
that much without a transfer job (firecREST: three quarters of 5 MiB)."""
PIECE_BYTES: Final = 64 << 10
"""After so many bytes a new piece begins: some APIs download only whole files."""
LONGEST_PACK: Final = 64 << 20
"""Maximum size of a pack in bytes, packed or not."""

_PART = re.compile(r"part/(?P<start>[0-9]{1,15})/(?P<path>.+)", re.DOTALL)


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
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise TarDamaged(f"a file {name!r}")
    if len(path.parts) > MAX_PATH_DEPTH:
        raise TarDamaged(f"a path of more than {MAX_PATH_DEPTH} directories")
    return path
