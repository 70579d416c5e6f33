"""One cell of the matrix: a workflow at a site of its own, behind a proxy, and what became of it.

Each job also writes when it begins and ends to a file outside of all that the executor knows, so
that a double start is seen whatever the controller believes.
"""

import hashlib
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from snakemake_executor_plugin_mantik.config.settings import Timing
from snakemake_executor_plugin_mantik.jobs.spec import ScriptLimits
from snakemake_executor_plugin_mantik.journal import AttemptRecord
from tests.faults.disk import Disk, small_disk
from tests.faults.faults import Fault
from tests.faults.steps import STEPS, kind_of
from tests.support.places import PATIENT
from tests.support.proxy import Proxy, Rule
from tests.support.workflows import Place, Project, Ran, Running, place_in, until

SITE = "hpc"
RUN_S = 600.0
"""Seconds after which a run that has not ended never will: its jobs are lost."""
FULL_S = 30.0
"""Seconds that a run has on a full disk: it may end then, or wait for space until it is killed."""
NEVER_ENDED = -1000
QUIET_S = 600.0
"""Seconds that jobs at the site may take to end after the controller has; a job whose gate is shut
does not."""

SNAKEFILE = r"""
    OUTSIDE = config["outside"]
    # A test that was killed opens no gate.
    GATE = f"until [ -e {OUTSIDE}/gate ] || [ ! -e {config['test']} ]; do sleep 0.1; done;"
    HERE = f"echo begin {{rule}} >> {OUTSIDE}/ran; {GATE}"
    THERE = f"echo end {{rule}} >> {OUTSIDE}/ran"

    rule all:
        input: "out/small.txt", "out/middle.bin", "out/large.bin", "sum.txt", "wrong.txt"

    rule small:
        input: "data/a.txt"
        output: "out/small.txt"
        shell: HERE + "cat {input} > {output};" + THERE

    rule large:
        input: "data/big.bin"
        output: "out/middle.bin", "out/large.bin"
        shell:
            HERE + "head -c 8000 {input} > {output[0]}; cat {input} {input} > {output[1]};" + THERE

    rule sum:
        input: "out/small.txt", "out/large.bin"
        output: "sum.txt"
        shell: HERE + "cat {input} | sha256sum > {output};" + THERE

    rule wrong:
        output: "wrong.txt"
        shell: HERE + THERE + "; exit 3"
"""
"""Three jobs that succeed, with results of all sizes, and one that fails."""

GOOD = ("small", "large", "sum")
JOBS = (*GOOD, "wrong")

LIMITS = """\
Site:
  Scheduler: slurm
  Poll: 2s
"""
TIMING = Timing(
    timeout_s=6,
    unknown_wait_s=3,
    inline_limit_bytes=4 << 10,
    script=ScriptLimits(heartbeat_s=2, marker_bytes=4 << 10, archive_file_bytes=16 << 10),
)
"""Limits that let small files travel in all ways, and short waits where another one follows if it
was too short. How long to wait before something is believed is as by default."""


@dataclass
class Count:
    """What a cell has to show."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    misreported: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """All that is not as it has to be."""
        kinds = ("lost", "doubled", "misreported")
        return [f"{kind}: {what}" for kind in kinds for what in getattr(self, kind)]


POOL = """\
Pools:
  small: {Queue: batch, CPUsPerNode: 2, Runtime: 1h, Idle: 2s, Takes: 10m}
