"""Servers that all workers of a test session share: the first one starts it, the last one ends it.

Whoever uses the server holds a shared lock on a file. The server runs under a keeper, a process
that waits for the lock alone and then ends the server: the kernel releases the locks of workers
that end in any way, so no crash and no interrupt leaves a server behind.
"""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

STOP_S = 60.0
"""How long a server may take to end before it is killed, seconds: a centre ends its jobs first."""

_keepers: "list[subprocess.Popen[bytes]]" = []
"""Of the servers that this process has started; they outlive it if others use them."""

Told = dict[str, Any]
"""What workers must know of a server, as JSON."""


def session_directory(factory: "pytest.TempPathFactory") -> Path:
    """The directory of this test session, the same one for all of its workers."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def shared(directory: Path, start: Callable[[Path, Path], Told]) -> Iterator[Told]:
    """What `start` has told of the server of `directory`, which runs until the block's end.

    If there is none, `start` is called with an empty directory and a file for `keep`; it starts
    the server and waits until it answers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    told = directory / "told.json"
    with (directory / "users").open("a") as users:
        with (directory / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Waits for a keeper that is about to end the server of those who were here before.
            fcntl.flock(users, fcntl.LOCK_SH)
            if not told.exists():
                place = directory / f"{len(list(directory.iterdir()))}"
                place.mkdir()
                told.write_text(json.dumps(start(place, directory / "users")))
        yield json.loads(told.read_text())


def keep(
    users: Path, command: Sequence[str | Path], *, directory: Path, console: Path, **more: Any
) -> "subprocess.Popen[bytes]":
    """Start a server in `directory` that runs while somebody holds `users`; the keeper's process.

    What the server says goes to the file `console`.
    """
    with console.open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, __file__, users, *command],
            cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, **more,
        )  # fmt: skip
    _keepers.append(keeper)
    return keeper


def _keeper(users: Path, command: Sequence[str]) -> int:
    """Run `command` until it ends or nobody holds a lock on `users` any more."""
    # Whoever ends the keeper lets the server end what it has started.
    server = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command])
    lock = users.open("a")

    def end() -> None:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        server.kill()

    threading.Thread(target=end, daemon=True).start()
    code = server.wait()
    users.with_name("told.json").unlink(missing_ok=True)
    return code  # which releases the lock


if __name__ == "__main__":
    sys.exit(_keeper(Path(sys.argv[1]), sys.argv[2:]))
