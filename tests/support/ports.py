"""Ports for servers that bind them themselves, some seconds after they were told which."""

import fcntl
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

_RANGE = range(20_000, 32_000)
"""Below what Linux and macOS give to whoever asks for any port, as everything else here does. A
server may take half a minute to start, and one that was stopped comes back to its port."""


def free_ports(count: int) -> list[int]:
    """So many ports that nobody listens at; no other test is given them until this process ends."""
    locks = Path(tempfile.gettempdir()) / "mantik-test-ports"
    locks.mkdir(exist_ok=True)
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().choice(_RANGE)
        lock = os.open(locks / str(port), os.O_CREAT | os.O_RDWR)  # open until the process ends
        with suppress(OSError), socket.socket() as probe:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.bind(("127.0.0.1", port))
            found.append(port)
            continue
        os.close(lock)  # somebody has it
    return found


def free_port() -> int:
    (found,) = free_ports(1)
    return found
