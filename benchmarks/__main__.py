"""Run all benchmarks, each against a sandbox of its own in another process, and print a table.

`python -m benchmarks soak` and `python -m benchmarks load` run those that `make bench` leaves out,
since they take minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import endtoend, stored
from snakemake_executor_plugin_mantik.config.settings import Timing

IN_FLIGHT = (1, 50, 500)
MANY, LARGE = 10_000, 5_000_000_000
"""How many small files go up and come back, and how many bytes one large file has."""
TRACKED = 200
"""How many jobs become MLflow runs."""
AT_ONCE, DEFAULT_PACE, SLOW_PACE = 1000, int(Timing().submissions_per_second), 4
"""Submissions per second: as fast as it goes; as a site is asked by default; so slowly that jobs
do not queue up on this machine, tracked or not, since to look after those that wait costs, too."""
SOAKED = 5000
"""How many jobs run while requests fail."""
WATCHED, CANCELLED = 200, 2000
"""How many jobs are submitted slowly, and how many are cancelled of which half were submitted."""
DIRECTORIES = (4, 60)
"""How many directories the stored files are in: fewer and more than are compared with a site."""
SITES = {"UNICORE": ["hpc1"], "firecREST": ["hpc2"], "both": ["hpc1", "hpc2"]}


def sandboxed(
    directory: Path, module: str, *arguments: str, timeout: float = 900.0
) -> dict[str, float]:
    """Run a benchmark module inside a sandbox and return the figures that it prints last."""
    command = [sys.executable, "-m", "snakemake_executor_plugin_mantik", "sandbox", "run"]
    command += ["--site", "hpc1=unicore", "--site", "hpc2=firecrest"]
    command += ["--", sys.executable, "-m", module, *arguments]
    environment = os.environ | {"MANTIK_SANDBOX_DIR": str(directory)}
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measured(module: str, *arguments: object, timeout: float = 900.0) -> dict[str, float]:
    """Run a benchmark module that has a sandbox of its own; return the figures it prints last."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def files() -> Table:
    """A table of what many files and a large one cost."""
    table = Table("site", "files", "step", "seconds", "requests", "CPU", "peak memory",
                  title="Files")  # fmt: skip
    for what, number in (("many", MANY), ("large", LARGE)):
        shown = f"{number} small" if what == "many" else f"one of {number / 1e9:.0f} GB"
        for title, name in (("UNICORE", "hpc1"), ("firecREST", "hpc2")):
            with tempfile.TemporaryDirectory() as directory:
                f = sandboxed(Path(directory), "benchmarks.files", what, str(number), name)
            for step in [key.removesuffix("_cpu") for key in f if key.endswith("_cpu")]:
                table.add_row(
                    title, shown, step, f"{f[f'{step}_seconds']:.1f}",
                    f"{f[f'{step}_requests']:.0f}", f"{f[f'{step}_cpu']:.1f} s",
                    f"{f['peak_mib']:.0f} MiB",
                )  # fmt: skip
    return table


def adoption() -> Table:
    """A table of what coming back to many jobs costs."""
    table = Table("site", "jobs", "seconds", "requests", "CPU", "peak memory",
                  title="Coming back to jobs that run or ended meanwhile")  # fmt: skip
    for title, name in (("UNICORE", "hpc1"), ("firecREST", "hpc2")):
        for jobs, what in ((10_000, "running"), (100_000, "running"), (1_000, "ended")):
            with tempfile.TemporaryDirectory() as directory:
                f = sandboxed(Path(directory), "benchmarks.adoption", str(jobs), name, what)
            table.add_row(
                title, f"{jobs} {what}", f"{f['seconds']:.1f}", f"{f['requests']:.0f}",
                f"{f['cpu']:.1f} s", f"{f['peak_mib']:.0f} MiB",
            )  # fmt: skip
    return table


