"""Locks on files. They end with the process that holds them, whatever ends it."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

_TRIES: Final = 4
_PAUSE_S: Final = 0.1


def take_lock(file: IO[Any] | int) -> bool:
    """Take the lock of an open file, which is then the caller's until the file is closed.

    Returns:
        Whether it was to be had. Whoever looks at a lock holds it for a moment, so it is tried for
        some tenths of a second.

    Raises:
        OSError: the file system has no locks.
    """
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left:
                time.sleep(_PAUSE_S)
        else:
            return True
    return False


def is_locked(path: Path) -> bool:
    """Whether a process has taken the lock of a file, which need not be there."""
    with hold_if_free(path) as free:
        return not free


@contextmanager
def hold_if_free(path: Path) -> Iterator[bool]:
    """Whether no process has taken the lock of a file; while that is so, none gets it.

    A file that is not there, or goes at this moment, is nobody's.
    """
    with ExitStack() as opened:
        free = True
        with suppress(FileNotFoundError):
            file = opened.enter_context(path.open("rb"))
            try:
                # Shared: others may look at the same time.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
        yield free
