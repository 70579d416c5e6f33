"""What it costs to make each job, and the workflow, an MLflow run.

At an MLflow server of its own, whose store is a SQL database. Prints one line of JSON with CPU: of
the controller beyond that of the same jobs untracked, of the worker process, and of a program that
does nothing but the same calls of MLflow's client (`by_hand`); and with what jobs wait for: the
seconds until they were submitted, the half of them and the last one, and until the last one had
ended.

The jobs of entry points log a parameter and some values of a metric, others nothing: their commands
write what MLflow would, which is not to be imported at the site for each.

That program runs beside the tracked jobs, as fast as these, and beside the untracked ones as well:
a busy machine takes more CPU for the same work, and what is compared is to be as busy.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from statistics import median

from benchmarks.engine import cpu_seconds, opened, request
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.config.settings import Timing
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.observer import JobExtras, Observer, Observers
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.journal import AttemptRecord, Journal
from snakemake_executor_plugin_mantik.mlproject.entry import Call
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles
from snakemake_executor_plugin_mantik.tracking import store
from snakemake_executor_plugin_mantik.tracking.cursor import Cursor, open_log
from snakemake_executor_plugin_mantik.tracking.process import SETTINGS
from snakemake_executor_plugin_mantik.tracking.run import (
    TrackedRun,
    TrackedWorkflow,
    TrackingTarget,
)
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker

SITE = "hpc1"
END_S = 600.0
PARAMS = {"alpha": "1.5", "depth": "3"}
LOGS = r"""
run="${MLFLOW_TRACKING_URI#file://}/$MLFLOW_EXPERIMENT_ID/$MLFLOW_RUN_ID"
printf 3 > "$run/params/epochs"
for step in {1..10}; do printf '1700000000000 0.5 %s\n' "$step"; done > "$run/metrics/loss"
"""


def tracked(number: int, which: str) -> JobRequest:
    """A job that has a run: of an entry point (`mlproject`), or of any other rule (`all`)."""
    wildcards = {"n": str(number)}
    call = Call(PurePosixPath(), "demo", "main", "abc", PARAMS)
    other = TrackedRun(wildcards=wildcards, params=PARAMS)
    subject = TrackedRun(call, wildcards) if which == "mlproject" else other
    asked = replace(request(number, SITE), subject=subject)
    return replace(asked, command=asked.command + LOGS) if which == "mlproject" else asked


class Stopwatch(Observer):
    """Sees when the site has acknowledged each job.

    Attributes:
        submitted_at: by the job, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.submitted_at: dict[str, float] = {}

    def submitted(self, record: AttemptRecord, site_job: str, queue: str) -> None:  # noqa: ARG002
        """Note when."""
        self.submitted_at.setdefault(record.job, time.monotonic())


@dataclass(frozen=True)
class Ran:
    """What jobs that were handed over at once took.

    Attributes:
        cpu: seconds of this process.
        worker: seconds of the worker process.
        seconds: until the last one was there.
        submitted: seconds until each was submitted.
        own_ids: how many were submitted with an id that is not MLflow's.
    """

    cpu: float
    worker: float
    seconds: float
    submitted: Sequence[float]
    own_ids: int


def run(requests: Sequence[JobRequest], workdir: Path, uri: str, pace: int) -> Ran:
    """Run jobs, `pace` submissions a second at most; tracked if there is a server."""
    (workdir / "out").mkdir(parents=True)
    journal = Journal(workdir / STATE)
    journal.begin_run({}, {})
    tracker = Tracker(
        workdir, journal, TrackingTarget(uri), {SITE: ""}, mask=str, notify=print,
        workflow=TrackedWorkflow("Snakefile"),
        pace=pace,
    )  # fmt: skip
    begun, watch = cpu_seconds(), Stopwatch()
    tracker.start(tracked=bool(uri))
    site = opened(SITE, len(requests), workdir, Timing(submissions_per_second=pace))
    engine = Engine(
        {SITE: site}, journal=journal, workdir=workdir, state=workdir / STATE,
        notify=lambda _: None, observer=Observers(watch, tracker),
    )  # fmt: skip
    engine.open([SITE], lambda _: ProjectFiles((), 0, ()))
    handed_over = time.monotonic()
    for each in requests:
        engine.submit(each)
    done = 0
    while done < len(requests):
        for outcome in engine.collect():
            assert outcome.succeeded, outcome.message
            engine.commit(outcome)
            done += 1
        time.sleep(0.02)
    seconds = time.monotonic() - handed_over
    engine.close(ending="finished", pipeline={})
    tracker.close(END_S)
    used = cpu_seconds() - begun
    own_ids = _own_ids(workdir) if uri else 0
    submitted = [at - handed_over for at in watch.submitted_at.values()]
    return Ran(used, children_seconds(), seconds, submitted, own_ids)


