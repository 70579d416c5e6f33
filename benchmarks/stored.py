"""Files that stay at their site: what crosses the network, and what Snakemake's questions cost.

`python -m benchmarks.stored pipeline {hpc1,hpc2} [--size BYTES]` runs a small pipeline whose
intermediates have so many bytes in all, in sparse files.
`python -m benchmarks.stored graph {hpc1,hpc2} [--files N] [--directories N]` lets Snakemake build
the graph of a workflow of which all is done, with so many stored files, and with files that are on
this machine.
`python -m benchmarks.stored moving {hpc1,hpc2} [--size BYTES]` moves a file of so many random bytes
to the site, and measures the memory of the process that does it.
Each prints one line of JSON.
"""

import argparse
import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from hpc_sandbox import server
from hpc_sandbox.faults import Protocol
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal, RemoteOutput
from tests.support.workflows import FILES_STAY, UNTRACKED, Project, place_in

SIZE, FILES, DIRECTORIES = 20_000_000_000, 10_000, 4
"""Bytes of all intermediates; how many stored files a graph has, and in how many directories."""
APIS = {"hpc1": "unicore", "hpc2": "firecrest"}
WAIT_S = 3600.0
LARGE = 1_000_000
"""Bytes from which on a file that is hashed is one of the intermediates."""

PIPELINE = """
localrules: report

rule report:
    input: "results/score.txt"
    output: "report.txt"
    shell: "cat {{input}} > {{output}}"

rule simulate:
    output: "raw/{{part}}.bin"
    shell: "truncate -s {size} {{output}}"

rule prepare:
    input: "raw/{{part}}.bin"
    output: "prepared/{{part}}.bin"
    shell: "truncate -r {{input}} {{output}}"

rule merge:
    input: "prepared/a.bin", "prepared/b.bin"
    output: "results/merged.bin"
    shell: "truncate -r {{input[0]}} {{output}}"

rule score:
    input: "results/merged.bin", "raw/a.bin"
    output: "results/score.txt"
    shell: "stat -c %s {{input}} > {{output}}"
"""
LARGE_FILES = 5
"""How many large files the pipeline makes."""

MOVE = """
rule size:
    input: "{what}.bin"
    output: "{what}.size"
    resources: mantik_site="{target}"
    shell: "stat -c %s {{input}} > {{output}}"

rule make:
    output: "{what}.bin"
    resources: mantik_site="{source}"
    shell: "head -c {size} /dev/urandom > {{output}}"
"""

GRAPH = """
rule all:
    input: expand("set/{{n}}.txt", n=[f"{{n % {each}}}/{{n}}" for n in range({pairs})])

rule first:
    output: "raw/{{n}}.txt"
    shell: "echo {{wildcards.n}} > {{output}}"

rule second:
    input: "raw/{{n}}.txt"
    output: "set/{{n}}.txt"
    shell: "cp {{input}} {{output}}"
"""

CONTENT = "a\n"
"""What is in each of its files."""

HASHING = """\
#!/bin/bash
# Notes how many bytes sha256sum reads, and the seconds that it takes.
began=$EPOCHREALTIME
{real} "$@"
code=$?
[ $# -gt 0 ] || set -- /dev/stdin
[ "$1" != -- ] || shift
echo "$began $EPOCHREALTIME $(stat -L -c %s -- "$@" | paste -s -d ' ')" >> {log}
exit $code
"""
"""What stands for sha256sum at the sandbox."""


class Counted(Protocol):
    """The sandbox's protocol; it counts what comes and goes by its sockets."""

    received: ClassVar[int] = 0
    sent: ClassVar[int] = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count what is sent."""
        write = transport.write

        def counted(data: Any) -> None:
            Counted.sent += len(data)
            write(data)

        transport.write = counted  # type: ignore[method-assign]
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        Counted.received += len(data)
        super().data_received(data)


class Bench:
    """A workflow at one site of a sandbox, of which all traffic is counted."""

    def __init__(self, box: Sandbox, name: str, directory: Path) -> None:
        self.project = Project(
            directory / "project", place_in(box, name), dict(UNTRACKED), forked=False
        )
        self._box = box
        self._name = name

    def requests(self) -> Counter[str]:
        """The requests so far, by kind."""
        return Counter(self._box.record(self._name)["requests"])

    def run(self, *arguments: str, plain: bool = False) -> dict[str, float]:
        """Run Snakemake to its end, and take down what it cost."""
        before, sent, received = self.requests(), Counted.received, Counted.sent
        started = time.monotonic()
        ran = self.project.start(*arguments, plain=plain).end(WAIT_S).ok()
        seconds = time.monotonic() - started
        if "--dry-run" in arguments:
            assert "Nothing to be done" in ran.output, ran.output
        used = self.requests() - before
        print(dict(used), file=sys.stderr)
        return {
            "seconds": seconds,
            "requests": used.total(),
            "sent": Counted.received - sent,
            "received": Counted.sent - received,
        }


@contextmanager
def bench(name: str) -> Iterator[Bench]:
    """Run a sandbox with one site, and give a workflow for it."""
    with (
        tempfile.TemporaryDirectory(prefix="mantik-bench-") as directory,
        patch.object(server, "Protocol", Counted),
        Sandbox(Path(directory, "sandbox"), [SiteOption(name, APIS[name])]) as box,
    ):
        yield Bench(box, name, Path(directory))


def pipeline(name: str, size: int) -> dict[str, float]:
    """Run the pipeline, and count the bytes that cross the network and those that are hashed."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "hashed")
        log.touch()
        shim = Path(directory, "sha256sum")
        shim.write_text(HASHING.format(real=shutil.which("sha256sum"), log=log))
        shim.chmod(0o755)
        with (
            patch.dict(os.environ, PATH=f"{directory}:{os.environ['PATH']}"),
            bench(name) as made,
        ):
            each = size // LARGE_FILES
            made.project.write("Snakefile", PIPELINE.format(size=each))
            figures = made.run(*FILES_STAY)
            assert made.project.read("report.txt").split() == [str(each)] * 2
            large = list(made.project.workspace.rglob("*.bin"))
            assert sum(path.stat().st_size for path in large) == each * LARGE_FILES
            assert not list(made.project.directory.rglob("*.bin"))
        hashed = [
            (float(ended) - float(began), sum(map(int, sizes)))
            for began, ended, *sizes in map(str.split, log.read_text().splitlines())
        ]
    return figures | {
        "hashing_seconds": sum(seconds for seconds, size in hashed if size >= LARGE),
        "times_hashed": sum(size for _, size in hashed) / (each * LARGE_FILES),
    }


