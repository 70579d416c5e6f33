"""The engine alone, without Snakemake, with a number of jobs in flight at once at one site or more.

Prints one line of JSON: requests per job over its life, listings per cycle, CPU of this process.
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from snakemake_executor_plugin_mantik.config.reading import read_configs
from snakemake_executor_plugin_mantik.config.settings import Timing
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.sites import make_issuer, make_site
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.sites.credentials import find_credentials
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles

APIS = {"hpc1": "unicore", "hpc2": "firecrest"}
"""The sandbox's sites and what they speak."""


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def request(number: int, site: str) -> JobRequest:
    """A job that writes its number to a file."""
    output = f"out/{number}.txt"
    return JobRequest(
        number=number, job=f"job-{number}", rule="make", name=f"make n={number}", site=site,
        command=f"set -euo pipefail; echo {number} > {output}", shell="bash", resources={},
        threads=1, variables={"OMP_NUM_THREADS": "1"}, inputs=(), outputs=(OutputFile(output),),
    )  # fmt: skip


AT_ONCE = Timing(submissions_per_second=1000)


def opened(
    name: str,
    jobs: int,
    workdir: Path,
    timing: Timing = AT_ONCE,
    *,
    configs: Path | None = None,
    **limits: int,
) -> tuple[Site, Planner]:
    """A site of the sandbox, with its limits out of the way.

    Args:
        name: of the site.
        jobs: how many may be there at the same time.
        workdir: of the workflow.
        timing: the waits and limits that its config does not have.
        configs: where the backend configs lie, if not the sandbox's own.
        limits: fields of its settings that are other than in its config.
    """
    directory = configs or os.environ["MANTIK_SANDBOX_DIR"]
    loaded = read_configs([f"{name}={directory}/{name}.yaml"], workdir)[name]
    settings = loaded.config.site.model_copy(update={"max_jobs": jobs, "timing": timing, **limits})
    config = loaded.config.model_copy(update={"site": settings})
    issuer = make_issuer(loaded, workdir)
    credential = find_credentials(name, APIS[name], os.environ, issuer=issuer)
    site = make_site(replace(loaded, config=config), credential, "bench", project=workdir)
    return site, Planner(config, None, workdir)


def measure(jobs: int, names: list[str], workdir: Path) -> dict[str, float]:
    """Run `jobs` jobs, all handed over at once, in turn to each of the sites `names`."""
    sites = {name: opened(name, jobs, workdir) for name in names}
    engine = Engine(
        sites, journal=Journal(workdir / ".state"), workdir=workdir, state=workdir / ".state",
        notify=lambda _: None,
    )  # fmt: skip
    engine.open(names, lambda _: ProjectFiles((), 0, ()))
    (workdir / "out").mkdir()

    def counted() -> Counter[str]:
        return sum((Counter(site.requests) for site, _ in sites.values()), Counter())  # type: ignore[attr-defined]

    before, cpu, started = counted(), cpu_seconds(), time.monotonic()
    for number in range(jobs):
        engine.submit(request(number, names[number % len(names)]))
    done = 0
    while done < jobs:
        for outcome in engine.collect():
            assert outcome.succeeded, outcome.message
            engine.commit(outcome)
            done += 1
        time.sleep(0.02)
    seconds = time.monotonic() - started
    cycles = sum(engine.cycles(name) for name in names)
    engine.close()
    used = counted() - before
    print(names, dict(used), file=sys.stderr)
    return {
        "requests_per_job": (used.total() - used["list"]) / jobs,
        "listings_per_cycle": used["list"] / max(1, cycles),
        "cpu_ms_per_job": (cpu_seconds() - cpu) / jobs * 1000,
        "seconds": seconds,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(int(sys.argv[1]), sys.argv[2:], Path(directory))))
