"""Ports for servers that bind them themselves, some seconds after they were told which."""

import random
import socket
from contextlib import ExitStack, suppress

_RANGE = range(20_000, 32_000)
"""Below what Linux and macOS give to whoever asks for any port, as everything else here does. A
server may take half a minute to start, and one that was stopped comes back to its port."""


def free_ports(count: int) -> list[int]:
    """So many ports that nobody listens at; all held until the last is found."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = random.SystemRandom().choice(_RANGE)
            probe = held.enter_context(socket.socket())
            with suppress(OSError):  # somebody has it
                probe.bind(("127.0.0.1", port))
                found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    (found,) = free_ports(1)
    return found