def moving(name: str, size: int) -> dict[str, float]:
    """Move a file that does not shrink to a site from the other one; measure the controller."""
    (source,) = APIS.keys() - {name}
    with (
        tempfile.TemporaryDirectory(prefix="mantik-bench-") as directory,
        Sandbox(Path(directory, "box"), [SiteOption(n, api) for n, api in APIS.items()]) as box,
    ):
        places = {each: place_in(box, each) for each in APIS}
        project = Project(Path(directory, "project"), places[source], dict(UNTRACKED), forked=False)
        second = Path(directory, f"{name}.yaml")
        second.write_text(places[name].config)
        project.sites = [str(second)]
        figures: dict[str, float] = {}
        for what, bytes_ in (("idle", 1), ("moving", size)):
            text = MOVE.format(what=what, size=bytes_, source=source, target=name)
            project.write("Snakefile", text)
            started = time.monotonic()
            running = project.start(*FILES_STAY)
            peak = _peak_memory(running.process.pid, running.process.poll)
            running.end(WAIT_S).ok()
            figures |= {f"{what}_seconds": time.monotonic() - started, f"{what}_mib": peak}
            there = project.workspace_at(places[name]) / f"{what}.size"
            assert there.read_text() == f"{bytes_}\n"
        return figures


def _peak_memory(pid: int, ended: Callable[[], object]) -> float:
    """Return the most memory that a process has in use until it has ended, in MiB."""
    peak = 0
    while ended() is None:
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            peak = max([peak, *map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))])
        time.sleep(0.2)
    return peak / 1024


def graph(
    name: str, files: int, directories: int, profiled: Path | None = None
) -> dict[str, float]:
    """Let Snakemake build a graph of which all is done, of stored and then of local files.

    With `profiled`, write there where its time goes with the stored files.
    """
    with bench(name) as made:
        project = made.project
        project.write("Snakefile", 'rule first:\n    output: "one"\n    shell: "echo > {output}"\n')
        made.run(*FILES_STAY)  # so that the journal knows the site
        pairs, each = files // 2, directories // 2
        project.write("Snakefile", GRAPH.format(each=each, pairs=pairs))
        steps = [[f"{step}/{n % each}/{n}.txt" for n in range(pairs)] for step in ("raw", "set")]
        _store(project, steps)
        words = ("--dry-run", *FILES_STAY)
        found = {f"stored_{what}": figure for what, figure in made.run(*words, plain=True).items()}
        if profiled is not None:
            command = [sys.executable, "-m", "cProfile", "-o", str(profiled.resolve())]
            subprocess.run(
                [*command, "-m", "snakemake", *words], check=True, cwd=project.directory,
                env=project.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        _write(project.directory, steps)
        shutil.rmtree(project.directory / STATE)
        return found | {"local_seconds": made.run("--dry-run", plain=True)["seconds"]}


def _store(project: Project, steps: list[list[str]]) -> None:
    """Make files at the site and record them as outputs that were stored there."""
    _write(project.workspace, steps)
    journal = Journal(project.directory / STATE)
    (site,) = journal.sites().values()
    for age, step in enumerate(reversed(steps), 1):
        modified = time.time() - 60 * age
        records = [
            FileRecord(
                path, len(CONTENT), hashlib.sha256(CONTENT.encode()).hexdigest(), mode=0o644,
                modified=(project.workspace / path).stat().st_mtime,
            )
            for path in step
        ]  # fmt: skip
        journal.files.set_remote_files(site.place, records)
        journal.files.set_stored(
            [
                RemoteOutput(each.path, site.place, False, modified, "job", (each,))
                for each in records
            ]
        )
    journal.close()


def _write(directory: Path, steps: list[list[str]]) -> None:
    """Make small files, older ones first."""
    for step in steps:
        for each in step:
            path = directory / each
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(CONTENT)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stored")
    parser.add_argument("what", choices=("pipeline", "graph", "moving"))
    parser.add_argument("site", choices=APIS)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--directories", type=int, default=DIRECTORIES)
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args()
    if given.what == "pipeline":
        figures = pipeline(given.site, given.size)
    elif given.what == "moving":
        figures = moving(given.site, given.size)
    else:
        figures = graph(given.site, given.files, given.directories, given.profile)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
