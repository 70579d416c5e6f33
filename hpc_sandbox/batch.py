"""The interface of the sandbox's batch schedulers, the local one and Slurm."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from .settings import Partition


class BatchState(Enum):
    """Slurm's states of a job."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    CANCELLED = "CANCELLED"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    PREEMPTED = "PREEMPTED"

    @property
    def final(self) -> bool:
        return self not in _UNFINISHED


_UNFINISHED = (
    BatchState.PENDING, BatchState.CONFIGURING, BatchState.RUNNING, BatchState.SUSPENDED,
    BatchState.COMPLETING, BatchState.REQUEUED,
)  # fmt: skip


@dataclass
class BatchJob:
    """One job as its scheduler reports it.

    Attributes:
        state, reason: in Slurm's words.
        exit_code: exit code of the batch script, None until it ended; 0 if a signal ended it.
        signal: the signal that ended the batch script, 0 for none.
        starts: how often the job was started.
        submitted, started, ended: seconds since the epoch, None if not yet.
    """

    id: int
    name: str = ""
    state: BatchState = BatchState.PENDING
    reason: str = "None"
    exit_code: int | None = None
    signal: int = 0
    starts: int = 0
    submitted: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None

    @property
    def exit_text(self) -> str:
        """Return the exit code as scontrol writes it: `code:signal`."""
        return f"{self.exit_code or 0}:{self.signal}"


class CancelError(Exception):
    """There was nothing to cancel; the message is scancel's standard error."""


def cancel_error(number: int | str) -> str:
    """Return the beginning of scancel's message for a job that it could not cancel."""
    return f"scancel: Terminating job {number}\nscancel: error: Kill job error on job id {number}: "


Words = Mapping[str, str]
NONE: Words = MappingProxyType({})


class BatchScheduler(ABC):
    """A scheduler of one site. Call all methods in the loop that serves the site.

    Attributes:
        jobs: the jobs that were submitted here, by id; they are kept up to date.
        partitions: the queues, the first is the default.
    """

    jobs: Mapping[int, BatchJob]
    partitions: tuple[Partition, ...]

    @property
    def has_room(self) -> bool:
        """Whether a job could start now, as far as it is known."""
        return True

    def start(self) -> None:  # noqa: B027 - the local one need not
        """Start to follow the jobs, where that is needed."""

    @abstractmethod
    async def stop(self) -> None:
        """End all jobs that were submitted here, and wait for their ends."""

    @abstractmethod
    async def submit(
        self, script: str, directory: Path, options: Words = NONE, environment: Words = NONE
    ) -> BatchJob:
        """Queue a batch script to run in `directory`.

        `options` are sbatch's command line options by their long names, and `environment` holds
        variables for the job. Raise SbatchError with sbatch's message if it refuses the script.
        """

    @abstractmethod
    async def cancel(self, number: int) -> None:
        """End a job: TERM to all its processes, KILL to those left after the kill wait.

        Raise CancelError with scancel's message if there is no such job, or it ends or has ended.
        """

    @abstractmethod
    async def fail_node(self, number: int) -> None:
        """Make the node of a running job fail."""

    @abstractmethod
    async def details(self, number: int) -> dict[str, str] | None:
        """Return the fields of `scontrol show job`, None once the scheduler forgot the job."""

    @abstractmethod
    async def script(self, number: int) -> str:
        """Return the batch script of a job, empty if it is gone."""

    @abstractmethod
    async def attach(self, number: int, command: str) -> tuple[int, str]:
        """Run a command in a running job like `srun --overlap`; return exit code and stderr."""
