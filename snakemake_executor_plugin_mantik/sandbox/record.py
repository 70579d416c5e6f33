"""What the sandbox was asked and what it ran; for tests and benchmarks."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from snakemake_executor_plugin_mantik.sandbox.jobs import UnicoreJob
from snakemake_executor_plugin_mantik.sandbox.scheduler import Scheduler

_KINDS = (
    (re.compile(r"/rest/core/(jobs|storages|sites|factories)/[^/]+/files.*"), r"\1/*/files"),
    (re.compile(r"/rest/core/(\w+)/[^/]+/actions/(\w+)"), r"\1/*/actions/\2"),
    (re.compile(r"/rest/core/(\w+)/[^/]+/(\w+)"), r"\1/*/\2"),
    (re.compile(r"/rest/core/(\w+)/[^/]+"), r"\1/*"),
    (re.compile(r"/rest/core/(\w+)/?"), r"\1"),
    (re.compile(r"/rest/core/?"), "core"),
)


def request_kind(method: str, path: str) -> str:
    """A request without its names: `GET jobs/*`, `PUT storages/*/files`, ...

    `path` begins with `/SITE/`.
    """
    rest = "/" + path.lstrip("/").partition("/")[2]
    for pattern, kind in _KINDS:
        if match := pattern.fullmatch(rest):
            return f"{method} {match.expand(kind)}"
    return f"{method} other"


class Record:
    """Counts of requests by kind, for one site."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()

    def note(self, method: str, path: str) -> None:
        """Count one request."""
        self.requests[request_kind(method, path)] += 1

    def as_json(self, jobs: Iterable[UnicoreJob], scheduler: Scheduler) -> dict[str, Any]:
        """All that is known: requests, UNICORE's jobs, and the scheduler's with their starts."""
        return {
            "requests": dict(self.requests),
            "jobs": [
                {
                    "id": job.id,
                    "tags": job.tags,
                    "name": job.name,
                    "status": job.status,
                    "exit_code": job.exit_code,
                    "scheduler_ids": job.batch_ids,
                    "submitted": job.submitted,
                    "ended": job.ended,
                }
                for job in jobs
            ],
            "runs": [
                {
                    "scheduler_id": batch.id,
                    "state": batch.state.value,
                    "starts": batch.starts,
                    "exit_code": batch.exit_code,
                    "signal": batch.signal,
                    "started": batch.started,
                    "ended": batch.ended,
                }
                for batch in scheduler.jobs.values()
            ],
        }
