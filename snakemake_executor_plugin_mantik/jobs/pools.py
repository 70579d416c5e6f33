"""Allocations that run many jobs (`Pools` in the backend config), and the files for them.

A pool's directory at a site is flat; `bash/agent.sh` says which names its files have. One agent in
each allocation takes jobs by renaming their files. What it loses is harmless: the claim lets a job
run once, and a job without a trace is submitted again.
"""

import io
import math
import shlex
import tarfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Final

from ..common.errors import UserError
from ..common.humanize import humanize_duration
from .packs import TarDamaged, read_tar
from .paths import OURS
from .resources import memory_per_node
from .spec import Resources

POOL_RESOURCE: Final = "mantik_pool"
"""Names the pool of the config of the rule's site in whose allocations its jobs run."""
POOLS: Final = f"{OURS}/pools"
_PREFIX: Final = "pool"
_MEMBER_BYTES: Final = 4 * tarfile.BLOCKSIZE
"""What a file takes in a tar beside its content, at most: its name may have blocks of its own."""
MARK_BYTES: Final = 64 << 10
"""Size of the largest marker that is read together with others."""
MARGIN_S: Final = 15
"""Seconds beyond the grace of a job in which it ends; and by which an agent leaves before its
allocation ends."""


@dataclass(frozen=True)
class Pool:
    """Allocations of one kind; each job has a part of one node.

    Attributes:
        name: as rules name it.
        resources: of one allocation; `nodes`, `cpus_per_task` and `runtime_s` are set.
        idle_s: seconds after which an allocation ends in which nothing runs.
        count: the most allocations at a time.
        grace_s: seconds that a job has to end after TERM (`Site: TermGrace`).
        takes_s: walltime of the longest jobs that run in it although their rule names no pool.
        node_cores: cores of a node, where an allocation gets, and is billed for, whole nodes.
    """

    name: str
    resources: Resources
    idle_s: int
    count: int
    grace_s: int
    takes_s: int | None = None
    node_cores: int | None = None

    @property
    def directory(self) -> str:
        return f"{POOLS}/{self.name}"

    @property
    def longest_s(self) -> int:
        """The longest walltime of a job that an allocation takes when it begins."""
        return (self.resources.runtime_s or 0) - self.grace_s - 3 * MARGIN_S

    def takes(self, cpus: int, gpus: int, seconds: int) -> bool:
        """Return whether an allocation can run a job that requests these."""
        ours = self.resources
        fits = cpus <= (ours.cpus_per_task or 1) and gpus <= (ours.gpus_per_node or 0)
        return fits and seconds <= self.longest_s

    def share(self, cpus: float, gpus: float) -> float:
        """Return how many allocations jobs occupy that have so many CPUs and GPUs together."""
        ours = self.resources
        of_gpus = gpus / ours.gpus_per_node if ours.gpus_per_node else 0.0
        return max(cpus / (ours.cpus_per_task or 1), of_gpus) / (ours.nodes or 1)

    def job_resources(self, own: Resources, asked: Resources) -> Resources:
        """Return the resources of a job that runs in this pool.

        Args:
            own: what its rule alone requests.
            asked: the same, with what the backend config requests for each job.

        Raises:
            UserError: an allocation cannot give them, or they are chosen for the whole pool.
        """
        where = f"the pool {self.name}"
        for field in (
            "queue", "account", "reservation", "constraint", "qos", "nodelist", "exclude", "extra",
            "gpu_model", "tasks",
        ):  # fmt: skip
            if getattr(own, field) is not None:
                raise UserError(
                    f"a job in a pool cannot choose its {field.replace('_', ' ')}",
                    where=where,
                    do="Leave it out: all jobs of a pool have those of the pool; or leave out"
                    " mantik_pool",
                )
        asked = Resources(
            runtime_s=asked.runtime_s, nodes=asked.nodes, cpus_per_task=asked.cpus_per_task or 1,
            memory_mib_per_node=memory_per_node(asked), gpus_per_node=asked.gpus_per_node,
            queue=f"pool {self.name}", pool=self.name,
        )  # fmt: skip
        ours = self.resources
        if asked.runtime_s is None:
            raise UserError(
                "a job in a pool needs a walltime, so that it ends before its allocation does",
                where=where,
                do="Set the rule's resource runtime, or Resources: Runtime in the backend config",
            )
        if (asked.nodes or 1) > 1:
            raise UserError(
                f"nodes: {asked.nodes} requested; a job of the pool runs on one",
                where=where,
                do="Request one node, or leave out mantik_pool",
            )
        for what, wanted, most in (
            ("CPUs", asked.cpus_per_task, ours.cpus_per_task),
            ("MiB of memory", asked.memory_mib_per_node, ours.memory_mib_per_node),
            ("GPUs", asked.gpus_per_node, ours.gpus_per_node or 0),
        ):
            if wanted is not None and most is not None and wanted > most:
                raise UserError(
                    f"{what}: {wanted} requested; a job of the pool can have {most}",
                    where=where,
                    do="Request less, give the pool's nodes more, or leave out mantik_pool",
                )
        if asked.runtime_s > self.longest_s:
            raise UserError(
                f"runtime: {humanize_duration(asked.runtime_s)} requested; an allocation of"
                f" {humanize_duration(ours.runtime_s or 0)} takes jobs of at most"
                f" {humanize_duration(max(0, self.longest_s))}",
                where=where,
                do="Request less, give the pool a longer Runtime, or leave out mantik_pool",
            )
        return replace(asked, nodes=None)


