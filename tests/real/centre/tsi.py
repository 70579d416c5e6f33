"""UNICORE as centres run it: the real TSI as root in front of Slurm, and a UNICORE/X before it.

The TSI becomes the user for all that it does. Its project files are installed into the directory of
the server, as its own installer does; a UNICORE/X of the same release speaks to it.
"""

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template

from tests.real.centre import SERVERS, USER, Centre
from tests.support import unicoreserver
from tests.support.daemons import Daemon
from tests.support.ports import free_ports
from tests.support.unicoreserver import OwnUnicoreX

SOFTWARE = "UNICORE/X with TSI"
"""What the marks `software` call it."""

DATA = Path(__file__).parent / "unicore"
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
"""Where the TSI finds Slurm's commands, and jobs their programs."""
START_S = 600.0
"""How long the TSI may take until it answers, seconds."""


@dataclass(frozen=True)
class Tsi:
    """A TSI of this process.

    Attributes:
        directory: holds its code, configuration and log.
        port: what it listens at.
    """

    directory: Path
    port: int
    daemon: Daemon

    def start(self) -> None:
        """Start it, again or for the first time, and wait until it listens."""
        self.daemon.start()
        deadline = time.monotonic() + START_S
        while self.daemon.runs and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the TSI does not listen; it said:\n{self.daemon.console.read_text()}")

    def kill(self) -> None:
        """Kill it with -9, and the workers that UNICORE/X speaks to."""
        self.daemon.kill()


@dataclass(frozen=True)
class Unicore:
    """A TSI and the UNICORE/X that speaks to it; a test may kill and start each of an own pair."""

    tsi: Tsi
    server: OwnUnicoreX


@contextmanager
def unicore(centre: Centre, directory: Path, scratch: Path) -> Iterator[Unicore]:
    """Run a TSI and a UNICORE/X in front of the centre's Slurm.

    Args:
        centre: whose Slurm runs the jobs.
        directory: is made; holds all files of both. The user must be able to get into its parent.
        scratch: the user's directory that is the storage SCRATCH.
    """
    directory.mkdir()
    tsi_port, reply_port, port = free_ports(3)
    jobs = directory / "jobs"
    jobs.mkdir()
    jobs.chmod(0o1777)
    tsi = _install(directory / "tsi", centre, tsi_port, reply_port)
    server = OwnUnicoreX(directory / "unicorex", port, scratch)
    server.directory.mkdir(mode=0o700)
    mode = Template((DATA / "remote.config").read_text())
    text = mode.substitute(
        PORT=tsi_port, REPLY_PORT=reply_port, USER=USER, JOBS=jobs, SCRATCH=scratch
    )
    unicoreserver.write_configuration(server, text, DATA / "idb.json", USER)
    with ExitStack() as running:
        running.callback(tsi.daemon.stop)
        tsi.start()
        running.callback(server.stop)
        server.start()
        yield Unicore(tsi, server)


def _install(directory: Path, centre: Centre, port: int, reply_port: int) -> Tsi:
    """Install the TSI for Slurm into a new directory."""
    library = directory / "lib"
    shutil.copytree(SERVERS / "tsi" / "lib", library)
    shutil.copy(SERVERS / "tsi" / "slurm" / "BSS.py", library)
    debug = os.environ.get("MANTIK_TEST_TSI_DEBUG", "0")
    template = Template((DATA / "tsi.properties").read_text())
    text = template.substitute(PORT=port, REPLY_PORT=reply_port, DEBUG=debug)
    (directory / "tsi.properties").write_text(text)
    # What its own start script sets: it reaches jobs, as at a centre.
    environment = {
        **centre.environment, "PATH": PATH, "PYTHONPATH": str(library), "HOME": "/root",
        "LANG": "C.UTF-8",
    }  # fmt: skip
    python = shutil.which("python3", path=PATH)
    assert python is not None, "the user can run no Python of a developer's home"
    command = (python, str(library / "TSI.py"), "tsi.properties")
    daemon = Daemon(command, directory, directory / "tsi.log", environment, forks=True)
    return Tsi(directory, port, daemon)
