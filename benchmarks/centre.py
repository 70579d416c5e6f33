"""Trivial rules at the centre of tests/real/centre, beside plain sbatch on the same Slurm.

`python -m benchmarks.centre {unicore,firecrest} [JOBS]...` starts the centre, which needs root and
what tests/real/install brings, and prints for each number of jobs what they take in each way: as
jobs and in a pool of this executor's, by plain sbatch, by one request each, by Snakemake's local
executor, and by snakemake-executor-plugin-slurm, which is installed beside the centre's servers.
firecREST logs requests. The whole centre shares this machine's cores: measure with nothing else to
do.
"""

import argparse
import json
import math
import os
import re
import resource
import shlex
import shutil
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
from snakemake_executor_plugin_mantik.journal import AttemptRecord, read_history
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
PEER = Path(__file__).parents[1] / ".cache" / "real" / "slurm-executor"
"""Where Snakemake is installed with the executor for Slurm; its jobs need it, too."""
FOREIGN = ("MANTIK_", "SNAKEMAKE_", "PYTHONDONTWRITEBYTECODE", "SLURM_")
ARRAYS = ("--slurm-array-jobs", "all", "--slurm-array-limit", "50")
"""Version 2.8 gives all jobs of a larger array the first one's command: what it passes on does not
fit into a command line then."""
COLUMNS = ("seconds", "requests", "CPU seconds", "core seconds")
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


def said(site: Centre, *command: str) -> str:
    """What a command of Slurm's says."""
    environment = {**os.environ, **site.environment}
    return subprocess.check_output(command, env=environment, text=True)


def next_id(site: Centre) -> int:
    """The id of the next job."""
    config = said(site, "scontrol", "show", "config")
    (number,) = re.findall(r"^NEXT_JOB_ID\s*=\s*(\d+)", config, re.M)
    return int(number)


def idle(site: Centre) -> bool:
    """Whether no job waits or runs."""
    return not said(site, "squeue", "--noheader", "--states=PD,R,CF").strip()


@contextmanager
def counted(server: Server) -> Iterator[dict[str, float]]:
    """Count what jobs take from their submission on: see `COLUMNS`.

    CPU seconds are those of the programs that are started here, which are the jobs, too, where
    these run on this machine.
    """
    site, row = Centre(server.directory), dict[str, float]()
    first, asked, started = next_id(site), server.asked().total(), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield row
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    row.setdefault("seconds", time.monotonic() - started)
    row["CPU seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row["requests"] = server.asked().total() - asked
    until(lambda: idle(site))

    def allocated() -> dict[int, int]:
        lines = said(
            site, "sacct", "--allusers", "--allocations", "--noheader", "--parsable2",
            "--starttime=now-1days", "--format=JobIDRaw,State,CPUTimeRAW",
        ).splitlines()  # fmt: skip
        known = [line.split("|") for line in lines]
        over = (k for k in known if int(k[0]) >= first and k[1] not in ("PENDING", "RUNNING"))
        return {int(number): int(seconds) for number, _, seconds in over}

    until(lambda: len(allocated()) >= next_id(site) - first)
    row["core seconds"] = sum(allocated().values())


def peer(server: Server, jobs: int, *options: str) -> None:
    """Run so many rules with the executor for Slurm."""
    python = PEER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PEER], check=True)
        packages = ("snakemake>=9.27,<10", "snakemake-executor-plugin-slurm>=2.8,<3")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    centres = Centre(server.directory).environment
    with tempfile.TemporaryDirectory() as directory:
        # It leaves its jobs no SLURM_CONF: a centre's configuration is where Slurm looks for it.
        srun = Path(directory, "bin", "srun")
        srun.parent.mkdir()
        conf = f"SLURM_CONF={shlex.quote(centres['SLURM_CONF'])}"
        srun.write_text(f'#!/bin/sh\n{conf} exec {shutil.which("srun")} "$@"\n')
        srun.chmod(0o755)
        environment = {**kept, **centres, "PATH": f"{srun.parent}:{kept['PATH']}"}
        Path(directory, "Snakefile").write_text(SNAKEFILE)
        command = [str(python), "-m", "snakemake", "--quiet", "all", "--executor", "slurm"]
        command += ["--slurm-init-seconds-before-status-checks", "1"]  # 40 without it
        command += [*options, "--config", f"rules={jobs}", "--jobs", str(jobs)]
        # Each job is another Snakemake: not more at a time than this machine has memory for.
        command += ["--default-resources", "runtime=5", "mem_mb=8000", "slurm_partition=batch"]
        command += ["slurm_account=sandbox"]
        subprocess.run(
            command, cwd=directory, check=True, env=environment, timeout=WAIT_S,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip


@contextmanager
def until_all_ended(site: Centre, jobs: int) -> Iterator[list[float]]:
    """Wait until as many more jobs have come to the scheduler and have ended, and time it."""

    def over() -> bool:
        return idle(site) and next_id(site) >= last

    last = next_id(site) + jobs
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
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
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
        attempts = read_history(Path(directory) / ".snakemake" / "mantik")
    asked = server.asked() - before
    return {
        "all": ended - started,
        **_phases(attempts, started, ended),
        "requests per job": asked.total() / jobs,
        **{f"requests: {kind}": number for kind, number in sorted(asked.items())},
    }


def _phases(attempts: list[AttemptRecord], started: float, ended: float) -> dict[str, float]:
    submitted = [record.submitted or 0.0 for record in attempts]
    finished = [record.finished or 0.0 for record in attempts]
    late = sorted(
        (record.finished or 0.0)
        - (record.submitted or 0.0) - (record.waited or 0.0) - (record.ran or 0.0)
        for record in attempts
    )  # fmt: skip
    return {
        "until the first is made": min(record.created for record in attempts) - started,
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
        for jobs in arguments.jobs:
            phases: dict[str, float] = {}
            table = Table("what", *COLUMNS, title=f"{jobs} trivial jobs")
            for what, run in _ways(server, jobs, phases).items():
                with counted(server) as row:
                    try:
                        if (seconds := run()) is not None:
                            row["seconds"] = seconds
                    except subprocess.SubprocessError as error:
                        row["seconds"] = math.nan
                        CONSOLE.print(f"{what}: {error}")
                table.add_row(what, *(f"{row[column]:.1f}" for column in COLUMNS))
            CONSOLE.print(table)
            table = Table("a job each", "", title="where the time goes")
            for what, figure in phases.items():
                table.add_row(what, f"{figure:.2f}")
            CONSOLE.print(table)


def _ways(
    server: Server, jobs: int, phases: dict[str, float]
) -> dict[str, Callable[[], float | None]]:
    """Ways to run so many jobs; each returns the seconds, unless they are those that it takes."""
    site = Centre(server.directory)

    def each() -> None:
        phases.update(executor(server, jobs))

    def pooled() -> float:
        options = ("--default-resources", "runtime=1")
        return executor(server, jobs, SNAKEFILE, *options, config=POOL)["all"]

    cores = str(os.cpu_count())
    return {
        "plain sbatch": lambda: sbatch(site, jobs),
        "one request each": lambda: one_request_each(server, jobs),
        "a job each": each,
        "a pool": pooled,
        "Snakemake's local executor": lambda: snakemake(
            jobs, "--executor", "local", "--cores", cores
        ),
        "the executor for Slurm": lambda: peer(server, jobs),
        "its job arrays": lambda: peer(server, jobs, *ARRAYS),
    }


if __name__ == "__main__":
    main()
