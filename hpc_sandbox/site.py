"""What the sites of both APIs have in common: a directory, a scheduler, and a record for tests."""

import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from .batch import BatchScheduler
from .faults import Action, Fault
from .sbatch import SlurmVariant
from .scheduler import LocalScheduler
from .settings import SandboxSettings
from .slurm import SlurmScheduler

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


_OF_RUNS = ("starts", "exit_code", "signal", "started", "ended")


def request_kind(method: str, path: str) -> str:
    """Return the kind of a request, without names: `GET jobs/*`, `PUT storages/*/files`, ...

    `path` begins with `/SITE/`.
    """
    rest = "/" + path.lstrip("/").partition("/")[2]
    for pattern, kind in _KINDS:
        if match := pattern.fullmatch(rest):
            return f"{method} {match.expand(kind)}"
    return f"{method} other"


class Site(ABC):
    """A site: files, a scheduler, and a REST API in front of them.

    Attributes:
        directory: contains `home`, `scratch`, `spool`, and what the API needs.
    """

    def __init__(
        self, name: str, directory: Path, settings: SandboxSettings, url: str, user: str
    ) -> None:
        self.name = name
        self.directory = directory.resolve()
        self.settings = settings
        self.url = url
        self.user = user
        self._requests: Counter[str] = Counter()
        self._since = time.time()

    scheduler: BatchScheduler

    def _scheduler(self, home: Path, rules: SlurmVariant) -> BatchScheduler:
        """Return the scheduler that the settings name; `rules` are for the local one."""
        if self.settings.scheduler == "slurm":
            return SlurmScheduler(self.settings, home=home, user=self.user)
        spool = self.directory / "spool"
        return LocalScheduler(spool, self.settings, home=home, user=self.user, rules=rules)

    def start(self) -> None:
        """Start to follow the scheduler. Call this in the loop that serves the site."""
        self.scheduler.start()

    @abstractmethod
    async def stop(self) -> None:
        """End all jobs and remove what the API keeps; the user's files stay."""

    @abstractmethod
    async def handle(self, request: Request) -> Response: ...

    @abstractmethod
    def credentials(self) -> tuple[str, str]:
        """Return user name and password, or client id and secret."""

    @abstractmethod
    def refusal(self, fault: Fault) -> dict[str, Any]:
        """Return the body of a refused request."""

    @abstractmethod
    def act(self, action: Action, scope: Scope) -> None:
        """Apply a fault to the request of `scope`."""

    @abstractmethod
    def _recorded_jobs(self) -> Iterable[dict[str, Any]]: ...

    def _note(self, method: str, path: str) -> None:
        self._requests[request_kind(method, path)] += 1

    def recorded(self) -> dict[str, Any]:
        """Return the requests by kind, the API's jobs, and the scheduler's with their starts."""
        return {
            "requests": dict(self._requests),
            "jobs": list(self._recorded_jobs()),
            "runs": [
                {"scheduler_id": job.id, "state": job.state.value}
                | {name: getattr(job, name) for name in _OF_RUNS}
                for job in self.scheduler.jobs.values()
            ],
        }
