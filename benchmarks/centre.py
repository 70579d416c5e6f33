"""Trivial rules at the centre of tests/real/centre, beside plain sbatch on the same Slurm.

`python -m benchmarks.centre {unicore,firecrest} [JOBS]...` starts the centre, which needs root and
what tests/real/install brings, and prints for each number of jobs how long they take, how long as
many jobs take that the server is sent by one request each, where the executor's time goes, and the
requests that firecREST logs. The whole centre shares this machine's cores: measure with
nothing else to do.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.endtoend import SNAKEFILE, snakemake
from snakemake_executor_plugin_mantik.journal import TryRecord, read_history
from tests.real.centre import USER, Centre
from tests.real.centre.firecrest import LOG, SYSTEM, Firecrest, requests
from tests.support.places import unicorex_place
from tests.support.unicoreserver import UnicoreX
from tests.support.workflows import Place

JOBS = (1, 40, 500)
AT_ONCE = 4
"""Requests at a time, as many as the executor makes."""
WAIT_S = 1800.0
POOL = """
Pools:
  small: {Queue: batch, CPUsPerNode: 4, Runtime: 30m, Idle: 5s, Takes: 5m}
"""
CONSOLE = Console()


@dataclass(frozen=True)
class Server:
    """One of the centre's servers.

    Attributes:
        directory: the centre's.
        place: describes it as a site.
        submit: submits a job that does nothing by one request.
        asked: counts the requests to it so far, if it logs them.
    """

    directory: Path
    place: Place
    submit: Callable[[], object]
    asked: Callable[[], Counter[str]]


def _firecrest(directory: Path, server: Firecrest) -> Server:
    place, client = server.place(), server.client()
    job = {
        "name": "bare", "workingDirectory": str(place.storage),
        "script": "#!/bin/bash\necho 1\n", "standardOutput": "/dev/null",
    }  # fmt: skip

    def submit() -> None:
        client.post(f"/compute/{SYSTEM}/jobs", json={"job": job}).raise_for_status()

    log = directory / "firecrest" / LOG
    return Server(directory, place, submit, lambda: requests(log))


def _unicore(directory: Path, server: UnicoreX) -> Server:
    client = server.client()
    job = {"Executable": "echo", "Arguments": ["1"]}

    def submit() -> None:
        client.post(f"{server.url}/jobs", json=job).raise_for_status()

    return Server(directory, unicorex_place(server), submit, Counter)


@contextmanager
def centre(api: str) -> Iterator[Server]:
    """Run a centre and give its server for `api`."""
    with tempfile.TemporaryDirectory(prefix="mantik-bench-") as directory:
        path = Path(directory) / "centre"
        path.parent.chmod(0o755)
        path.mkdir()
        server = subprocess.Popen([sys.executable, "-m", "tests.real.centre", path])
        try:
            until(lambda: (path / "told.json").exists() or server.poll() is not None)
            told = json.loads((path / "told.json").read_text())
            if api == "unicore":
                yield _unicore(path, UnicoreX.from_json(told["unicorex"]))
            else:
                yield _firecrest(path, Firecrest.from_json(told["firecrest"]))
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


def sbatch(site: Centre, jobs: int) -> float:
    """Seconds that so many jobs take that the user submits one after the other."""
    loop = f"for n in $(seq {jobs}); do sbatch --quiet --output=/dev/null --wrap 'echo $n'; done"
    with until_all_ended(site, jobs) as seconds:
        subprocess.run(
            ["bash", "-c", loop], check=True, user=USER, cwd=site.scratch, timeout=WAIT_S,
            env={**os.environ, **site.environment},
        )  # fmt: skip
    return seconds[0]


def one_request_each(server: Server, jobs: int) -> float:
    """Seconds that so many jobs take that the server is sent, some at a time, and nothing else."""
    ended = until_all_ended(Centre(server.directory), jobs)
    with ThreadPoolExecutor(AT_ONCE) as pool, ended as seconds:
        list(pool.map(lambda _: server.submit(), range(jobs)))
    return seconds[0]


@contextmanager
def until_all_ended(site: Centre, jobs: int) -> Iterator[list[float]]:
    """Wait until as many more jobs have come to the scheduler and have ended, and time it."""
    environment = {**os.environ, **site.environment}

    def said(*command: str) -> str:
        return subprocess.check_output(command, env=environment, text=True)

    def next_id() -> int:
        (number,) = re.findall(
            r"^NEXT_JOB_ID\s*=\s*(\d+)", said("scontrol", "show", "config"), re.M
        )
        return int(number)

    def over() -> bool:
        left = said("squeue", "--noheader", "--states=PD,R,CF", "--user", USER)
        return not left.strip() and next_id() >= last

    last = next_id() + jobs
    seconds: list[float] = []
    started = time.monotonic()
    yield seconds
    until(over)
    seconds.append(time.monotonic() - started)


def executor(
    server: Server, jobs: int, snakefile: str = SNAKEFILE, *options: str, config: str = ""
) -> dict[str, float]:
    """Seconds that the executor takes for so many rules, in all and by phases.

    `config` comes at the end of the site's backend config.
    """
    place = server.place
    # Python keeps its bytecode, as on a user's machine.
    foreign = ("MANTIK_", "SNAKEMAKE_", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environment = {**kept, **place.environment, "SNAKEMAKE_MANTIK_TRACK": "none"}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "Snakefile").write_text(snakefile)
        Path(directory, "site.yaml").write_text(place.config + config)
        command = [sys.executable, "-m", "snakemake", "--quiet", "all", "--config"]
        command += [f"rules={jobs}", "--executor", "mantik", "--jobs", str(max(jobs, 1))]
        command += ["--mantik-backend-config", "site.yaml", *options]
        before = server.asked()
        started = time.time()
        subprocess.run(
            command, cwd=directory, check=True, env=environment, timeout=WAIT_S,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        ended = time.time()
        tries = read_history(Path(directory) / ".snakemake" / "mantik")
    asked = server.asked() - before
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.centre")
    parser.add_argument("api", choices=("unicore", "firecrest"))
    parser.add_argument("jobs", type=int, nargs="*", default=JOBS)
    arguments = parser.parse_args()
    with centre(arguments.api) as server:
        site = Centre(server.directory)
        for jobs in arguments.jobs:
            plain, alone = sbatch(site, jobs), one_request_each(server, jobs)
            found = executor(server, jobs)
            plain = (plain + sbatch(site, jobs)) / 2
            alone = (alone + one_request_each(server, jobs)) / 2
            pooled = executor(
                server, jobs, SNAKEFILE, "--default-resources", "runtime=1", config=POOL
            )
            table = Table("what", "", title=f"{jobs} trivial jobs")
            table.add_row("plain sbatch, seconds", f"{plain:.1f}")
            table.add_row("one request each, seconds", f"{alone:.1f}")
            table.add_row("times plain sbatch", f"{found['all'] / plain:.2f}")
            table.add_row("times one request each", f"{found['all'] / alone:.2f}")
            for what, figure in found.items():
                table.add_row(what, f"{figure:.2f}" if figure < 100 else f"{figure:.0f}")
            table.add_row("in a pool, seconds", f"{pooled['all']:.1f}")
            table.add_row("in a pool, requests per job", f"{pooled['requests per job']:.2f}")
            local = snakemake(jobs, "--executor", "local", "--cores", str(os.cpu_count()))
            table.add_row("Snakemake's local executor, seconds", f"{local:.1f}")
            CONSOLE.print(table)


if __name__ == "__main__":
    main()
