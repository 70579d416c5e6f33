"""What the sandbox's sites want of a batch scheduler, be it the local one or Slurm."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from snakemake_executor_plugin_mantik.sandbox.settings import Partition


class BatchState(Enum):
    """The states of Slurm that a job can be in."""

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
        """Whether the job has ended."""
        return self not in _UNFINISHED


_UNFINISHED = (
    BatchState.PENDING, BatchState.CONFIGURING, BatchState.RUNNING,
    BatchState.SUSPENDED, BatchState.COMPLETING,
    BatchState.REQUEUED,
)  # fmt: skip


@dataclass
class BatchJob:
    """One job as its scheduler tells it.

    Attributes:
        id: the scheduler's id, a number.
        name: as it was given.
        state, reason: as Slurm says them.
        exit_code: of the batch script, None until it ended; 0 when a signal ended it.
        signal: that ended the batch script, 0 for none.
        starts: how often it was started.
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
        """The exit code as scontrol writes it: `code:signal`."""
        return f"{self.exit_code or 0}:{self.signal}"


class CancelError(Exception):
    """What scancel wrote to standard error when there was nothing to cancel."""


def cancel_error(number: int | str) -> str:
    """How scancel begins to tell that it could not cancel a job."""
    return f"scancel: Terminating job {number}\nscancel: error: Kill job error on job id {number}: "


class BatchScheduler(ABC):
    """A scheduler of one site. All methods are to be called in the loop that serves the site.

    Attributes:
        jobs: the jobs that were submitted here, by id; they follow the scheduler.
        partitions: the queues, the first is the default.
    """

    jobs: Mapping[int, BatchJob]
    partitions: tuple[Partition, ...]

    @abstractmethod
    def start(self) -> None:
        """Begin to follow the jobs."""

    @abstractmethod
    async def stop(self) -> None:
        """End all jobs that were submitted here and wait until they are over."""

    @abstractmethod
    async def submit(
        self,
        script: str,
        directory: Path,
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> BatchJob:
        """Queue a batch script that is to run in `directory`.

        `options` are those of sbatch's command line by their long names, `environment` variables
        for the job.

        Raises:
            SbatchError: where sbatch refuses it, in its words.
        """

    @abstractmethod
    async def cancel(self, number: int) -> None:
        """End a job: TERM to all its processes, KILL to those left after the kill wait.

        Raises:
            CancelError: if there is no such job or it is over, in scancel's words.
        """

    @abstractmethod
    async def fail_node(self, number: int) -> None:
        """Let the node of a running job die."""

    @abstractmethod
    async def details(self, number: int) -> dict[str, str] | None:
        """What `scontrol show job` tells by key, None once the scheduler has forgotten the job."""

    @abstractmethod
    async def script(self, number: int) -> str:
        """The batch script of a job, empty if it is not there any more."""

    @abstractmethod
    async def attach(self, number: int, command: str) -> tuple[int, str]:
        """Run a command beside a running job, as `srun --overlap` does: exit code and stderr."""
