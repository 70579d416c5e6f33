"""Settings of a sandbox, and the error that it cannot start with them; times are in seconds."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

APIS = ("unicore", "firecrest")

SCHEDULERS = ("local", "slurm")
"""Schedulers that can run the jobs: the sandbox's own one, or this machine's Slurm."""


class SandboxError(Exception):
    """A sandbox cannot start: `what` happened, `where`, and what to `do` now."""

    def __init__(self, what: str, *, where: str, do: str) -> None:
        super().__init__(f"{where}: {what}. {do}.")
        self.what = what
        self.where = where
        self.do = do


@dataclass(frozen=True)
class Partition:
    """A partition of the simulated cluster, which refuses larger requests as sbatch does.

    The simulated nodes are larger than this machine. A job is charged no more than this machine's
    slots, so that a workflow that requests a real site's resources runs here unchanged.

    Attributes:
        name: the partition, which is a queue in UNICORE.
        max_time: longest walltime.
        default_time: walltime of a job that requests none.
        cpus, memory_mib, gpus: resources of each node.
        up: whether jobs start; otherwise they wait.
        hidden: whether it is not listed unless somebody asks for hidden ones (Slurm's `Hidden`).
    """

    name: str
    max_time: int = 24 * 3600
    default_time: int = 3600
    nodes: int = 8
    cpus: int = 128
    memory_mib: int = 512 * 1024
    gpus: int = 4
    up: bool = True
    hidden: bool = False


PARTITIONS = (Partition("batch"), Partition("devel", max_time=2 * 3600, nodes=2))
"""The partitions of local schedulers by default; jobs go to the first by default."""


@dataclass(frozen=True)
class Timing:
    """Delays of the sandbox; `REAL_TIMING` has what was measured at a real UNICORE with Slurm.

    Attributes:
        round_trip: one exchange of UNICORE/X with its TSI on the login node. A check of a file
            takes one exchange, an upload one or two, a download three. A submission takes eight;
            jobs are submitted one by one, after the files of all waiting jobs are staged in.
        tsi_retry: pause between two attempts to create a job's directory while the TSI does not
            answer; the job fails after three attempts.
        processing: delay between accepting a job and reading its description; real: 0.1 to 1.
        status_interval: how often the job status follows the scheduler; real: 10 to 60.
        death_lag: how long a job without an exit-code file keeps its old status.
        resubmit_delay: pause between the four attempts to submit to the scheduler.
        kill_wait: time between TERM and KILL when a job is ended; Slurm's KillWait.
        signal_gap: pause between signals to the processes of a job, children first; 0 signals all
            at once, parents first. Slurm signals one after the other, too.
        transfer_time: seconds that a transfer from server to server takes, in addition.
        memory_interval: how often the memory of running jobs is checked.
        lifetime: how long a job and its directory are kept; real: 1 to 30 days.
        session_lifetime: lifetime of a security session; real: 8 hours.
    """

    round_trip: float = 0.0
    tsi_retry: float = 0.2
    processing: float = 0.02
    status_interval: float = 0.5
    death_lag: float = 3.0
    resubmit_delay: float = 0.5
    kill_wait: float = 5.0
    signal_gap: float = 0.0
    transfer_time: float = 0.0
    memory_interval: float = 0.5
    lifetime: float = 30 * 24 * 3600.0
    session_lifetime: float = 8 * 3600.0


REAL_TIMING = Timing(
    round_trip=0.044, tsi_retry=5.0, processing=0.5, status_interval=10.0, death_lag=134.0,
    resubmit_delay=10.0, kill_wait=30.0, memory_interval=30.0,
)  # fmt: skip
"""The delays that were measured at real servers."""


@dataclass(frozen=True)
class FirecrestSettings:
    """Settings of a firecREST site. Values were measured at a real one, which most defaults are.

    Attributes:
        token_lifetime: seconds that an access token is valid; real: 60 to 300.
        token_margin: remaining seconds below which a token is refused (`min_token_ttl`).
        command_time: duration of every command on the login node; real: 0.01 to 0.03.
        command_timeout: seconds after which a command is given up (408, or 500 if it has input).
        record_time: extra seconds of a list of jobs per job in it, given up after
            `command_timeout`; real: 0.0007.
        accounting_lag: delay of the accounting in seconds; it has half records meanwhile, and
            lists by name lack jobs; real: 0.3 to 4.
        job_memory: seconds that the local scheduler keeps an ended job's metadata (`MinJobAge`).
        max_sessions: commands at the same time; OpenSSH's MaxSessions, real: 10.
        max_file_size: bytes of the largest direct upload; real: 5 MiB.
        max_part_size: bytes of one part of a large upload; real: 2 GiB.
        store_interval: seconds between two checks of an upload's job for its object; real: 60.
        transfer_method: how large files are transferred, None: not at all.
        account_needed: whether transfers must name an account.
    """

    token_lifetime: float = 300.0
    token_margin: float = 30.0
    command_time: float = 0.01
    command_timeout: float = 5.0
    record_time: float = 0.0007
    accounting_lag: float = 0.5
    job_memory: float = 300.0
    max_sessions: int = 10
    max_file_size: int = 5 << 20
    max_part_size: int = 2 << 30
    store_interval: float = 2.0
    transfer_method: Literal["s3"] | None = "s3"
    account_needed: bool = False


def machine_slots() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class SandboxSettings:
    """All settings of a sandbox.

    Attributes:
        slots: CPUs that the jobs of one site share.
        partitions: the queues of the local scheduler, the first is the default.
        scheduler: runs the jobs, one of SCHEDULERS.
        accounts: accounts of the local scheduler, the first is the default.
        max_submit_jobs: how many jobs of one site may wait and run; the local scheduler refuses
            more, as Slurm's MaxSubmitJobs does. None for no limit.
        memory_state: state of a job that the local scheduler ends for its memory: OUT_OF_MEMORY, as
            with cgroups, or FAILED by signal 9, as with Slurm's OverMemoryKill.
        environment: variables of every job, in addition to the minimal ones.
        trusted: a token with which UNICORE sites read each other's files for their user; empty if
            they do not trust each other, as real servers do not by default.
    """

    timing: Timing = Timing()
    slots: int = field(default_factory=machine_slots)
    partitions: tuple[Partition, ...] = PARTITIONS
    scheduler: str = "local"
    accounts: tuple[str, ...] = ("sandbox",)
    max_submit_jobs: int | None = None
    memory_state: Literal["OUT_OF_MEMORY", "FAILED"] = "OUT_OF_MEMORY"
    environment: Mapping[str, str] = field(default_factory=dict)
    firecrest: FirecrestSettings = FirecrestSettings()
    trusted: str = ""


@dataclass(frozen=True)
class SiteOption:
    """One site of the sandbox.

    Attributes:
        name: the site's name in the workflow, in URLs and in the name of its backend config.
        api: the site's REST API, `unicore` or `firecrest`.
    """

    name: str
    api: str = "unicore"
