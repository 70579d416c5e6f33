"""A real Slurm with accounting on loopback, for tests.

Nothing of the system's own configuration is read or written: keys, sockets, state and logs lie in a
directory, the ports are free ones, and all daemons are children of this process that end with it.
Its nodes pretend to have more than the machine has, GPUs included, as the sandbox's nodes do.
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
from tests.support.daemons import Daemon
from tests.support.ports import free_ports

DATA = Path(__file__).parent / "slurmconf"
PROGRAMS = (
    "munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "srun", *mariadb.PROGRAMS, "setpriv",
)  # fmt: skip
START_S = 600.0
"""How long a daemon may take until it answers, seconds."""
STOP_S = 10.0
"""How long jobs may take to end before the daemons do, seconds."""

ACCOUNTS = ("sandbox", "other")
"""The accounts that jobs may be charged to, the first is the user's default."""
QOS = {"short": "12:00:00"}
"""What jobs may name beside the default `normal`, and the longest walltime of each: a job that asks
for more is taken, and waits for ever."""
GPUS = 4
"""Of each node."""


def lacking() -> list[str]:
    return [program for program in PROGRAMS if found(program) is None]


@dataclass
class Slurm:
    """A Slurm that runs.

    Attributes:
        directory: all of its files; its configuration is in `slurm.conf`.
        nodes: the names of its nodes, all on this machine; the queue `devel` has the first only.
        fragile: the name of a node beside these, which only the queue `fragile` has; empty: none.
        users: the login names beside our own that may submit jobs.
    """

    directory: Path
    nodes: tuple[str, ...] = field(default_factory=lambda: (socket.gethostname(),))
    users: tuple[str, ...] = ()
    fragile: str = ""
    _daemons: dict[str, Daemon] = field(default_factory=dict)

    @property
    def environment(self) -> Mapping[str, str]:
        """What leads Slurm's commands here."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    @property
    def _all_nodes(self) -> tuple[str, ...]:
        return (*self.nodes, *([self.fragile] if self.fragile else []))

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
        ended = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True,
            timeout=START_S, check=False,
        )  # fmt: skip
        assert not check or ended.returncode == 0, f"{command}: {ended.stderr}"
        return ended.stdout + ended.stderr

    def job(self, number: int) -> dict[str, str]:
        text = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def stop(self) -> None:
        """End all jobs, then the daemons, the latest first."""
        if any(name.startswith("slurmd ") for name in self._daemons):
            self.run("scancel", "--user", ",".join((_user(), *self.users)), check=False)
            with suppress(TimeoutError):
                _until(lambda: not self.run("squeue", "--noheader", check=False).strip(), STOP_S)
        for name in reversed(self._daemons):
            self._daemons[name].stop()
        self._daemons.clear()

    # --- its daemons ---------------------------------------------------------------------------

    def _start(self) -> None:
        for name in ("state", "munge", *(f"spool.{node}" for node in self._all_nodes)):
            # Commands of other users need the socket of munge, their jobs the spool.
            (self.directory / name).mkdir(mode=0o755 if self.users else 0o700)
        ports = dict(zip(("CTLD", "DBD", "SQL"), free_ports(3), strict=True))
        password = secrets.token_hex(8)
        self._configure(ports, password)
        self._start_munge()
        self._start_database(ports["SQL"], password)
        self._daemon("slurmdbd", "-D")
        self._answers("sacctmgr", "--noheader", "show", "cluster")
        users = ",".join((_user(), *self.users))
        for command in (
            "add cluster sandbox",
            *(f"add account {account} cluster=sandbox" for account in ACCOUNTS),
            f"add user {users} account={','.join(ACCOUNTS)} cluster=sandbox",
            f"modify user {users} set defaultaccount={ACCOUNTS[0]}",
            *(f"add qos {qos} set MaxWall={longest}" for qos, longest in QOS.items()),
            f"modify user {users} set qos+={','.join(QOS)}",
        ):
            self.run("sacctmgr", "--immediate", *command.split())
        self._daemon("slurmctld", "-D")
        self._answers("scontrol", "ping")
        for node in self._all_nodes:
            self._daemon("slurmd", "-D", "-N", node)
        _until(lambda: self.run(*_IDLE, check=False).count("idle") == len(self.nodes))

    def _configure(self, ports: Mapping[str, int], password: str) -> None:
        values = {
            "DIRECTORY": str(self.directory),
            "HOST": socket.gethostname(),
            "NODES": "".join(map(_node_line, self._all_nodes, free_ports(len(self._all_nodes)))),
            "OPEN": ",".join(self.nodes),
            "FIRST": self.nodes[0],
            "LAST": self._all_nodes[-1],
            "DEVICES": "".join(
                f"NodeName={node} Name=gpu File={self.directory}/gpu.{node}.[0-{GPUS - 1}]\n"
                for node in self._all_nodes
            ),
            "USER": _user(),
            "PASSWORD": password,
            **{name: str(port) for name, port in ports.items()},
        }
        for name in ("slurm.conf", "slurmdbd.conf", "gres.conf"):
            text = Template((DATA / name).read_text()).substitute(values)
            (self.directory / name).write_text(text)
            readable = self.users and name != "slurmdbd.conf"
            (self.directory / name).chmod(0o644 if readable else 0o600)
        for node in self._all_nodes:
            for number in range(GPUS):
                (self.directory / f"gpu.{node}.{number}").touch()

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
        started = " ".join((name, *arguments[-1:])) if name == "slurmd" else name
        log = self.directory / f"{started}.log"
        environment = {**os.environ, **self.environment}
        self._daemons[started] = Daemon([program, *arguments], self.directory, log, environment)
        self._daemons[started].start()

    def _answers(self, *command: str) -> None:
        """Wait until a command succeeds and says that its server is up."""

        def up() -> bool:
            for name, daemon in self._daemons.items():
                assert daemon.runs, (self.directory / f"{name}.log").read_text()
            return "error" not in (said := self.run(*command, check=False)) and "DOWN" not in said

        _until(up)


_IDLE = ("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%T")


def _node_line(node: str, port: int) -> str:
    """The line of a node in slurm.conf; each node has its own port of this machine."""
    return (
        f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs=16 RealMemory=64000 Gres=gpu:{GPUS} Feature=fast State=UNKNOWN\n"
    )


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _until(condition: Callable[[], bool], seconds: float = START_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"Slurm was not ready within {seconds} s")
        time.sleep(0.1)
