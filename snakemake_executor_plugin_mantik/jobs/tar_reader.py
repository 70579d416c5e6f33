"""Read plain files from tars that jobs made, and skip everything else in them.

A tar may hold anything, because the job's own user can write it. Python's own module unpacks
compressed content, makes files of a size that only a header claims, and runs out of stack or memory
on nested headers; this module prevents that.
"""

import tarfile
from collections.abc import Iterator
from typing import IO, Final, cast

MOST_ENTRIES: Final = 1_000_000
"""Maximum number of entries in a tar; each takes about a thousand bytes of memory."""
_LONGEST_HEADER: Final = 16 << 20
"""Maximum size of one read in bytes; headers with the longest names have a few thousand."""
_CHUNK: Final = 1 << 20
_DAMAGED: Final = (tarfile.TarError, ValueError, OverflowError, RecursionError)


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
