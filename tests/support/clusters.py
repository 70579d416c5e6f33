"""What lies behind the servers of the contract suite: a scheduler that its tests reach into.

A test acts there as whoever runs a centre does, and behind the back of the server's API.
"""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpc_sandbox import processes
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import Partition
from snakemake_executor_plugin_mantik.jobs.spec import Resources

CLOSED = "closed"
"""The queue whose jobs never start."""
FRAGILE = "fragile"
"""The queue of a node that a test may take down. A real one runs one job at a time there."""
HIDDEN = "hidden"
"""A queue that no site lists unless it is asked for hidden ones."""
OTHER_ACCOUNT = "other"

PARTITIONS = (
    Partition(CLOSED, up=False),
    Partition(FRAGILE, nodes=1),
    Partition(HIDDEN, hidden=True),
)
"""The queues as the sandbox has them."""

_WAIT_S = 600.0


class Cluster(Protocol):
    """A scheduler, and what of it a test may spoil.

    Attributes:
        shortest_s: the shortest walltime that it enforces to the second.
    """

    shortest_s: int

    def cancel(self, number: str) -> None:
        """Cancel a job as scancel does."""
        ...

    def fail_node(self, number: str) -> None:
        """Let the node die on which a job of the queue FRAGILE runs."""
        ...

    def full(self) -> AbstractContextManager[Resources]:
        """Let there be too many jobs of those who ask for these resources."""
        ...


@dataclass
class SandboxCluster:
    """The local scheduler of a sandbox's site."""

    box: Sandbox
    name: str
    shortest_s: int = 1

    def cancel(self, number: str) -> None:
        self.box.cancel_job(self.name, int(number))

    def fail_node(self, number: str) -> None:
        self.box.fail_node(self.name, int(number))

    @contextmanager
    def full(self) -> Iterator[Resources]:
        self.box.limit_jobs(self.name, 0)
        try:
            yield Resources(runtime_s=600)
        finally:
            self.box.limit_jobs(self.name, None)


@dataclass
class SlurmCluster:
    """The Slurm of a centre, which other workers' tests use at the same time.

    Attributes:
        directory: the centre's, for a lock.
        environment: what leads Slurm's commands there.
        user: whose jobs are looked at.
    """

    directory: Path
    environment: Mapping[str, str]
    user: str
    shortest_s: int = 60

    def cancel(self, number: str) -> None:
        """See `Cluster`. No process of the job is left then; signals may reach it late."""
        self._run("scancel", number)
        self._until(number, "JobState=CANCELLED")

    def fail_node(self, number: str) -> None:
        details = dict(w.split("=", 1) for w in self._show(number) if "=" in w)
        node = f"nodename={details['BatchHost']}"
        self._run("scontrol", "update", node, "state=down", "reason=test")
        self._until(number, "JobState=NODE_FAIL")
        self._run("scontrol", "update", node, "state=resume", check=False)

    @contextmanager
    def full(self) -> Iterator[Resources]:
        change = ("sacctmgr", "--immediate", "modify", "user", "where", f"name={self.user}",
                  f"account={OTHER_ACCOUNT}", "set")  # fmt: skip
        with self._alone(OTHER_ACCOUNT):
            self._run(*change, "maxsubmitjobs=0")
            try:
                yield Resources(runtime_s=600, account=OTHER_ACCOUNT)
            finally:
                self._run(*change, "maxsubmitjobs=-1")

    def _until(self, number: str, state: str) -> None:
        end = time.monotonic() + _WAIT_S
        while state not in (shown := self._show(number)):
            assert time.monotonic() < end, shown
            time.sleep(0.1)

    def _show(self, number: str) -> list[str]:
        return self._run("scontrol", "--oneliner", "show", "job", number).split()

    def _run(self, *command: str, check: bool = True) -> str:
        ended = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True,
            timeout=_WAIT_S, check=False,
        )  # fmt: skip
        assert not check or ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Keep other workers away from what is spoilt."""
        with (self.directory / f"{what}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def kill_all(pid: int) -> None:
    """Kill with -9 all processes of the job to which the process belongs, but not Slurm's own."""
    session = os.getsid(pid)
    for process in processes.processes():
        with suppress(OSError):  # it has ended meanwhile
            comm = Path(f"/proc/{process.pid}/comm").read_text()
            if process.session == session and "slurmstepd" not in comm:
                os.kill(process.pid, signal.SIGKILL)
