"""The Site protocol: everything the engine may request of an HPC site, whatever its API.

Paths are relative to the workspace, use `/`, and may hold any character that a file name may hold.
If an API cannot carry a name, the site raises `SiteRejected` before it sends a request
(`is_rest_safe` checks this beforehand). Every method may raise subclasses of `SiteError`, which
mean the following unless a method documents otherwise:

- `SiteUnreachable`: unknown whether the action happened. Reads and idempotent methods have already
  been repeated a few times where that may help.
- `SiteBusy`, `SiteUnauthorized`, `SiteRejected`: it did not happen.
- `SiteNotFound`: the site knows no such file or job just now. It proves nothing about a running
  job.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from ..jobs.pools import Allocation
from ..jobs.reasons import Reason
from ..jobs.spec import Resources

WORKSPACES: Final = "mantik"
"""Directory in a storage that holds the workspaces whose path is not configured."""


@dataclass(frozen=True)
class QueueLimits:
    """Limits of a queue.

    Ranges are (lowest, highest): seconds, nodes, CPUs per node, MiB per node, GPUs per node; None
    where the site reports none.

    Attributes:
        choices: values that the queue accepts for `qos`, `constraint` or `reservation`, by the
            field's name in `Resources`; fields for which the site lists none are missing.
    """

    runtime_s: tuple[int, int] | None = None
    nodes: tuple[int, int] | None = None
    cpus_per_node: tuple[int, int] | None = None
    memory_mib_per_node: tuple[int, int] | None = None
    gpus_per_node: tuple[int, int] | None = None
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteFacts:
    """What a site reports when it is opened.

    Attributes:
        workspace: absolute path of the workspace as jobs see it.
        server: product and version of the server.
        user: login name that jobs run as, where known.
        queues: limits by queue; empty where the site reports none.
        accounts: compute budget accounts of the user; empty where they are not reported reliably.
        orders_jobs: whether the scheduler can start a job after others (`Submission.after`).
        upload_bytes: maximum size of a file that is written with one request.
    """

    workspace: str
    server: str
    user: str = ""
    queues: Mapping[str, QueueLimits] = field(default_factory=dict)
    accounts: tuple[str, ...] = ()
    orders_jobs: bool = False
    upload_bytes: int = 4 << 20


@dataclass(frozen=True)
class SiteDetails:
    """Further details of a site, which no run needs; None or empty where it does not report them.

    Attributes:
        free_bytes: space left for the user on the workspace's file system.
        accounts: compute budget accounts of the user, with remaining budgets in the site's words.
        default_account: account that pays if none is named.
        scheduler: the site's scheduler according to the API, `slurm` or `pbs`.
        notes: current problems of the server, and known defects of its version.
    """

    free_bytes: int | None = None
    accounts: Mapping[str, str] = field(default_factory=dict)
    default_account: str = ""
    scheduler: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FreeNode:
    """A node on which jobs can start: the queues that it belongs to, and its free CPUs."""

    queues: frozenset[str]
    cpus: int


@dataclass(frozen=True)
class Submission:
    """A job that is ready to be submitted.

    Attributes:
        tag: key for `Site.find`: the attempt's UUID; letters, digits and `-` only, 40 at most: `_`
            is a wildcard of lists, and a blank makes two of one.
        name: readable name, any text; the site shortens and cleans it.
        script: the complete bash script; exits with 0 in any case if `after_on_login` is set.
        before_on_login, after_on_login: commands run on the login node, outside the job.
        login_shell: whether the script needs what a login shell has (environment modules).
        slurm_options: further options of sbatch, as `--option=value`; a site with another scheduler
            refuses them.
        after: the scheduler's ids of the jobs that have to end, in whatever way, before it starts.
        beside: files of the workspace, by path, to be uploaded before it is submitted.
        bucket: where its marker will be (`jobs.paths.AttemptPaths`).
        behind: the attempts that make some of its inputs, as BUCKET/UUID, for an agent of a pool.
    """

    tag: str
    name: str
    script: str
    resources: Resources
    before_on_login: tuple[str, ...] = ()
    after_on_login: tuple[str, ...] = ()
    login_shell: bool = False
    slurm_options: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)
    bucket: int = 0
    behind: tuple[str, ...] = ()


class Phase(Enum):
    """A job's phase according to the site's scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class JobState:
    """A job's state according to the site's scheduler; the marker takes precedence.

    Attributes:
        reason: why the job ended, for `Phase.ENDED`; or why an earlier start of a waiting one did.
        detail: the site's own words, one line, may be empty.
        scheduler_id: the scheduler's id of the job, empty before it has one.
        waits: why a waiting job cannot start, other than waiting its turn, in the scheduler's
            words; empty if there is no reason, None if the scheduler was not queried.
        never: whether the job can never start because it requests more than a limit allows.
        pending: why a waiting job has not started, its turn among the reasons, in the scheduler's
            words; empty if the scheduler was not queried or names no reason.
        started: when a job that runs or has run began, or when the scheduler expects a waiting one
            to start, in seconds since the epoch by its clock; None if it was not reported.
        starts_after: seconds between a job's submission and its start, of a waiting one as the
            scheduler expects it now; None if it reports none.
        ran: seconds that a job ran which has ended, as the scheduler counts them; None if it does
            not report them.
        failed_node: the node because of which the job ended; empty if it ended for another reason,
            or had several nodes.
        later: whether the failure is temporary: there are too many jobs (`Reason.REJECTED`), or
            something at the site was away (`Reason.LAUNCH_FAILURE`).
    """

    phase: Phase
    reason: Reason | None = None
    detail: str = ""
    scheduler_id: str = ""
    failed_node: str = ""
    later: bool = False
    waits: str | None = None
    never: bool = False
    pending: str = ""
    started: float | None = None
    starts_after: float | None = None
    ran: float | None = None


