"""The login node of the centre: an OpenSSH server of its own, on loopback, for one user's key."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.real.centre import USER, Centre
from tests.support.daemons import Daemon
from tests.support.ports import free_port

PROGRAM = Path("/usr/sbin/sshd")
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
"""Of the commands that run there, beside their own."""

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {directory}/host
AuthorizedKeysFile {directory}/id.pub
PidFile none
MaxSessions {sessions}
MaxStartups 200
PasswordAuthentication no
UsePAM no
StrictModes no
AllowUsers {user}
SetEnv {environment}
"""

START_S = 600.0
"""How long the server may take until it listens, seconds."""
MAX_SESSIONS = 10
"""Channels of one connection; OpenSSH's own default, which firecREST's users share."""


@dataclass(frozen=True)
class LoginNode:
    """Where the login node is.

    Attributes:
        port: of its sshd.
        key: the user's private key.
    """

    port: int
    key: Path


@contextmanager
def login_node(centre: Centre, directory: Path, sessions: int) -> Iterator[LoginNode]:
    """Run a login node; its commands find the centre's Slurm.

    Args:
        centre: whose Slurm that is.
        directory: is made; everybody must be able to get into its parent. Programs in its `bin`
            come before those of the same names elsewhere.
        sessions: channels of one connection.
    """
    directory.mkdir()
    programs = directory / "bin"
    programs.mkdir()
    for name in ("host", "id"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True
        )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd becomes nobody there
    port = free_port()
    variables = {**centre.environment, "PATH": f"{programs}:{SEARCH_PATH}"}
    (directory / "sshd_config").write_text(
        _CONFIG.format(
            port=port, directory=directory, sessions=sessions, user=USER,
            environment=" ".join(f"{name}={value}" for name, value in variables.items()),
        )
    )  # fmt: skip
    command = [str(PROGRAM), "-D", "-e", "-f", str(directory / "sshd_config")]
    daemon = Daemon(command, directory, directory / "sshd.log")
    daemon.start()
    try:
        deadline = time.monotonic() + START_S
        while not _listens(port):
            if not daemon.runs or time.monotonic() > deadline:
                raise RuntimeError(f"sshd does not listen; it said:\n{daemon.console.read_text()}")
            time.sleep(0.05)
        yield LoginNode(port, directory / "id")
    finally:
        daemon.stop()


def lacking() -> list[str]:
    needed = (str(PROGRAM), "ssh-keygen", "setpriv", "curl")  # curl: of firecREST's transfer jobs
    return [program for program in needed if shutil.which(program) is None]


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
