"""Many jobs at two sites while one request of a hundred fails, in a way that chance decides.

The engine talks to the sandbox through a proxy. Each job also writes its number to a file that the
executor knows nothing of. Prints one line of JSON: what became of the jobs, and what it cost.
"""

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.engine import APIS, cpu_seconds, opened, request
from snakemake_executor_plugin_mantik.config.settings import Timing
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.spec import ScriptLimits
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles
from tests.faults.faults import FAULTS
from tests.support.proxy import Exchange, Proxy, Rule, pass_on

SEED = 1
SHARE = 0.01
"""Of the requests, those that fail."""
IN_FLIGHT = 100
TIMING = Timing(
    timeout_s=5, unknown_wait_s=5, marker_grace_s=3, submissions_per_second=1000,
    script=ScriptLimits(heartbeat_s=5),
)  # fmt: skip
"""Short waits: what fails is tried again as often as in a day, in an hour."""


class Trouble:
    """Lets requests fail."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.faults: Counter[str] = Counter()

    async def __call__(self, exchange: Exchange) -> None:
        """Pass a request on, or not."""
        if self._chance.random() >= SHARE:
            await pass_on(exchange)
            return
        fault = self._chance.choice(FAULTS)
        self.faults[fault.name] += 1
        name = next(name for name in APIS if f"/{name}/" in f"{exchange.request.target}/")
        await fault.act(APIS[name])(exchange)


def noted(number: int, site: str, ran: Path) -> JobRequest:
    """A job that writes its number to its output, and to `ran`."""
    asked = request(number, site)
    return replace(asked, command=f"{asked.command}; echo {number} >> {ran}")


def thread_seconds(name: str) -> float:
    """CPU time of a thread of this process."""
    thread = next(thread for thread in threading.enumerate() if thread.name == name)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def measure(jobs: int, workdir: Path) -> dict[str, float]:
    """Run `jobs` jobs, in turn at each of the sites."""
    sandbox = Path(os.environ["MANTIK_SANDBOX_DIR"])
    config = (sandbox / "hpc1.yaml").read_text()
    url = urlsplit(config.partition("Url: ")[2].split()[0])
    server = f"{url.scheme}://{url.netloc}"
    trouble, ran = Trouble(SEED), workdir / "ran"
    with Proxy(server, lambda asked: asked.method) as proxy:
        for name in APIS:
            text = (sandbox / f"{name}.yaml").read_text().replace(server, proxy.url)
            (workdir / f"{name}.yaml").write_text(text)
        sites = {
            name: opened(name, IN_FLIGHT, workdir, TIMING, configs=workdir, poll_s=2)
            for name in APIS
        }
        state = workdir / ".state"
        engine = Engine(
            sites, journal=Journal(state), workdir=workdir, state=state,
            notify=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
        engine.open(list(APIS), lambda _: ProjectFiles((), 0, ()))
        (workdir / "out").mkdir()
        proxy.add(Rule("trouble", None, trouble, None))
        cpu, started = cpu_seconds(), time.monotonic()
        for number in range(jobs):
            engine.submit(noted(number, list(APIS)[number % len(APIS)], ran))
        failed: list[str] = []
        done = 0
        while done < jobs:
            for outcome in engine.collect():
                failed += [] if outcome.succeeded else [outcome.message]
                engine.commit(outcome)
                done += 1
            time.sleep(0.02)
        seconds = time.monotonic() - started
        cpu = cpu_seconds() - cpu - thread_seconds("proxy")
        proxy.heal()
        engine.close()
        requests = len(proxy.seen)
    print(dict(trouble.faults), *failed, sep="\n", file=sys.stderr)
    runs = Counter(ran.read_text().split())
    wrong = len(failed)
    lost = 0
    for number in range(jobs):
        made = b""
        with suppress(FileNotFoundError):
            made = (workdir / f"out/{number}.txt").read_bytes()
        lost += not runs[str(number)] or not made
        wrong += bool(made) and made != f"{number}\n".encode()
    return {
        "jobs": runs.total(),
        "lost": lost,
        "doubled": sum(count > 1 for count in runs.values()),
        "misreported": wrong,
        "faults": trouble.faults.total(),
        "requests": requests,
        "cpu_ms_per_job": cpu / jobs * 1000,
        "seconds": seconds,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(int(sys.argv[1]), Path(directory))))
