"""Locks on files. They end with the process that holds them, however it ends."""

import fcntl
import time
from pathlib import Path
from typing import IO, Any, Final

from .errors import UserError

_ATTEMPTS: Final = 4
_PAUSE_S: Final = 0.1


def take_lock(file: IO[Any] | int) -> bool:
    """Take the lock of an open file; the caller holds it until the file is closed.

    Returns whether the lock was taken. `is_locked` holds a lock for a moment to check it, so a lock
    that is held is tried again for some tenths of a second.

    Raises:
        OSError: the file system does not support locks.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left:
                time.sleep(_PAUSE_S)
        else:
            return True
    return False


def is_locked(path: Path) -> bool:
    """Check whether a process holds the lock of a file, which may be missing.

    Raises:
        UserError: the file cannot be opened.
    """
    try:
        with path.open("rb") as file:
            # Shared: other processes may check at the same time.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(
            f"it cannot be seen whether the file is locked ({error.strerror})",
            where=str(path),
            do="Check its permissions, and those of the directories above it",
        ) from error
    return False
