"""Many jobs at one site that submits slowly, and many that are cancelled at once.

Prints one line of JSON: how often markers were looked for while submissions waited for their turn;
how long it took to cancel jobs of which half had been submitted, and how many were confirmed.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from benchmarks.engine import cpu_seconds, opened, request
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles

DELAY_S: Final = 2.0
"""What each submission takes longer."""
WATCHED_S: Final = 120.0
SUBMISSIONS: Final = {"hpc1": "/rest/core/jobs/?$", "hpc2": "/compute/[^/]+/jobs/?$"}
"""Where jobs are posted to at each of the sandbox's sites."""


@contextmanager
def running(
    jobs: int, name: str, workdir: Path, at_site: int | None = None
) -> Iterator[tuple[Engine, Any]]:
    """An engine that was given `jobs` jobs which do not end by themselves, and its site.

    `at_site` is how many of them may be there at once, by default all.
    """
    site, planner = opened(name, at_site or jobs, workdir)
    engine = Engine(
        {name: (site, planner)}, journal=Journal(workdir / ".state"), workdir=workdir,
        state=workdir / ".state", notify=lambda text: print(text[:200], file=sys.stderr),
    )  # fmt: skip
    engine.open([name], lambda _: ProjectFiles((), 0, ()))
    for number in range(jobs):
        engine.submit(replace(request(number, name), command="sleep 3600"))
    try:
        yield engine, site
    finally:
        engine.close(tidy=False)


@contextmanager
def slow_submissions(name: str) -> Iterator[None]:
    """Let the sandbox take longer for each submission to a site."""
    config = (Path(os.environ["MANTIK_SANDBOX_DIR"]) / f"{name}.yaml").read_text()
    url = urlsplit(config.partition("Url: ")[2].split()[0])
    faults = f"{url.scheme}://{url.netloc}/sandbox/faults"
    fault = {
        "action": "delay", "method": "POST", "path": SUBMISSIONS[name], "seconds": DELAY_S,
        "count": None,
    }  # fmt: skip
    token = {"Authorization": f"Bearer {os.environ['MANTIK_SANDBOX_TOKEN']}"}
    httpx.post(faults, json=fault, headers=token).raise_for_status()
    try:
        yield
    finally:
        httpx.delete(faults, headers=token).raise_for_status()


def watching(jobs: int, name: str, workdir: Path) -> dict[str, float]:
    """Count listings of markers while `jobs` jobs are submitted slowly."""
    with slow_submissions(name), running(jobs, name, workdir) as (engine, site):
        listed, cycles = site.requests["list"], engine.cycles(name)
        time.sleep(WATCHED_S)
        figures = {
            "seconds": WATCHED_S,
            "submissions": site.requests["submit"],
            "listings": site.requests["list"] - listed,
            "cycles": engine.cycles(name) - cycles,
        }
        engine.cancel(at_once=True)
    return figures


def cancelling(jobs: int, name: str, workdir: Path) -> dict[str, float]:
    """Cancel `jobs` jobs of which half were submitted."""
    sent = jobs // 2
    with running(jobs, name, workdir, at_site=sent) as (engine, site):
        until(lambda: site.requests["submit"] >= sent)
        before, cpu, started = site.requests.total(), cpu_seconds(), time.monotonic()
        unconfirmed = engine.cancel()
        return {
            "jobs": jobs,
            "submissions": site.requests["submit"],
            "seconds": time.monotonic() - started,
            "confirmed": jobs - len(unconfirmed),
            "requests": site.requests.total() - before,
            "cpu": cpu_seconds() - cpu,
        }


def until(reached: Callable[[], bool]) -> None:
    """Wait for something, as long as it takes."""
    while not reached():
        time.sleep(0.1)


KINDS: Final = {"watching": watching, "cancelling": cancelling}

if __name__ == "__main__":
    kind, number, site_name = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(KINDS[kind](int(number), site_name, Path(directory))))