"""
"""A pool that takes all jobs."""

CHAINED = ("file", "transfer", "store")
"""After each failure of one of these the whole transfer begins anew, later each time."""


def times_of(fault: Fault, kind: str) -> int | None:
    """How many requests of a kind meet a fault, so that it ends within the time that a run has."""
    return min(fault.times, 2) if fault.times is not None and kind in CHAINED else fault.times


@dataclass
class Cell:
    """A workflow, its site and the proxy between them.

    Attributes:
        api: what the site speaks.
        proxy: between the workflow and the site.
        project: the workflow.
        outside: the directory that the jobs write to behind everybody's back.
        alive: tells what still runs or waits at the site, as the site itself sees it.
        disk: the small one, of whoever has it.
        options: what `snakemake` is given besides.
    """

    api: str
    proxy: Proxy
    project: Project
    outside: Path
    alive: Callable[[], list[Any]]
    disk: Disk | None = None
    options: tuple[str, ...] = ()

    def start(self) -> Running:
        """Start `snakemake` as its users do with the profile that `init` writes."""
        return self.project.start(
            "--nolock",
            "--rerun-incomplete",
            "--keep-going",
            "--config",
            f"outside={self.outside}",
            f"test=/proc/{os.getpid()}",
            *self.options,
        )

    def end(self, running: Running, within: float = RUN_S) -> Ran:
        """Wait for the end of a run; one that does not end within so many seconds is killed."""
        try:
            return Ran(running.process.wait(within), running.output)
        except subprocess.TimeoutExpired:
            running.kill()
            said = f"{running.output}\nNEVER ENDED: killed after {within:.0f} s\n"
            return Ran(NEVER_ENDED, said)

    def end_of_full(self, running: Running, fill: Rule) -> Ran:
        """Wait for the end of a run that meets a full disk; one that waits for space is killed."""
        until(lambda: fill.taken or running.process.poll() is not None, "a full disk", RUN_S)
        ran = self.end(running, FULL_S)
        assert fill.taken, ran.output
        return ran

    def meet(self, fault: Fault, step: str) -> list[Rule]:
        """Let a fault happen to each kind of request of a step."""
        return [
            self.proxy.add(Rule(fault.name, {kind}, fault.act(self.api), times_of(fault, kind)))
            for kind in STEPS[step]
        ]

    def outputs(self) -> str:
        """What all runs have said."""
        return "\n".join(running.output for running in self.project.started)

    def open_gate(self) -> None:
        """Let the jobs end."""
        (self.outside / "gate").touch()

    def noted(self, word: str) -> Counter[str]:
        """How often each job has begun, or ended."""
        path = self.outside / "ran"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[1] for line in lines if line.startswith(word))

    def all_quiet(self) -> bool:
        """Whether nothing runs or waits at the site any more, or soon."""
        with suppress(AssertionError):
            until(lambda: not self.alive(), "the end of all jobs at the site", QUIET_S)
        return not self.alive()

    def count(self, ran: Ran, *, runs: int = 1, stopped: bool = False) -> Count:
        """Hold what the last run said and left against what the site ran and the files outside.

        Args:
            ran: the last run.
            runs: how many there were: each may run again what has failed before.
            stopped: whether earlier attempts may have been ended by us, or by a lack of space.
        """
        begun, ended = self.noted("begin"), self.noted("end")
        found = Count()
        found.lost += ["the run never ended"] if ran.code == NEVER_ENDED else []
        for job in JOBS:
            most = self._most(job, runs, stopped=stopped)
            if not ended[job]:
                found.lost.append(f"{job} began {begun[job]} times and never ended")
            if begun[job] > most or ended[job] > most:
                found.doubled.append(f"{job} began {begun[job]} times, ended {ended[job]} times")
        for path, content in results(self.project.directory).items():
            here = self.project.directory / path
            if not here.exists():
                found.lost.append(f"{path} is not here")
            elif here.read_bytes() != content:
                found.misreported.append(f"{path} is not what the job made")
        said = [self._misreported(job, stopped=stopped) for job in JOBS]
        found.misreported += filter(None, said)
        if ran.code != 1:
            found.misreported.append(f"snakemake ended with {ran.code}, though one job fails")
        if not self.all_quiet():
            found.misreported.append(f"something still runs at the site: {self.alive()}")
        return found

    def attempts(self, job: str) -> list[AttemptRecord]:
        """What the journal knows of a job."""
        return [record for record in self.project.attempts if record.rule == job]

    def any_stopped(self) -> bool:
        """Whether the journal says that a signal or a full disk ended a job's last attempt."""
        last = [self.attempts(job)[-1].outcome for job in JOBS if self.attempts(job)]
        return any("by a signal" in outcome or "no room" in outcome for outcome in last)

    def _most(self, job: str, runs: int, *, stopped: bool) -> int:
        """How often a job may have run."""
        attempts = max(1, len(self.attempts(job)))
        return attempts if stopped else 1 if job in GOOD else min(attempts, runs)

    def _misreported(self, job: str, *, stopped: bool) -> str:
        """What the journal says wrongly of a job; empty if it is right."""
        attempts = self.attempts(job)
        told = [record.outcome for record in attempts]
        last = told[-1:] if stopped else told
        fails = bool(last) and all("code 3" in outcome for outcome in last)
        right = last == ["succeeded"] if job in GOOD else fails
        return "" if right else f"{job} is said to have ended as {told}"


