"""The engine alone, without Snakemake, with a number of jobs in flight at once.

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

from snakemake_executor_plugin_mantik.config.reading import read_all
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.sites import make_site
from snakemake_executor_plugin_mantik.sites.credentials import find_credentials
from snakemake_executor_plugin_mantik.staging.sources import Sources

SITE = "hpc1"


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def request(number: int) -> JobRequest:
    """A job that writes its number to a file."""
    output = f"out/{number}.txt"
    return JobRequest(
        number=number, job=f"job-{number}", rule="make", name=f"make n={number}", site=SITE,
        command=f"set -euo pipefail; echo {number} > {output}", shell="bash", resources={},
        threads=1, variables={"OMP_NUM_THREADS": "1"}, inputs=(), outputs=(OutputFile(output),),
    )  # fmt: skip


def measure(jobs: int, workdir: Path) -> dict[str, float]:
    """Run `jobs` jobs, all handed over at once."""
    loaded = read_all([f"{SITE}={os.environ['MANTIK_SANDBOX_DIR']}/{SITE}.yaml"], workdir)[SITE]
    settings = loaded.config.site.model_copy(
        update={"max_jobs": jobs, "submissions_per_second": 1000}
    )
    config = loaded.config.model_copy(update={"site": settings})
    credential = find_credentials(SITE, "unicore", os.environ)
    site = make_site(replace(loaded, config=config), credential, "bench", project=workdir)
    planner = Planner(config, None, workdir)
    engine = Engine(
        {SITE: (site, planner)}, workdir=workdir, state=workdir / ".state", tell=lambda _: None
    )
    engine.open([SITE], lambda _: Sources((), 0, ()))
    (workdir / "out").mkdir()
    requests: Counter[str] = site.requests  # type: ignore[attr-defined]
    before, cpu, started = Counter(requests), cpu_seconds(), time.monotonic()
    for number in range(jobs):
        engine.submit(request(number))
    done = 0
    while done < jobs:
        for outcome in engine.collect():
            assert outcome.succeeded, outcome.message
            engine.commit(outcome)
            done += 1
        time.sleep(0.02)
    seconds = time.monotonic() - started
    cycles = engine.cycles(SITE)
    engine.close()
    used = Counter(requests)
    used.subtract(before)
    print(dict(used), file=sys.stderr)
    return {
        "requests_per_job": (sum(used.values()) - used["list"]) / jobs,
        "listings_per_cycle": used["list"] / max(1, cycles),
        "cpu_ms_per_job": (cpu_seconds() - cpu) / jobs * 1000,
        "seconds": seconds,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(int(sys.argv[1]), Path(directory))))
