"""The Site protocol: all that the engine may ask of an HPC site, whatever its API.

Paths are relative to the workspace, with `/`, and may hold any character that a file name may;
where an API cannot carry a name the site raises `SiteRejected` before it sends anything
(`is_rest_safe` checks that beforehand). Every method may raise the errors below `SiteError`; what a
caller may rely on then is said once here and, where it differs, at the method:

- `SiteUnreachable`: unknown whether it happened. Reading and idempotent methods have already been
  repeated a few times.
- `SiteBusy`, `SiteUnauthorized`, `SiteRejected`: it did not happen.
- `SiteNotFound`: the site knows no such file or job just now. It proves nothing of a running job.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import Resources


@dataclass(frozen=True)
class QueueLimits:
    """What a queue allows.

    Ranges are (lowest, highest): seconds, nodes, CPUs per node, MiB per node, GPUs per node; None
    where the site does not say.

    Attributes:
        choices: the values that the queue takes for `qos`, `constraint` or `reservation`, by the
            field's name in `Resources`; those that the site does not list are missing.
    """

    runtime_s: tuple[int, int] | None = None
    nodes: tuple[int, int] | None = None
    cpus_per_node: tuple[int, int] | None = None
    memory_mib_per_node: tuple[int, int] | None = None
    gpus_per_node: tuple[int, int] | None = None
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteFacts:
    """What a site tells about itself when it is opened.

    Attributes:
        workspace: absolute path of the workspace as jobs see it.
        server: product and version of the server, as it says.
        user: the login name that jobs run as, where known.
        queues: limits by queue; empty where the site does not say.
        max_entries: most entries that one listing returns.
        accounts: the compute budget accounts that the user may use; empty where the site does not
            say, or not reliably.
    """

    workspace: str
    server: str
    user: str = ""
    queues: Mapping[str, QueueLimits] = field(default_factory=dict)
    max_entries: int = 10_000
    accounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteDetails:
    """What else a site tells, that no run needs to know.

    Attributes:
        free_bytes: what the user may still write to the workspace's file system; None: not told.
        accounts: the compute budget accounts that the user may use, and what is left of each as the
            site says it; empty where it tells none.
        default_account: the one that pays where none is named; empty where the site tells none.
        scheduler: what the API says that the site has, `slurm` or `pbs`; empty where it does not.
        notes: what is not in order just now, or known to be wrong with a server of this version.
    """

    free_bytes: int | None = None
    accounts: Mapping[str, str] = field(default_factory=dict)
    default_account: str = ""
    scheduler: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Submission:
    """One job, ready to be sent.

    Attributes:
        tag: found again with `Site.find`; letters, digits and `-` only; the try's UUID.
        name: readable name, any text; the site cuts and cleans it.
        script: the bash script, complete; ends with 0 where `after_on_login` is set.
        resources: what to ask the scheduler for.
        before_on_login, after_on_login: commands run on the login node, outside the job.
        login_shell: whether the script needs what a login shell has (environment modules).
    """

    tag: str
    name: str
    script: str
    resources: Resources
    before_on_login: tuple[str, ...] = ()
    after_on_login: tuple[str, ...] = ()
    login_shell: bool = False


class Phase(Enum):
    """Where a job is, as far as the site's scheduler says."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class JobState:
    """What the site's scheduler says of one job. A second witness: the marker comes first.

    Attributes:
        phase: where the job is.
        reason: why it ended, for `Phase.ENDED`.
        detail: the site's own words, one line, empty if it has none.
        exit_code: of the script, where the site knows it. A UNICORE/X that runs jobs itself has
            been seen to tell 0 for one that ended while it was still being taken in.
        scheduler_id: the scheduler's id of the job, empty before it has one.
        queue: the queue it waits or runs in, empty if the site does not say.
        waits: the scheduler's word for why a job that waits cannot start, other than that it is not
            its turn; empty if it has none, None if it was not asked.
        never: whether it will never start as it is: it asks for more than a limit allows.
        later: whether it was not run for now only: there are too many jobs (`Reason.REJECTED`), or
            something at the site was away (`Reason.LAUNCH_FAILURE`).
    """

    phase: Phase
    reason: Reason | None = None
    detail: str = ""
    exit_code: int | None = None
    scheduler_id: str = ""
    queue: str = ""
    later: bool = False
    waits: str | None = None
    never: bool = False


