"""A running sandbox for tests, and what is needed to talk to it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpc_sandbox.faults import Protocol
from hpc_sandbox.firecrest.site import FirecrestServer
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import PARTITIONS, FirecrestSettings, SandboxSettings, SiteOption, Timing
from hpc_sandbox.unicore import UnicoreServer
from tests.support import clusters
from tests.support.workflows import T, until

FAST = SandboxSettings(
    timing=Timing(status_interval=0.1, death_lag=0.5, resubmit_delay=0.05, kill_wait=1.0,
                  memory_interval=0.1),
    slots=2,
    accounts=("sandbox", clusters.OTHER_ACCOUNT),
    partitions=(*PARTITIONS, *clusters.PARTITIONS),
    firecrest=FirecrestSettings(command_time=0.002, command_timeout=5.0, record_time=0.0,
                                accounting_lag=0.2, store_interval=0.1),
)  # fmt: skip
"""A sandbox that loses no time."""


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A running sandbox, shared by all tests of a worker: `hpc1` is UNICORE, `hpc2` firecREST.

    Leave faults as they were: `sandbox.faults.clear()`.
    """
    directory = tmp_path_factory.mktemp("sandbox")
    sites = [SiteOption("hpc1"), SiteOption("hpc2", "firecrest")]
    with Sandbox(directory, sites, FAST) as box:
        yield box


@pytest.fixture
def faulty(sandbox: Sandbox) -> Iterator[Sandbox]:
    yield sandbox
    sandbox.faults.clear()


def wait_for(condition: Callable[[], T], deadline: float = 600.0) -> T:
    return until(condition, "what has to come", deadline)


class RestClient:
    """Plain HTTP to one site of a sandbox, with its credentials."""

    def __init__(self, box: Sandbox, name: str = "hpc1") -> None:
        self.url = box.url(name)
        self.http = httpx.Client(
            auth=box.credentials(name), headers={"Accept": "application/json"}, timeout=600
        )

    def submit(self, description: dict[str, Any]) -> str:
        answer = self.http.post(f"{self.url}/jobs", json=description)
        assert answer.status_code == 201, answer.text
        return answer.headers["Location"]

    def job(self, url: str, **params: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.http.get(url, params=params).json()
        return shown

    def ended(self, url: str) -> dict[str, Any]:
        wait_for(lambda: self.job(url, fields="status")["status"] in ("SUCCESSFUL", "FAILED"))
        return self.job(url)

    def text(self, job: str, name: str) -> str:
        answer = self.http.get(
            f"{self.url}/storages/{job.rpartition('/')[2]}-uspace/files/{name}",
            headers={"Accept": "application/octet-stream"},
        )
        assert answer.status_code == 200, answer.text
        return answer.text


@pytest.fixture
def rest(sandbox: Sandbox) -> Iterator[RestClient]:
    client = RestClient(sandbox)
    with client.http:
        yield client


class FirecrestClient:
    """Plain HTTP to one firecREST site of a sandbox, with a token of it."""

    def __init__(self, box: Sandbox, name: str = "hpc2") -> None:
        site = box.site(name)
        assert isinstance(site, FirecrestServer)
        self.site = site
        self.box = box
        self.home = str(site.home)
        self.machine = site.machine
        self.http = httpx.Client(
            base_url=site.url, headers={"Authorization": f"Bearer {self.token()}"}, timeout=600
        )

    def token(self, lifetime: float | None = None) -> str:
        return self.box.call(lambda: self.site.tokens.issue(lifetime))

    def ops(self, method: str, name: str, **more: Any) -> httpx.Response:
        return self.http.request(method, f"/filesystem/{self.machine}/ops/{name}", **more)

    def upload(self, directory: str, name: str, content: bytes) -> httpx.Response:
        files = {"file": (name, content)}
        return self.ops("POST", "upload", params={"path": directory}, files=files)

    def refused_upload(self, directory: str, name: str) -> httpx.Response:
        """What the shell says of an upload that cannot be.

        The channel may be closed before it says anything: then another one is tried.
        """
        while "Channel" in (answer := self.upload(directory, name, b"1")).text:
            self.wait_for_the_end_of_the_connection()
        return answer

    def wait_for_the_end_of_the_connection(self) -> None:
        """The server closes it soon after what it did not expect; until then it breaks requests."""
        wait_for(lambda: self.box.call(lambda: not Protocol.doomed))

    def directory(self, name: str) -> str:
        path = f"{self.home}/{name}"
        assert self.ops("POST", "mkdir", json={"path": path, "parent": True}).status_code == 201
        return path

    def post_job(self, script: str, **more: Any) -> httpx.Response:
        job = {"workingDirectory": self.home, "script": script, **more}
        return self.http.post(f"/compute/{self.machine}/jobs", json={"job": job})

    def submit(self, body: str, *options: str, **more: Any) -> str:
        """Submit a bash script with these `#SBATCH` options and return the job's id."""
        lines = "".join(f"#SBATCH {option}\n" for option in options)
        answer = self.post_job(f"#!/bin/bash\n{lines}{body}\n", **more)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["jobId"])

    def job(self, number: str) -> dict[str, Any]:
        answer = self.http.get(f"/compute/{self.machine}/jobs/{number}")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()["jobs"][0]
        return shown

    def jobs(self, **params: str) -> dict[str, dict[str, Any]]:
        answer = self.http.get(f"/compute/{self.machine}/jobs", params=params)
        assert answer.status_code == 200, answer.text
        return {job["jobId"]: job for job in answer.json()["jobs"]}

    def ended(self, number: str) -> dict[str, Any]:
        """The job's whole record, once it has ended."""

        def whole() -> dict[str, Any] | None:
            shown = self.job(number)
            state = shown["status"]["state"]
            over = state not in ("PENDING", "RUNNING") and shown["name"] != "allocation"
            return shown if over else None

        found = wait_for(whole)
        assert found is not None
        return found