def tracking() -> tuple[Table, Table]:
    """What MLflow runs cost, and how much later tracked jobs are submitted; at an MLflow server."""
    costs = Table("--mantik-track", "controller", "worker", "the same calls by hand",
                  "beyond MLflow's own",
                  title=f"{TRACKED} jobs that are MLflow runs: CPU per job")  # fmt: skip
    delays = Table("--mantik-track", "submissions per second", "half of the jobs", "the last one",
                   "its end", "jobs without MLflow's id",
                   title="Seconds until they are submitted, untracked and tracked")  # fmt: skip
    for which, pace in (
        ("mlproject", SLOW_PACE), ("all", SLOW_PACE), ("mlproject", DEFAULT_PACE),
        ("mlproject", AT_ONCE),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            f = sandboxed(Path(directory), "benchmarks.tracking", str(TRACKED), which, str(pace))
        if pace == SLOW_PACE:
            own = f["controller_ms"] + f["worker_ms"] - f["client_ms"]
            costs.add_row(
                which, f"{f['controller_ms']:.1f} ms", f"{f['worker_ms']:.1f} ms",
                f"{f['client_ms']:.1f} ms", f"{own:.1f} ms",
            )  # fmt: skip
        pairs = (
            f"{f[f'untracked_{what}']:.1f}, {f[f'tracked_{what}']:.1f}"
            for what in ("submitted_median", "submitted_last", "seconds")
        )
        delays.add_row(which, str(pace), *pairs, f"{f['own_ids']:.0f}")
    return costs, delays


def files_stay() -> tuple[Table, Table]:
    """What files cost that stay at their site: in a run, and when Snakemake builds its graph."""
    runs = Table("site", "seconds", "requests", "sent", "received", "checksums",
                 title=f"{stored.SIZE / 1e9:.0f} GB that stay at their site")  # fmt: skip
    graphs = Table("site", "directories", "stored files", "requests", "the same here",
                   title=f"snakemake --dry-run, all {stored.FILES} files made")  # fmt: skip
    for title, name in (("UNICORE", "hpc1"), ("firecREST", "hpc2")):
        f = measured("benchmarks.stored", "pipeline", name)
        runs.add_row(
            title, f"{f['seconds']:.0f}", f"{f['requests']:.0f}", f"{f['sent'] / 1e6:.2f} MB",
            f"{f['received'] / 1e6:.2f} MB",
            f"each byte {f['times_hashed']:.2f} times, {f['hashing_seconds']:.0f} s of the jobs",
        )  # fmt: skip
        for directories in DIRECTORIES:
            f = measured("benchmarks.stored", "graph", name, "--directories", directories)
            graphs.add_row(
                title, str(directories), f"{f['stored_seconds']:.1f} s",
                f"{f['stored_requests']:.0f}", f"{f['local_seconds']:.1f} s",
            )  # fmt: skip
    return runs, graphs


def soak(jobs: int = SOAKED) -> str:
    """What became of many jobs while requests failed."""
    with tempfile.TemporaryDirectory() as directory:
        f = sandboxed(Path(directory), "benchmarks.soak", str(jobs), timeout=4 * 3600.0)
    return (
        f"{f['jobs']:.0f} jobs run of {jobs}: {f['lost']:.0f} lost, {f['doubled']:.0f} doubled,"
        f" {f['misreported']:.0f} misreported; {f['faults']:.0f} of {f['requests']:.0f} requests"
        f" failed; {f['cpu_ms_per_job']:.1f} ms of CPU per job, {f['seconds']:.0f} s."
    )


def load(cancelled: int = CANCELLED) -> Table:
    """A table of what many jobs cost that are submitted slowly, and many that are cancelled."""
    table = Table("site", "what", "seconds", "seen", "requests", title="Under load")
    for title, name in (("UNICORE", "hpc1"), ("firecREST", "hpc2")):
        with tempfile.TemporaryDirectory() as directory:
            f = sandboxed(Path(directory), "benchmarks.load", "watching", str(WATCHED), name)
        table.add_row(
            title, f"{WATCHED} jobs, 2 s longer for each submission", f"{f['seconds']:.0f}",
            f"markers listed {f['listings']:.0f} times", f"{f['submissions']:.0f} submissions",
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            f = sandboxed(
                Path(directory), "benchmarks.load", "cancelling", str(cancelled), name,
                timeout=4 * 3600.0,
            )  # fmt: skip
        table.add_row(
            title, f"{cancelled} jobs cancelled, {f['submissions']:.0f} of them submitted",
            f"{f['seconds']:.0f}", f"{f['confirmed']:.0f} confirmed", f"{f['requests']:.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    """Print the tables; with `soak` or `load`, and perhaps a number of jobs, only these."""
    console = Console()
    if sys.argv[1:2] in (["soak"], ["load"]):
        console.print({"soak": soak, "load": load}[sys.argv[1]](*map(int, sys.argv[2:])))
        return
    table = Table("sites", "jobs in flight", "requests per job", "listings per cycle",
                  "CPU per job", "seconds", title="Trivial plain scripts")  # fmt: skip
    for title, names in SITES.items():
        for jobs in IN_FLIGHT:
            with tempfile.TemporaryDirectory() as directory:
                f = sandboxed(Path(directory), "benchmarks.engine", str(jobs), *names)
            table.add_row(
                title, str(jobs), f"{f['requests_per_job']:.2f}", f"{f['listings_per_cycle']:.2f}",
                f"{f['cpu_ms_per_job']:.1f} ms", f"{f['seconds']:.1f}",
            )  # fmt: skip
    console.print(table)
    console.print(files())
    console.print(adoption())
    for table in (*tracking(), *files_stay()):
        console.print(table)
    with tempfile.TemporaryDirectory() as directory:
        f = sandboxed(Path(directory), "benchmarks.endtoend")
    console.print(
        f"{endtoend.RULES} trivial rules: {f['mantik']:.1f} s with the executor,"
        f" {f['local']:.1f} s with Snakemake's local one, {f['direct']:.2f} s as plain processes;"
        f" of the executor's time {f['startup']:.1f} s is a run of a single rule."
    )
    console.print(f"Importing the plugin: {endtoend.import_seconds() * 1000:.0f} ms")


if __name__ == "__main__":
    main()
