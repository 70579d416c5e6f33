"""Coming back to many jobs: how long it takes until a new run knows of all that it left running.

The journal and the site hold what a controller leaves that was killed while its jobs ran: attempts,
claims, and for jobs that ended meanwhile their markers. Prints one line of JSON: seconds, requests,
CPU and peak memory of this process.
"""

import io
import json
import resource
import sys
import tarfile
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.engine import cpu_seconds, opened, request
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.observer import Observer
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import fingerprint_of
from snakemake_executor_plugin_mantik.jobs.paths import AttemptPaths
from snakemake_executor_plugin_mantik.journal import (
    BUCKET_SIZE,
    AttemptRecord,
    AttemptState,
    Journal,
)
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles

STATE = ".state"


class Seen(Observer):
    """Counts the attempts that have been seen to run."""

    def __init__(self) -> None:
        self.number = 0

    def started(self, record: AttemptRecord) -> None:  # noqa: ARG002
        """One more."""
        self.number += 1


def marker(attempt_id: str, number: int) -> bytes:
    """The marker of a job that ended well, as its script writes it."""
    output = f"{number}\n".encode()
    meta = {
        "version": 1, "attempt": attempt_id, "exit_code": 0, "failed_step": "", "signal": "",
        "started": 10.0, "ended": 20.0, "host": "n", "files": 1, "lacking": 0, "archive_size": 0,
        "archive_sha256": "", "log_bytes": 0,
    }  # fmt: skip
    path = f"out/{number}.txt"
    files = "".join(f"{field}\0" for field in ("marker", "f", len(output), "644", "", "", path))
    members = {
        "meta": "".join(f"{key}={value}\n" for key, value in meta.items()).encode(),
        "missing": b"", "lacking": b"", "files": files.encode(), "log": b"", f"./{path}": output,
    }  # fmt: skip
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def leave(
    jobs: int, site: str, planner: Planner, workdir: Path, workspace: Path, *, ended: bool
) -> None:
    """Leave what a controller leaves that is killed while its jobs run."""
    journal = Journal(workdir / STATE)
    attempts, submissions = [], []
    for number in range(jobs):
        asked, paths = request(number, site), AttemptPaths(number // BUCKET_SIZE, str(uuid.uuid4()))
        digest = fingerprint_of(asked.made_of({}, planner.environment(), {}))
        attempts.append(
            (paths.attempt_id, site, paths.bucket, asked.job, asked.rule, asked.name, digest,
             AttemptState.SUBMITTED, time.time(), time.time())
        )  # fmt: skip
        submissions.append((paths.attempt_id, f"left-{number}"))
        claim = workspace / paths.claim
        claim.parent.mkdir(parents=True, exist_ok=True)
        claim.write_text(f"owner=x\nsite_job=left-{number}\nscheduler_job={number}\nhost=n\n")
        if ended:
            (workspace / paths.marker(0)).write_bytes(marker(paths.attempt_id, number))
    with journal.write() as db:
        db.executemany(
            "INSERT INTO attempts (id, site, bucket, job, rule, name, fingerprint, state, created,"
            " submitted) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            attempts,
        )
        db.executemany("INSERT INTO submissions VALUES (?, ?)", submissions)
    journal.close()


def measure(jobs: int, name: str, workdir: Path, *, ended: bool) -> dict[str, float]:
    """Come back to `jobs` jobs at the site `name`, which run or have ended meanwhile."""

    def engine(seen: Seen) -> Engine:
        state = workdir / STATE
        return Engine(
            {name: (site, planner)}, journal=Journal(state), workdir=workdir, state=state,
            notify=lambda _: None, observer=seen,
        )  # fmt: skip

    (workdir / "out").mkdir()
    site, planner = opened(name, jobs, workdir)
    first = engine(Seen())
    first.open([name], lambda _: ProjectFiles((), 0, ()))
    workspace = Path(first.workspace(name))
    first.close()
    leave(jobs, name, planner, workdir, workspace, ended=ended)

    site, planner = opened(name, jobs, workdir)
    seen = Seen()
    cpu, started = cpu_seconds(), time.monotonic()
    second = engine(seen)
    second.open([name], lambda _: ProjectFiles((), 0, ()))
    for number in range(jobs):
        second.submit(request(number, name))
    done = 0
    while done + (0 if ended else seen.number) < jobs:
        for outcome in second.collect():
            assert outcome.succeeded, outcome.message
            second.commit(outcome)
            done += 1
        time.sleep(0.02)
    figures = {
        "seconds": time.monotonic() - started,
        "cpu": cpu_seconds() - cpu,
        "requests": sum(site.requests.values()),  # type: ignore[attr-defined]
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(name, dict(site.requests), file=sys.stderr)  # type: ignore[attr-defined]
    second.close(tidy=False)
    return figures


if __name__ == "__main__":
    number, name, what = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(int(number), name, Path(directory), ended=what == "ended")))
