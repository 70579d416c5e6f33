"""Trivial rules at the real firecREST of tests/real/centre, beside plain sbatch on the same Slurm.

`python -m benchmarks.centre [JOBS]...` starts a centre, which needs root and what
tests/real/install brings, and prints for each number of jobs what both take, what the bare requests
to firecREST take that submit the same jobs, where the executor's time goes, and its requests. The
whole centre shares this machine's cores. Measure on a machine with nothing else to do.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.endtoend import SNAKEFILE
from snakemake_executor_plugin_mantik.journal import TryRecord, history
from tests.real.centre import USER, Centre
from tests.real.centre.firecrest import LOG, SYSTEM, Firecrest, requests

JOBS = (1, 40, 500)
AT_ONCE = 4
"""Bare requests at a time, as many as the executor's."""
WAIT_S = 1800.0
CONSOLE = Console()


@contextmanager
def centre() -> Iterator[Firecrest]:
    """Run a centre and give its firecREST."""
    with tempfile.TemporaryDirectory(prefix="mantik-bench-") as directory:
        path = Path(directory) / "centre"
        path.parent.chmod(0o755)
        path.mkdir()
        server = subprocess.Popen([sys.executable, "-m", "tests.real.centre", path])
        try:
            until((path / "told.json").exists)
            told = json.loads((path / "told.json").read_text())
            yield Firecrest.from_json(told["firecrest"])
        finally:
            server.terminate()
            server.wait()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that comes soon."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S} s in vain")
        time.sleep(0.05)


def sbatch(server: Firecrest, jobs: int) -> float:
    """Seconds that so many jobs take that the user submits one after the other."""
    site = Centre(server.directory)
    environment = {**os.environ, **site.environment}
    loop = f"for n in $(seq {jobs}); do sbatch --quiet --output=/dev/null --wrap 'echo $n'; done"
    started = time.monotonic()
    subprocess.run(
        ["bash", "-c", loop], check=True, user=USER, cwd=site.scratch, env=environment,
        timeout=WAIT_S,
    )  # fmt: skip
    until(lambda: _is_empty(site))
    return time.monotonic() - started


def bare_requests(server: Firecrest, jobs: int) -> float:
    """Seconds that so many jobs take that are submitted by one request each, some at a time."""
    site = Centre(server.directory)
    job = {
        "name": "bare", "workingDirectory": str(server.place().storage),
        "script": "#!/bin/bash\necho 1\n", "standardOutput": "/dev/null",
    }  # fmt: skip
    with server.client() as client, ThreadPoolExecutor(AT_ONCE) as pool:

        def submit(_: int) -> None:
            client.post(f"/compute/{SYSTEM}/jobs", json={"job": job}).raise_for_status()

        started = time.monotonic()
        list(pool.map(submit, range(jobs)))
        until(lambda: _is_empty(site))
        return time.monotonic() - started


def _is_empty(site: Centre) -> bool:
    command = ["squeue", "--noheader", "--states=PD,R,CF", "--user", USER]
    left = subprocess.check_output(command, env={**os.environ, **site.environment})
    return not left.strip()


def executor(server: Firecrest, jobs: int) -> dict[str, float]:
    """Seconds that the executor takes for so many rules, in all and by phases."""
    place = server.place()
    # Python keeps its bytecode, as on a user's machine.
    foreign = ("MANTIK_", "SNAKEMAKE_", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environment = {**kept, **place.environment, "SNAKEMAKE_MANTIK_TRACK": "none"}
    site = "".join(place.config.partition("Site:")[0])  # with the defaults
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "Snakefile").write_text(SNAKEFILE)
        Path(directory, "site.yaml").write_text(site)
        command = [sys.executable, "-m", "snakemake", "--quiet", "all", "--config"]
        command += [f"rules={jobs}", "--executor", "mantik", "--jobs", str(max(jobs, 1))]
        command += ["--mantik-backend-config", "site.yaml"]
        log = server.directory / "firecrest" / LOG
        before = requests(log)
        started = time.time()
        subprocess.run(
            command, cwd=directory, check=True, env=environment, timeout=WAIT_S,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        ended = time.time()
        tries = history(Path(directory) / ".snakemake" / "mantik")
    asked = requests(log) - before
    return {
        "all": ended - started,
        **_phases(tries, started, ended),
        "requests per job": asked.total() / jobs,
        **{f"requests: {kind}": number for kind, number in sorted(asked.items())},
    }


def _phases(tries: list[TryRecord], started: float, ended: float) -> dict[str, float]:
    submitted = [record.submitted or 0.0 for record in tries]
    finished = [record.finished or 0.0 for record in tries]
    late = sorted(
        (record.finished or 0.0)
        - (record.submitted or 0.0) - (record.waited or 0.0) - (record.ran or 0.0)
        for record in tries
    )  # fmt: skip
    return {
        "until the first is made": min(record.created for record in tries) - started,
        "until the first is submitted": min(submitted) - started,
        "first to last submission": max(submitted) - min(submitted),
        "last submission to last end": max(finished) - max(submitted),
        "last end to exit": ended - max(finished),
        "end to its report, median": late[len(late) // 2],
    }


def main() -> None:
    """Print a table for each number of jobs."""
    numbers = [int(word) for word in sys.argv[1:]] or JOBS
    with centre() as server:
        for jobs in numbers:
            plain, bare = sbatch(server, jobs), bare_requests(server, jobs)
            found = executor(server, jobs)
            plain = (plain + sbatch(server, jobs)) / 2
            bare = (bare + bare_requests(server, jobs)) / 2
            table = Table("what", "", title=f"{jobs} trivial jobs")
            table.add_row("plain sbatch, seconds", f"{plain:.1f}")
            table.add_row("bare requests, seconds", f"{bare:.1f}")
            table.add_row("times plain sbatch", f"{found['all'] / plain:.2f}")
            table.add_row("times bare requests", f"{found['all'] / bare:.2f}")
            for what, figure in found.items():
                table.add_row(what, f"{figure:.2f}" if figure < 100 else f"{figure:.0f}")
            CONSOLE.print(table)


if __name__ == "__main__":
    main()
