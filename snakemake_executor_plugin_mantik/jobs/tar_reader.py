"""Reads tars that jobs made: only plain files in them count, whatever else they hold.

Python's own module unpacks what is compressed inside, makes files of a size that only a header
claims, and runs out of stack or memory on headers of headers. A job's own user can write what he
likes into a tar, so none of that may happen here.
"""

import tarfile
from collections.abc import Iterator
from typing import IO, Final, cast

MOST_ENTRIES: Final = 1_000_000
"""Entries that a tar may have; each takes about a thousand bytes of memory."""
_LONGEST_HEADER: Final = 16 << 20
"""Bytes that are read in one go; headers with the longest names have some thousand."""
_CHUNK: Final = 1 << 20
_DAMAGED: Final = (tarfile.TarError, ValueError, OverflowError, RecursionError)


class TarDamaged(Exception):  # noqa: N818 - reads as what it says
    """It is no tar, or one that no job script makes."""


class _Sparing:
    """A file that is never read in large pieces: a header may claim any size of itself."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def read_tar(file: IO[bytes]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The names and contents of the plain files in an uncompressed tar.

    Contents come in pieces, to be taken before the next name is asked for.

    Raises:
        TarDamaged: it cannot be read, has too many entries, or ends too early.
    """
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], _Sparing(file)), mode="r:", errors="surrogateescape"
        ) as tar:
            for number, member in enumerate(tar):
                if number >= MOST_ENTRIES:
                    raise TarDamaged(f"it has more than {MOST_ENTRIES} entries")
                # What is sparse has holes of any size.
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