MISSING: Final = JobState(Phase.UNKNOWN, detail="the site knows no such job (just now)")


@dataclass(frozen=True)
class Entry:
    """One entry of a directory at a site.

    `name` is without the directory, `size` in bytes (0 for a directory). `modified` has seconds
    since the epoch on the site's clock: compare it with other such times only. `link` is whether
    the other values are those of a symbolic link; `Site.stat` has those of its target.
    """

    name: str
    size: int
    directory: bool
    modified: float = 0.0
    link: bool = False


@dataclass(frozen=True)
class SharedFile:
    """A file at a site that another site's server can read.

    Attributes:
        url: its address.
        api: the API whose servers alone can read it, by the trust that their operators have agreed
            on: `unicore`. Empty if everybody can who knows the URL: keep it secret then.
    """

    url: str = field(repr=False)
    api: str = ""


def do_nothing() -> None:
    """Do nothing; the default for callbacks."""


class Site(Protocol):
    """One workspace at one HPC site, reached through its REST API.

    Attributes:
        clock: the server's clock in its last answer, seconds since the epoch; None if the server
            does not report it.
        states_lag: whether `states` may lag minutes behind the scheduler; `explain` does not.
        notify: writes a line for the user. The engine of a run sets it; without it nobody runs jobs
            from here, and no pool gets an allocation.
        record: keeps what is known of an allocation of a pool. The engine of a run sets it.
    """

    name: str
    states_lag: bool
    notify: Callable[[str], None] | None
    record: Callable[[Allocation], None] | None

    @property
    def clock(self) -> float | None: ...

    async def open(self, *, make: bool = True) -> SiteFacts:
        """Authenticate, find the workspace, make its directory, and return the site's facts.

        Idempotent. Must have succeeded before any other method but `close` is called. Without
        `make`, leave no directory at the site: for those who want the facts alone.

        Raises:
            UserError: there is no supported server at the URL, or it has no such system.
        """
        ...

    async def describe(self) -> SiteDetails:
        """Query what a run does not need: space, accounts, the server's condition."""
        ...

    async def free_nodes(self) -> Sequence[FreeNode] | None:
        """Return the nodes on which jobs can start now; None if the site does not tell."""
        ...

    async def close(self) -> None:
        """Close all connections; nothing at the site changes."""
        ...

    async def submit(self, submission: Submission, begin: Callable[[], None] = do_nothing) -> str:
        """Submit a job and return the site's id of it.

        `begin` is called when it is the job's turn, before any request; an error that it raises
        ends the submission. The site object repeats a submission only if the site refused its
        token. After `SiteUnreachable` the job may exist, may run, or may come into being later;
        look for it with `find` and for its claim. After any other error it does not exist. An id
        proves neither that the job will run nor that it runs once.

        Raises:
            UserError: a requested resource cannot reach the scheduler.
        """
        ...

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the ids of the jobs that were submitted with some tags, by tag.

        An empty list proves nothing. `names` maps each tag to the submission's name, because some
        sites find jobs by name only.
        """
        ...

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        """Return the scheduler's states of jobs; `Phase.UNKNOWN` for those it does not know.

        Raises only if no job at all could be queried, or if the site refused the credentials.
        """
        ...

    async def glance(self, ids: Sequence[str]) -> dict[str, JobState] | None:
        """Return the states of those jobs that one request, for a list of all, shows.

        None, without a request, where each job takes a request of its own. A missing job has ended
        some time ago, or is not listed yet.
        """
        ...

    async def scheduler_ids(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the scheduler's own ids of jobs (`Submission.after`), without those it lacks."""
        ...

    async def explain(self, job_id: str) -> JobState:
        """Return the current state of one job with the scheduler's details; costs more.

        Where states lag, only this method reports why a job waits.
        """
        ...

    async def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs; return when the site has accepted that, not when the jobs have ended.

        Jobs that have ended or are unknown are no error.
        """
        ...

    async def forget(self, ids: Sequence[str], *, succeeded: bool = False) -> None:
        """Let the site remove its own records and directories of jobs that have ended.

        With `succeeded`, all of them have run and succeeded: each script has already removed the
        scheduler's output where the submission names its path.
        """
        ...

    def can_carry(self, path: str) -> bool:
        """Check whether the API can carry `path`, which is relative to the workspace."""
        ...

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        """Make the site keep jobs and their records for at least `seconds` from now."""
        ...

    async def put(self, path: str, content: bytes, *, private: bool = False) -> None:
        """Write a file; make its parents, replace an old one. Not atomic: readers may see a part.

        `content` has at most `SiteFacts.upload_bytes`; longer files are uploaded in parts, which a
        job joins.
        `private` gives it mode 0600. A UNICORE/X in embedded mode, without a TSI on the login node,
        claims to do so but sets its own user's permissions only; no site with many users is run
        that way.
        """
        ...

    def get(self, path: str, *, offset: int = 0, size: int | None = None) -> AsyncIterator[bytes]:
        """Yield the file's bytes from `offset` on, in chunks.

        A broken connection raises `SiteUnreachable` in the middle; continue with a new `offset`.
        `offset` must not be beyond the file's end. `size` is the expected size of the whole file;
        it saves a request where a site has several ways to download.
        """
        ...

    async def share(self, path: str) -> SharedFile | None:
        """Let other servers read a file; None if the site has no way to."""
        ...

    async def start_import(self, source: SharedFile, path: str) -> str | None:
        """Let the site's server fetch another site's file to `path`; None if it has no way to.

        Return the import's id. Use a `path` once: an import may go on after it was ended, and may
        have begun although this raised `SiteUnreachable`.
        """
        ...

    async def import_state(self, import_id: str) -> JobState:
        """Return the state of an import; it has succeeded if the reason is `Reason.SUCCESS`."""
        ...

    async def end_import(self, import_id: str) -> None:
        """End an import, as far as the site can, and remove what the site keeps of it."""
        ...

    async def list(self, path: str) -> dict[str, Entry]:
        """Return a directory's entries by name; `SiteNotFound` if it does not exist.

        `path` may be absolute: any directory at the site. `SiteRejected` if the API cannot list it.
        """
        ...

    async def stat(self, path: str) -> Entry | None:
        """Return a single entry; None if there is none."""
        ...

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        """Make a directory and its parents; an existing one is no error.

        `SiteRejected` if a file of that name exists: claim and revocation exclude each other.
        `private` gives the directory mode 0700, also if it exists; see `put` for the exception.
        """
        ...

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory with its contents; a missing one is no error."""
        ...


NOT_SAFE: Final = re.compile(r"[^ -~]|[%'\\$`\"]")


def is_rest_safe(path: str) -> bool:
    """Check whether the file APIs of all sites can carry `path`; others travel in archives.

    UNICORE refuses `%`, newline, tab and backslash, breaks at a single quote and expands `$HOME`;
    firecREST breaks at a single quote and garbles non-ASCII characters (measured).
    """
    return NOT_SAFE.search(path) is None
