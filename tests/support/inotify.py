"""What the kernel tells of a directory: which names were made in it, and which moved into it."""

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Self

MODIFY, MOVED_TO, CREATE = 0x2, 0x80, 0x100
_HEAD = struct.Struct("iIII")


class Watch:
    """Notes what happens in a directory from the start of its context on (Linux)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> Self:
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.inotify_init1(os.O_NONBLOCK)
        path = os.fsencode(self._directory)
        assert libc.inotify_add_watch(self._file, path, MODIFY | MOVED_TO | CREATE) >= 0
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def events(self) -> Iterator[tuple[str, int]]:
        """The names and what happened to each, since the last call, in order."""
        while True:
            try:
                data = os.read(self._file, 1 << 16)
            except BlockingIOError:
                return
            while data:
                _, mask, _, length = _HEAD.unpack_from(data)
                name = data[_HEAD.size : _HEAD.size + length].rstrip(b"\0")
                yield os.fsdecode(name), mask
                data = data[_HEAD.size + length :]
