"""One cell of the matrix: a workflow at a site of its own, behind a proxy, and what became of it.

Each job also writes when it begins and ends to a file outside of all that the executor knows, so
that a double start is seen whatever the controller believes.
"""

import hashlib
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.sandbox.settings import SiteOption
from tests.faults.steps import kind_of
from tests.support.proxy import Proxy
from tests.support.sandbox import FAST
from tests.support.workflows import Project, Ran, Running, place_in, until

SITE = "hpc"
RUN_S = 80.0
"""Seconds after which a run that has not ended never will: its jobs are lost."""

SNAKEFILE = r"""
    OUTSIDE = config["outside"]
    HERE = f"echo begin {{rule}} >> {OUTSIDE}/ran; until [ -e {OUTSIDE}/gate ]; do sleep 0.1; done;"
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
        shell: HERE + "head -c 8000 {input} > {output[0]}; cat {input} {input} > {output[1]};" + THERE

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
  PollMin: 1s
  PollMax: 2s
  Heartbeat: 2s
  TermGrace: 1s
  MarkerGrace: 2s
  UnknownWait: 3s
  Timeout: 3s
  ConcurrentRequests: 4
  InlineLimit: 4K
  MarkerLimit: 4K
  ArchiveFileLimit: 16K
"""
"""Waits as short as the config allows, and limits that let small files travel in all ways."""


@dataclass
class Count:
    """What a cell has to show."""

    jobs: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    misreported: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """All that is not as it has to be."""
        kinds = ("lost", "doubled", "misreported")
        return [f"{kind}: {what}" for kind in kinds for what in getattr(self, kind)]


@dataclass
class Cell:
    """A workflow, its site and the proxy between them.

    Attributes:
        api: what the site speaks.
        box: the site.
        proxy: between the workflow and the site.
        project: the workflow.
        outside: the directory that the jobs write to behind everybody's back.
    """

    api: str
    box: Sandbox
    proxy: Proxy
    project: Project
    outside: Path

    def start(self) -> Running:
        """Start `snakemake` as its users do with the profile that `init` writes."""
        return self.project.start(
            "--nolock", "--rerun-incomplete", "--keep-going", "--config", f"outside={self.outside}"
        )

    def end(self, running: Running) -> Ran:
        """Wait for the end of a run; one that never ends is killed, and says so."""
        try:
            return Ran(running.process.wait(RUN_S), running.output)
        except subprocess.TimeoutExpired:
            running.kill()
            return Ran(-9, f"{running.output}\nNEVER ENDED: killed after {RUN_S:.0f} s\n")

    def open_gate(self) -> None:
        """Let the jobs end."""
        (self.outside / "gate").touch()

    def noted(self, word: str) -> Counter[str]:
        """How often each job has begun, or ended."""
        path = self.outside / "ran"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[1] for line in lines if line.startswith(word))

    def runs(self) -> list[dict[str, Any]]:
        """The site's own record of what it ran."""
        found: list[dict[str, Any]] = self.box.record(SITE)["runs"]
        return found

    def alive(self) -> list[dict[str, Any]]:
        """What still runs or waits at the site."""
        return [run for run in self.runs() if run["ended"] is None]

    def count(self, ran: Ran) -> Count:
        """Hold what the last run said and left against what the site ran and the files outside."""
        begun, ended = self.noted("begin"), self.noted("end")
        found = Count(jobs=begun.total())
        for job in JOBS:
            if ended[job] != 1 or (ran.code == -9 and self._state(job) is None):
                kind = found.doubled if ended[job] > 1 else found.lost
                kind.append(f"{job} began {begun[job]} times and ended {ended[job]} times")
        expected = results(self.project.directory)
        for path, content in expected.items():
            here = self.project.directory / path
            if not here.exists():
                found.lost.append(f"{path} is not here")
            elif here.read_bytes() != content:
                found.misreported.append(f"{path} is not what the job made")
        for job in JOBS:
            if trouble := self._misreported(job):
                found.misreported.append(trouble)
        if ran.code != 1:
            found.misreported.append(f"snakemake ended with {ran.code}, though one job fails")
        until_quiet = partial(self._quiet, found)
        until_quiet()
        return found

    def _quiet(self, found: Count) -> None:
        try:
            until(lambda: not self.alive(), "the end of all jobs at the site", 10.0)
        except AssertionError:
            found.misreported.append(f"something still runs at the site: {self.alive()}")

    def _tries(self, job: str) -> list[TryRecord]:
        return [record for record in self.project.tries if record.rule == job]

    def _state(self, job: str) -> TryRecord | None:
        return next((r for r in self._tries(job) if r.state is TryState.DONE), None)

    def _misreported(self, job: str) -> str:
        """What the journal says wrongly of a job; empty if it is right."""
        tries = self._tries(job)
        told = [record.outcome for record in tries if record.outcome != "cancelled"]
        if job in GOOD:
            right = told == ["succeeded"]
        else:
            right = len(told) == 1 and "exit code 3" in told[0]
        return "" if right else f"{job} is said to have ended as {[r.outcome for r in tries]}"


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
    fire = replace(FAST.firecrest, max_file_size=32 << 10)
    return replace(FAST, slots=slots, firecrest=fire)


@contextmanager
def cell(api: str, directory: Path, *, slots: int = 2) -> Iterator[Cell]:
    """A cell that nothing happens in yet.

    Args:
        api: what its site speaks.
        directory: empty, for all of it.
        slots: how many jobs the site has room for.
    """
    with ExitStack() as stack:
        sites = [SiteOption(SITE, api)]
        box = stack.enter_context(Sandbox(directory / "sandbox", sites, settings(slots)))
        parts = urlsplit(box.url(SITE))
        server = f"{parts.scheme}://{parts.netloc}"
        proxy = stack.enter_context(Proxy(server, partial(kind_of, api)))
        place = place_in(box, SITE)
        config = place.config.replace(server, proxy.url)
        config = config[: config.index("Site:\n")] + LIMITS
        project = Project(directory / "project", replace(place, config=config))
        stack.callback(project.close)
        outside = directory / "outside"
        outside.mkdir()
        chance = random.Random(4)
        project.write("Snakefile", SNAKEFILE)
        project.write("data/a.txt", "seven\n")
        (project.directory / "data/big.bin").write_bytes(chance.randbytes(20_000))
        yield Cell(api, box, proxy, project, outside)