def _own_ids(workdir: Path) -> int:
    cursor = Cursor(workdir)
    with open_log(workdir) as log:
        rows = log.db.execute("SELECT attempt, json_extract(given, '$.run_id') FROM tracked")
        found = sum(bool(cursor.run(attempt_id).run_id != given) for attempt_id, given in rows)
    cursor.close()
    return found


def lay_out_stores(number: int, directory: Path) -> None:
    """What so many jobs that log a parameter have brought back."""
    directory.mkdir()
    identity = store.RunIdentity("a" * 32, "1", "bench")
    for name in map(str, range(number)):
        first = store.store_skeleton("/w", name, identity, name="r", user="u", now=1.0)
        logged = {f"1/{identity.run_id}/params/epochs": b"3"}
        JobExtras("", {**first, **logged}).lay_out(directory / name)


def measure(jobs: int, which: str, pace: int, directory: Path) -> dict[str, float]:
    """The figures, per job; what is waited for, in seconds."""
    # Not where jobs run: it imports MLflow, which no controller does.
    from tests.support.ports import free_port
    from tests.tracking.conftest import TrackingServer

    server = TrackingServer(directory, free_port())
    server.start()
    try:
        plain, _ = beside(jobs, which, pace, server.uri, directory / "plain", tracked=False)
        own, client = beside(jobs, which, pace, server.uri, directory / "tracked", tracked=True)
    finally:
        server.stop()
    return {
        "controller_ms": (own.cpu - plain.cpu) / jobs * 1000,
        "worker_ms": own.worker / jobs * 1000,
        "client_ms": client / jobs * 1000,
        "own_ids": own.own_ids,
        "untracked_seconds": plain.seconds,
        "tracked_seconds": own.seconds,
        "untracked_submitted_median": median(plain.submitted),
        "untracked_submitted_last": max(plain.submitted),
        "tracked_submitted_median": median(own.submitted),
        "tracked_submitted_last": max(own.submitted),
    }


def beside(
    jobs: int, which: str, pace: int, uri: str, directory: Path, *, tracked: bool
) -> tuple[Ran, float]:
    """Run jobs beside the same calls by hand, each in a process of its own; and the CPU of that."""
    stores = Path(f"{directory}-stores")
    lay_out_stores(jobs if which == "mlproject" else 0, stores)
    command = [sys.executable, "-m", "benchmarks.by_hand", uri, str(jobs), str(pace), str(stores)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        what = "tracked" if tracked else "untracked"
        command = [sys.executable, "-m", "benchmarks.tracking", str(jobs), which, str(pace)]
        ran = subprocess.run(
            [*command, uri, what, str(directory)], stdout=subprocess.PIPE, text=True, check=True
        )
        said, _ = client.communicate()
    assert client.returncode == 0
    return Ran(**json.loads(ran.stdout.splitlines()[-1])), float(said.splitlines()[-1])


def children_seconds() -> float:
    """User and system time of the processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """All of it, or one side of the comparison."""
    jobs, which, pace, *rest = sys.argv[1:]
    if not rest:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(measure(int(jobs), which, int(pace), Path(scratch))))
        return
    uri, what, directory = rest
    make = partial(tracked, which=which) if what == "tracked" else partial(request, site=SITE)
    requests = [make(number) for number in range(int(jobs))]
    ran = run(requests, Path(directory), uri if what == "tracked" else "", int(pace))
    print(json.dumps(asdict(ran)))


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main()