def results(directory: Path) -> dict[str, bytes]:
    """The outputs that the jobs have to make of what lies in a workflow's directory."""
    small = (directory / "data/a.txt").read_bytes()
    big = (directory / "data/big.bin").read_bytes()
    digest = hashlib.sha256(small + big + big).hexdigest()
    return {
        "out/small.txt": small,
        "out/middle.bin": big[:8000],
        "out/large.bin": big + big,
        "sum.txt": f"{digest}  -\n".encode(),
    }


def settings(slots: int) -> Any:
    """A sandbox that loses no time, and whose large files go through its object store."""
    fire = replace(PATIENT.firecrest, max_file_size=128 << 10, command_timeout=5.0)
    return replace(PATIENT, slots=slots, firecrest=fire)


@contextmanager
def make_cell(
    api: str,
    directory: Path,
    *,
    slots: int = 2,
    small: Literal["project", "sandbox", ""] = "",
    pool: bool = False,
) -> Iterator[Cell]:
    """A cell that nothing happens in yet.

    Args:
        api: what its site speaks.
        directory: empty, for all of it.
        slots: how many jobs the site has room for.
        small: who has a small disk.
        pool: whether the jobs run in allocations of a pool.
    """
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(directory / small)) if small else None
        sites = [SiteOption(SITE, api)]
        box = stack.enter_context(Sandbox(directory / "sandbox", sites, settings(slots)))
        cell = stack.enter_context(cell_in(box, SITE, api, directory, disk=disk))
        if pool:
            config = cell.project.config
            config.write_text(config.read_text() + POOL)
            cell.options = ("--default-resources", "runtime=10")
        yield cell


@contextmanager
def cell_in(
    box: Sandbox,
    name: str,
    api: str,
    directory: Path,
    *,
    disk: Disk | None = None,
    snakefile: str = SNAKEFILE,
) -> Iterator[Cell]:
    """A cell at a site of a sandbox that nobody else uses meanwhile."""

    def alive() -> list[Any]:
        return [run for run in box.record(name)["runs"] if run["ended"] is None]

    place, url = place_in(box, name), box.url(name)
    with cell_at(api, place, url, directory, alive, disk=disk, snakefile=snakefile) as cell:
        yield cell


@contextmanager
def cell_at(
    api: str,
    place: Place,
    url: str,
    directory: Path,
    alive: Callable[[], list[Any]],
    *,
    ca_file: Path | None = None,
    disk: Disk | None = None,
    snakefile: str = SNAKEFILE,
    outside: Path | None = None,
) -> Iterator[Cell]:
    """A cell at a site whose API is at `url`.

    Args:
        api: what it speaks.
        place: the site.
        url: where it is.
        directory: empty, for all of the cell.
        alive: tells what still runs or waits there.
        ca_file: what its TLS is trusted by.
        disk: the small one, of whoever has it.
        snakefile: the workflow.
        outside: an empty directory that its jobs may write to; by default one is made.
    """
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc}"
    with Proxy(server, partial(kind_of, api), ca_file=ca_file) as proxy:
        config = place.config.replace(server, proxy.url)
        config = config[: config.index("Site:\n")] + LIMITS
        project = Project(directory / "project", replace(place, config=config).timed(TIMING))
        if outside is None:
            outside = directory / "outside"
            outside.mkdir()
        chance = random.Random(4)
        project.write("Snakefile", snakefile)
        project.write("data/a.txt", "seven\n")
        (project.directory / "data/big.bin").write_bytes(chance.randbytes(70_000))
        with closing(project):
            yield Cell(api, proxy, project, outside, alive, disk)