@dataclass(frozen=True)
class Entry:
    """One entry of a directory at a site.

    Attributes:
        name: its name, without the directory.
        size: bytes; 0 for a directory.
        directory: whether it is a directory.
        modified: seconds since the epoch on the site's clock: compare it with itself only.
    """

    name: str
    size: int
    directory: bool
    modified: float = 0.0


def do_nothing() -> None:
    """Do nothing."""


class Site(Protocol):
    """One workspace at one HPC site, spoken to through its REST API.

    Attributes:
        name: the site's name.
        clock: what the server's clock showed in its last answer, seconds since the epoch; None if
            it does not tell.
        states_lag: whether `states` may lag minutes behind the scheduler; `explain` does not.
    """

    name: str
    states_lag: bool

    @property
    def clock(self) -> float | None:
        """See the class."""
        ...

    async def open(self) -> SiteFacts:
        """Authenticate, find the workspace, make its directory, and tell the site's facts.

        Idempotent. Must have succeeded before any other method is called.
        """
        ...

    async def describe(self) -> SiteDetails:
        """Ask for what a run does not need: space, accounts, the server's condition."""
        ...

    async def close(self) -> None:
        """Close all connections; nothing at the site changes."""
        ...

    async def submit(self, submission: Submission, begin: Callable[[], None] = do_nothing) -> str:
        """Submit a job and return the site's id of it.

        `begin` is called when it is its turn, before anything leaves; what it raises ends that.
        Never repeated by the site object itself. `SiteUnreachable`: the job may exist, may run, or
        may come into being later; look for it with `find` and for its claim. Any other error: it
        does not exist. An id proves neither that the job will run nor that it runs once.
        """
        ...

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the ids of the jobs that were submitted with some tags, by tag.

        An empty list proves nothing. `names` has the name of each submission by its tag: some sites
        find jobs by their names alone.
        """
        ...

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        """What the scheduler says of the jobs `ids`; `Phase.UNKNOWN` for those it does not know.

        Raises only if the site could not be asked at all.
        """
        ...

    async def explain(self, job_id: str) -> JobState:
        """Like `states` for one job, with the scheduler's details as they are now; costs more.

        Where states lag, this alone tells why a job waits.
        """
        ...

    async def cancel(self, ids: Sequence[str]) -> None:
        """Ask the site to end jobs; returns when it has accepted that, not when they are gone.

        Jobs that have ended or are unknown are no error.
        """
        ...

    async def forget(self, ids: Sequence[str], *, succeeded: bool = False) -> None:
        """Let the site remove its own records and directories of jobs that have ended.

        With `succeeded` each of them has run and ended well: its script has already removed what
        the scheduler wrote of it, where the submission says where that is.
        """
        ...

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        """See to it that the site keeps jobs and their records for `seconds` from now at least."""
        ...

    async def put(self, path: str, content: bytes | Path, *, private: bool = False) -> None:
        """Write a file, parents made, an old one replaced. Not atomic: it may be found half.

        `private` gives it mode 0600. A UNICORE/X in embedded mode, without its arm on the login
        node, says that it does and sets its own user's permissions only: no site of many users
        is one.
        """
        ...

    def get(self, path: str, *, offset: int = 0, size: int | None = None) -> AsyncIterator[bytes]:
        """The file's bytes from `offset` on, in chunks.

        A connection that breaks raises `SiteUnreachable` in the middle; go on with a new `offset`.
        `offset` must not be beyond the file's end. `size` is how many bytes the whole file has, as
        far as the caller knows: it saves a request where a site has several ways to download.
        """
        ...

    async def list(self, path: str) -> dict[str, Entry]:
        """A directory's entries by name. `SiteNotFound` if there is no such directory."""
        ...

    async def stat(self, path: str) -> Entry | None:
        """A single entry; None if there is none."""
        ...

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        """Make a directory and its parents; one that exists is no error.

        `SiteRejected` if a file of that name exists: claim and revocation exclude each other.
        `private` gives the directory mode 0700, also if it exists; `put` tells where it cannot.
        """
        ...

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; a missing one is no error."""
        ...


def is_rest_safe(path: str) -> bool:
    """Whether the file APIs of all sites can carry `path`; others travel in archives.

    UNICORE refuses `%`, newline, tab, backslash, breaks at a single quote and expands `$HOME`;
    firecREST breaks at a single quote and garbles what is outside ASCII (measured).
    """
    return path.isascii() and path.isprintable() and not set(path) & set("%'\\$`\"")