@pytest.fixture
def fire(sandbox: Sandbox) -> Iterator[FirecrestClient]:
    client = FirecrestClient(sandbox)
    with client.http:
        yield client


@pytest.fixture
def there(fire: FirecrestClient, tmp_path: Path) -> str:
    return fire.directory(tmp_path.name)


def firecrest_site(directory: Path, **settings: Any) -> Iterator[FirecrestClient]:
    """A client of a firecREST site with settings of its own."""
    own = replace(FAST.firecrest, **settings)
    sites = [SiteOption("hpc2", "firecrest")]
    with Sandbox(directory, sites, replace(FAST, firecrest=own)) as box:
        client = FirecrestClient(box)
        with client.http:
            yield client


@pytest.fixture
def own_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FirecrestClient]:
    """Like `fire`, a site for one test; the parameter is its settings."""
    yield from firecrest_site(tmp_path, **request.param)


def message(answer: httpx.Response, status: int) -> str:
    """The message of firecREST's error, whose body has the form of all its errors."""
    body = answer.json()
    assert answer.status_code == status, body
    assert list(body) == ["errorType", "message", "causedBy", "data", "user"]
    assert body["errorType"] == ("validation" if body["data"] else "error")
    return str(body["message"])


def raw_job(script: str, *options: str, **more: Any) -> dict[str, Any]:
    """The description of a RAW job that runs a bash script with these `#SBATCH` options."""
    lines = ["#!/bin/bash", "#SBATCH --output=stdout", "#SBATCH --error=stderr"]
    lines += [f"#SBATCH {option}" for option in options]
    return {
        "Job type": "RAW",
        "BSS file": "bss.sh",
        "Executable": "/bin/bash",
        "Arguments": ["job.sh"],
        "Imports": [
            {"From": "inline://dummy", "To": "bss.sh", "Data": "\n".join(lines) + "\n"},
            {"From": "inline://dummy", "To": "job.sh", "Data": script},
        ],
        **more,
    }


@contextmanager
def held_workers(box: Sandbox) -> Iterator[None]:
    """Let `hpc1`, of UNICORE, bring no files of jobs, and afterwards those of one job at a time."""
    site = box.site("hpc1")
    assert isinstance(site, UnicoreServer)
    one_at_a_time = box.call(lambda: asyncio.Semaphore(0))
    site.workers = one_at_a_time
    yield
    box.call(one_at_a_time.release)
