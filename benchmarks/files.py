"""Many small files and one large one, up to a site and back again, by the engine alone.

Prints one line of JSON: seconds and requests of each step, CPU and peak memory of this process.
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine import cpu_seconds, opened
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles


class Runner:
    """Runs single jobs at a site of the sandbox, each with an engine of its own, as runs do."""

    def __init__(self, name: str, workdir: Path) -> None:
        self.figures: dict[str, float] = {}
        self._name = name
        self._workdir = workdir

    def run(self, step: str, command: str, inputs: Sequence[str], output: OutputFile) -> None:
        """Run a job, and take down what it cost."""
        site, planner = opened(self._name, 1, self._workdir)
        state = self._workdir / ".state"
        engine = Engine(
            {self._name: (site, planner)}, journal=Journal(state), workdir=self._workdir,
            state=state, notify=lambda _: None,
        )  # fmt: skip
        engine.open([self._name], lambda _: ProjectFiles((), 0, ()))
        requests: Counter[str] = site.requests  # type: ignore[attr-defined]
        before, cpu, started = requests.total(), cpu_seconds(), time.monotonic()
        engine.submit(
            JobRequest(
                number=1, job=step, rule=step, name=step, site=self._name,
                command=f"set -euo pipefail; {command}", shell="bash", resources={}, threads=1,
                variables={}, inputs=tuple(inputs), outputs=(output,), forced=True,
            )
        )  # fmt: skip
        while not (outcomes := engine.collect()):
            time.sleep(0.02)
        assert outcomes[0].succeeded, outcomes[0].message
        engine.commit(outcomes[0])
        self.figures |= {
            f"{step}_seconds": time.monotonic() - started,
            f"{step}_cpu": cpu_seconds() - cpu,
            f"{step}_requests": requests.total() - before,
        }
        engine.close()
        self.figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def many(runner: Runner, workdir: Path, number: int) -> None:
    """Many files as a list of inputs, as a directory that is made, and as one that is read."""
    (workdir / "in").mkdir()
    names = [f"in/{n}.txt" for n in range(number)]
    for name in names:
        (workdir / name).write_text(f"{name}\n" * 10)
    runner.run("up", "cp -r in out", names, OutputFile("out", directory=True))
    runner.run("read", "ls out | wc -l > count", ["out"], OutputFile("count"))
    (workdir / "in/0.txt").write_text("changed\n")
    runner.run("again", "cat in/0.txt > first", names, OutputFile("first"))
    assert len(os.listdir(workdir / "out")) == int((workdir / "count").read_text()) == number
    assert (workdir / "first").read_text() == "changed\n"


def large(runner: Runner, workdir: Path, size: int) -> None:
    """A large sparse file."""
    with (workdir / "in").open("wb") as file:
        file.seek(size - 1)
        file.write(b"x")
    runner.run("up", "stat -c %s in > size", ["in"], OutputFile("size"))
    runner.run("down", "cp in out", ["in"], OutputFile("out"))
    assert (workdir / "out").stat().st_size == int((workdir / "size").read_text()) == size


if __name__ == "__main__":
    what, number, name = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        workdir = Path(directory)
        runner = Runner(name, workdir)
        (many if what == "many" else large)(runner, workdir, int(number))
        print(json.dumps(runner.figures))