@dataclass(frozen=True)
class Allocation:
    """What is known of an allocation; times are seconds since the epoch.

    Attributes:
        tag: that it was submitted with.
        site, pool: where it is.
        site_job: the site's id of it; empty while it is not known.
        cores: of each of its nodes.
        submitted, started, ended: when these were first noticed; None if they were not.
        seconds: how long its agents have been there, together.
        used: core seconds that jobs have had of that.
    """

    tag: str
    site: str
    pool: str
    site_job: str
    cores: int
    submitted: float
    started: float | None = None
    ended: float | None = None
    seconds: int = 0
    used: int = 0

    @property
    def idle(self) -> int:
        """Core seconds that no job has had."""
        return max(0, self.cores * self.seconds - self.used)


def allocation_of(file: str) -> str:
    """Return the allocation that a file in a pool's directory names, without the agent's number."""
    return file.split(".")[1].partition("+")[0]


def job_id(pool: str, tag: str) -> str:
    """Return the id of a job in a pool; it is also the name of the directory that it starts in."""
    return f"{_PREFIX}.{pool}.{tag}"


def parse_job_id(text: str) -> tuple[str, str] | None:
    """Return the pool and the tag of a job in a pool; None if it is a job of the site's own."""
    prefix, _, rest = text.partition(".")
    pool, _, tag = rest.partition(".")
    return (pool, tag) if prefix == _PREFIX and tag else None


@dataclass(frozen=True)
class PooledJob:
    """A job that is sent to a pool.

    Attributes:
        order: the jobs with lower numbers are taken first.
        bucket: of the job's marker (`paths.AttemptPaths`).
        behind: the jobs that have to end, in whatever way, before it starts, as BUCKET/TAG.
    """

    tag: str
    script: bytes
    resources: Resources
    login_shell: bool
    order: int
    bucket: int = 0
    behind: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name under which it waits."""
        wants = self.resources
        parts = (
            f"{self.order:015}", wants.cpus_per_task or 1, wants.memory_mib_per_node or 0,
            wants.gpus_per_node or 0, wants.runtime_s or 0, int(self.login_shell), self.bucket,
            self.tag,
        )  # fmt: skip
        return ".".join(("behind" if self.behind else "ready", *map(str, parts)))

    @property
    def content(self) -> bytes:
        """What is in that file."""
        if not self.behind:
            return self.script
        first, _, rest = self.script.partition(b"\n")
        return b"%s\n# After: %s\n%s" % (first, " ".join(self.behind).encode(), rest)


def split_jobs(jobs: Sequence[PooledJob], most: int) -> list[list[PooledJob]]:
    """Divide jobs among files of at most `most` bytes, or of one job."""
    parts: list[list[PooledJob]] = []
    left = 0
    for job in jobs:
        size = len(job.content) + _MEMBER_BYTES
        if size > left:
            parts.append([])
            left = most - tarfile.RECORDSIZE
        parts[-1].append(job)
        left -= size
    return parts


def pack_jobs(jobs: Sequence[PooledJob]) -> tuple[str, bytes]:
    """Return the file with which jobs are sent together, its name and its content."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.GNU_FORMAT, compresslevel=1) as tar:
        for job in jobs:
            member = tarfile.TarInfo(job.file)
            member.size, member.mode = len(job.content), 0o600
            tar.addfile(member, io.BytesIO(job.content))
    cpus = sum(job.resources.cpus_per_task or 1 for job in jobs if not job.behind) or 1
    content = file.getvalue()
    return f"in.{cpus}.{len(content)}.{uuid.uuid4()}", content


def unpack_marks(content: bytes) -> dict[str, bytes]:
    """Return the markers in a file of them, by their paths below `paths.ATTEMPTS`.

    A listing may show a file shorter than it is: a marker that is cut off is left out.
    """
    found: dict[str, bytes] = {}
    with suppress(TarDamaged):
        for path, pieces in read_tar(io.BytesIO(content)):
            found[path] = b"".join(pieces)
    return found


def agent_script(pool: Pool, workspace: str, allocation: str) -> str:
    """Return the script of an allocation."""
    wants = pool.resources
    values: Mapping[str, object] = {
        "directory": shlex.quote(f"{workspace.rstrip('/')}/{pool.directory}"),
        "name": pool.name,
        "alloc": allocation,
        "nodes": wants.nodes or 1,
        "cpus": wants.cpus_per_task or 1,
        "memory": memory_per_node(wants) or 0,
        "gpus": wants.gpus_per_node or 0,
        "runtime_s": math.floor(wants.runtime_s or 0) - MARGIN_S,
        "idle_s": pool.idle_s,
        "grace_s": pool.grace_s + MARGIN_S,
        "mark_bytes": MARK_BYTES,
    }
    agent = (files(__package__) / "bash" / "agent.sh").read_text("utf-8")
    lines = (f"_p_{name}={value}\n" for name, value in values.items())
    return f"#!/bin/bash\n# Allocation: pool {pool.name}\n\n{''.join(lines)}\n{agent}\n_p_run\n"
