"""A real one-node Slurm with accounting on loopback, for tests.

Nothing of the system's own configuration is read or written: keys, sockets, state and logs lie in a
directory, the ports are free ones, and all daemons are children of this process that end with it.
The node pretends to have more than the machine has, GPUs included, as the sandbox's nodes do.
"""

import os
import pwd
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Self

from tests.real import mariadb
from tests.real.mariadb import found
from tests.support.ports import free_ports

DATA = Path(__file__).parent / "slurmconf"
PROGRAMS = (
    "munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "srun", *mariadb.PROGRAMS, "setpriv",
)  # fmt: skip
START_S = 180.0
"""How long a daemon may take until it answers, seconds."""
STOP_S = 10.0
"""How long a daemon may take to end before it is killed, seconds."""

ACCOUNTS = ("sandbox", "other")
"""The accounts that jobs may be charged to, the first is the user's default."""
QOS = ("short",)
"""What jobs may name beside the default `normal`."""
GPUS = 4


def lacking() -> list[str]:
    """The programs that are not installed."""
    return [program for program in PROGRAMS if found(program) is None]


@dataclass
class Slurm:
    """A Slurm that runs.

    Attributes:
        directory: all of its files; its configuration is in `slurm.conf`.
        node: the name of its one node.
    """

    directory: Path
    node: str = field(default_factory=socket.gethostname)
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> Mapping[str, str]:
        """What leads Slurm's commands here."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *command: str, check: bool = True) -> str:
        """What one of Slurm's commands says."""
        ended = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True,
            timeout=START_S, check=False,
        )  # fmt: skip
        assert not check or ended.returncode == 0, f"{command}: {ended.stderr}"
        return ended.stdout + ended.stderr

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` tells of a job, by key."""
        text = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def stop(self) -> None:
        """End all jobs, then the daemons, the latest first."""
        if "slurmd" in self._daemons:
            self.run("scancel", "--user", pwd.getpwuid(os.geteuid()).pw_name, check=False)
            with suppress(TimeoutError):
                _until(lambda: not self.run("squeue", "--noheader", check=False).strip(), STOP_S)
        for name in reversed(self._daemons):
            daemon = self._daemons[name]
            daemon.terminate()
            try:
                daemon.wait(STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    # --- its daemons ---------------------------------------------------------------------------

    def _start(self) -> None:
        for name in ("state", "spool", "munge"):
            (self.directory / name).mkdir(mode=0o700)
        ports = dict(zip(("CTLD", "NODED", "DBD", "SQL"), free_ports(4), strict=True))
        password = secrets.token_hex(8)
        self._configure(ports, password)
        self._start_munge()
        self._start_database(ports["SQL"], password)
        self._daemon("slurmdbd", "-D")
        self._answers("sacctmgr", "--noheader", "show", "cluster")
        for command in (
            "add cluster sandbox",
            *(f"add account {account} cluster=sandbox" for account in ACCOUNTS),
            f"add user {_user()} account={','.join(ACCOUNTS)} cluster=sandbox",
            f"modify user {_user()} set defaultaccount={ACCOUNTS[0]}",
            *(f"add qos {qos}" for qos in QOS),
            f"modify user {_user()} set qos+={','.join(QOS)}",
        ):
            self.run("sacctmgr", "--immediate", *command.split())
        self._daemon("slurmctld", "-D")
        self._answers("scontrol", "ping")
        self._daemon("slurmd", "-D", "-N", self.node)
        _until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T", check=False))

    def _configure(self, ports: Mapping[str, int], password: str) -> None:
        values = {
            "DIRECTORY": str(self.directory),
            "NODE": self.node,
            "USER": _user(),
            "PASSWORD": password,
            "GPUS": str(GPUS),
            **{name: str(port) for name, port in ports.items()},
        }
        for name in ("slurm.conf", "slurmdbd.conf", "gres.conf"):
            text = Template((DATA / name).read_text()).substitute(values)
            (self.directory / name).write_text(text)
            (self.directory / name).chmod(0o600)
        for number in range(GPUS):
            (self.directory / f"gpu{number}").touch()

    def _start_munge(self) -> None:
        munge = self.directory / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o400)
        options = {name: munge / name for name in ("socket", "pid-file", "log-file", "seed-file")}
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={munge / 'key'}",
            *(f"--{name}={path}" for name, path in options.items()),
        )  # fmt: skip
        _until((munge / "socket").exists)

    def _start_database(self, port: int, password: str) -> None:
        self._daemon("mariadbd", *mariadb.prepare(self.directory, port, "slurm", password, "slurm"))
        _until(lambda: mariadb.answers(port))

    def _daemon(self, name: str, *arguments: str) -> None:
        program = found(name)
        assert program is not None
        with (self.directory / f"{name}.log").open("ab") as log:
            # With this process its daemons end, even if it is killed.
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", program, *arguments],
                cwd=self.directory, env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _answers(self, *command: str) -> None:
        """Wait until a command succeeds and says that its server is up."""

        def up() -> bool:
            for name, daemon in self._daemons.items():
                assert daemon.poll() is None, (self.directory / f"{name}.log").read_text()
            return "error" not in (said := self.run(*command, check=False)) and "DOWN" not in said

        _until(up)


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _until(condition: Callable[[], bool], seconds: float = START_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"Slurm was not ready within {seconds} s")
        time.sleep(0.1)
