"""Reads what a job has logged while it runs, as its script packs it (`live.sh.j2`).

A job's own user can write what he likes into a pack: nothing leaves the directory that it is for,
nothing takes more room than it may, and whatever makes no sense is `PackDamaged`.
"""

import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from snakemake_executor_plugin_mantik.jobs.paths import MAX_PATH_DEPTH
from snakemake_executor_plugin_mantik.jobs.tar_reader import TarDamaged, read_tar

PACK_BYTES: Final = 2 << 20
"""About as much is packed at once, of files as they are, and one file more: so much can be
downloaded from any site without a job there (firecREST: three quarters of 5 MiB)."""
PIECE_BYTES: Final = 64 << 10
"""A piece that has so many bytes is followed by another one: some APIs give whole files only."""
LONGEST_PACK: Final = 64 << 20
"""Bytes that a pack may have, packed or not."""

_PART = re.compile(r"part/(?P<start>[0-9]{1,15})/(?P<path>.+)", re.DOTALL)


class PackDamaged(Exception):  # noqa: N818 - reads as what it says
    """It is no pack that a job script makes."""


@dataclass(frozen=True)
class Packed:
    """Something of a file that a job has written.

    Attributes:
        path: relative to the directory that is told of, without `..`.
        content: the file's, from byte `start` on.
        start: None: `content` is the whole file.
    """

    path: PurePosixPath
    content: bytes
    start: int | None = None


@dataclass(frozen=True)
class Pack:
    """One pack.

    Attributes:
        size: bytes that it takes in the piece.
        files: what it brings.
        later: the paths of files that have changed and are too large to come now.
    """

    size: int
    files: tuple[Packed, ...]
    later: tuple[PurePosixPath, ...]


def read_packs(data: bytes) -> Iterator[Pack]:
    """The packs that `data` begins with; one that is cut ends them.

    Raises:
        PackDamaged: what comes next is no pack.
    """
    while data:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            tar = unpacker.decompress(data, LONGEST_PACK)
        except zlib.error as error:
            raise PackDamaged(str(error)) from error
        if len(tar) >= LONGEST_PACK:
            raise PackDamaged(f"it unpacks to {LONGEST_PACK} bytes or more")
        if not unpacker.eof:
            return
        rest = unpacker.unused_data
        yield _pack(tar, len(data) - len(rest))
        data = rest


def _pack(tar: bytes, size: int) -> Pack:
    files: list[Packed] = []
    later: list[PurePosixPath] = []
    try:
        for name, pieces in read_tar(io.BytesIO(tar)):
            content = b"".join(pieces)
            if name == "later":
                text = content.decode("utf-8", "surrogateescape")
                later += [_path(path) for path in text.split("\0")[:-1]]
            elif (part := _PART.fullmatch(name)) is not None:
                files.append(Packed(_path(part["path"]), content, int(part["start"])))
            else:
                files.append(Packed(_path(name), content))
    except TarDamaged as error:
        raise PackDamaged(str(error)) from error
    return Pack(size, tuple(files), tuple(later))


def _path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise PackDamaged(f"a file {name!r}")
    if len(path.parts) > MAX_PATH_DEPTH:
        raise PackDamaged(f"a path of more than {MAX_PATH_DEPTH} directories")
    return path
