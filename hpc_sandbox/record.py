"""Record requests, jobs and runs, for tests and benchmarks."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .batch import BatchScheduler

_KINDS = (
    (re.compile(r"/firecrest/v2/compute/[^/]+/jobs/[^/]+/(\w+)"), r"compute/jobs/*/\1"),
    (re.compile(r"/firecrest/v2/compute/[^/]+/jobs/[^/]+"), "compute/jobs/*"),
    (re.compile(r"/firecrest/v2/compute/[^/]+/jobs"), "compute/jobs"),
    (re.compile(r"/firecrest/v2/filesystem/[^/]+/(ops|transfer)/(\w+)"), r"filesystem/\1/\2"),
    (re.compile(r"/firecrest/v2/status/(systems|liveness)/?"), r"status/\1"),
    (re.compile(r"/firecrest/v2/status/[^/]+/(\w+)"), r"status/\1"),
    (re.compile(r"/auth/.*/token"), "token"),
    (re.compile(r"/store/.*"), "store"),
    (re.compile(r"/rest/core/(jobs|storages|sites|factories)/[^/]+/files.*"), r"\1/*/files"),
    (re.compile(r"/rest/core/(\w+)/[^/]+/actions/(\w+)"), r"\1/*/actions/\2"),
    (re.compile(r"/rest/core/(\w+)/[^/]+/(\w+)"), r"\1/*/\2"),
    (re.compile(r"/rest/core/(\w+)/[^/]+"), r"\1/*"),
    (re.compile(r"/rest/core/(\w+)/?"), r"\1"),
    (re.compile(r"/rest/core/?"), "core"),
)


def request_kind(method: str, path: str) -> str:
    """Return the kind of a request, without names: `GET jobs/*`, `PUT storages/*/files`, ...

    `path` begins with `/SITE/`.
    """
    rest = "/" + path.lstrip("/").partition("/")[2]
    for pattern, kind in _KINDS:
        if match := pattern.fullmatch(rest):
            return f"{method} {match.expand(kind)}"
    return f"{method} other"


class RequestRecord:
    """Counts of requests by kind, for one site."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()

    def note(self, method: str, path: str) -> None:
        self.requests[request_kind(method, path)] += 1

    def as_json(self, jobs: Iterable[dict[str, Any]], scheduler: BatchScheduler) -> dict[str, Any]:
        """Return the requests, the API's jobs, and the scheduler's jobs with their starts."""
        return {
            "requests": dict(self.requests),
            "jobs": list(jobs),
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
