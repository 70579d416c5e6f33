"""The sandbox answers in the words of the real servers: the same requests, the same errors.

The product tells errors apart by these words: `ERROR_TEXTS` of both APIs, and UNICORE's
`STATUS_TEXTS`.
"""

import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.server import Sandbox
from tests.real.centre import USER, Centre, firecrest
from tests.real.centre.firecrest import Firecrest
from tests.real.centre.tsi import Unicore
from tests.support.sandbox import FirecrestClient, RestClient, raw_job, wait_for
from tests.support.unicoreserver import UnicoreX

OCTETS = {"Content-Type": "application/octet-stream"}
DOWNLOAD = {"Accept": "application/octet-stream"}
MIB = 1 << 20


@dataclass(frozen=True)
class Server:
    """One of the two servers that are compared.

    Attributes:
        http: a client of its user; relative URLs are below the API's.
        directory: a directory of this test's own, as the user's jobs see it.
        own: texts that are its own, and what stands for them.
    """

    http: httpx.Client
    directory: Path
    own: Mapping[str, str]

    def plain(self, text: str) -> str:
        """A text without what is this server's own."""
        for word, stands in self.own.items():
            text = text.replace(word, stands)
        text = re.sub(r"bss_submit_\w+", "SUBMIT", text)
        text = re.sub(r"at index \d+", "at INDEX", text)
        return re.sub(r"job id \d+|[Tt]erminating job \d+", "JOB", text)


Act = Callable[[Server], httpx.Response]


# --- UNICORE -------------------------------------------------------------------------------------


@pytest.fixture
def unicore_sandbox(sandbox: Sandbox) -> Iterator[Server]:
    client = RestClient(sandbox)
    with client.http:
        home = str(sandbox.directory / "hpc1" / "home")
        yield _unicore(client.http, client.url, sandbox.credentials("hpc1")[0], home)


@pytest.fixture
def real_unicore(tsi_unicorex: UnicoreX) -> Iterator[Server]:
    with tsi_unicorex.client() as http:
        yield _unicore(http, tsi_unicorex.url, USER, str(Path(f"~{USER}").expanduser()))


def _unicore(http: httpx.Client, url: str, user: str, home: str) -> Server:
    name = str(uuid.uuid4())
    http.base_url = httpx.URL(url)
    mount = Path(http.get("/storages/SCRATCH").json()["mountPoint"])
    assert http.post(f"/storages/SCRATCH/files/{name}").status_code == 201
    own = {
        f"/{name}": "/NAME",
        name: "NAME",
        str(mount): "MOUNT",
        home: "/HOME",
        url: "URL",
        user: "USER",
    }
    return Server(http, mount / name, {str(mount / name): "DIR", **own})


def _files(server: Server, path: str) -> str:
    return f"/storages/SCRATCH/files/{server.directory.name}/{path}"


def put(path: str, content: bytes = b"1") -> Act:
    return lambda s: s.http.put(_files(s, path), content=content, headers=OCTETS)


def ask(method: str, path: str, **more: Any) -> Act:
    return lambda s: s.http.request(method, _files(s, path), **more)


def on_full_disk(server: Server) -> httpx.Response:
    (server.directory / "full").symlink_to("/dev/full")
    return put("full", b"1" * 100)(server)


FILE_REQUESTS: Mapping[str, Act] = {
    "mkdir over a file": ask("POST", "file"),
    "mkdir below a file": ask("POST", "file/below"),
    "mkdir over a directory": ask("POST", "d"),
    "mkdir with a blank": ask("POST", "a%20b"),
    "mkdir with brackets": ask("POST", "x%5B1%5D"),
    "upload over a directory": put("d"),
    "upload below a file": put("file/below"),
    "upload to a full disk": on_full_disk,
    "upload of nothing": put("empty", b""),
    "upload of a percent sign": put("a%25b"),
    "upload with a variable": put("$HOME/x"),
    "listing of what is missing": ask("GET", "nothing"),
    "listing below what is missing": ask("GET", "nothing/below"),
    "download of what is missing": ask("GET", "nothing", headers=DOWNLOAD),
    "download of a directory": ask("GET", "d", headers=DOWNLOAD),
    "download from behind the end": ask("GET", "file", headers={**DOWNLOAD, "Range": "bytes=1-"}),
    "permissions of what is missing": ask("PUT", "nothing", json={"unixPermissions": "rw-------"}),
    "permissions that are none": ask("PUT", "file", json={"unixPermissions": "0600"}),
    "removal of what is missing": ask("DELETE", "nothing"),
    "removal below a file": ask("DELETE", "file/below"),
    "rename of what is missing": lambda s: s.http.post(
        "/storages/SCRATCH/actions/rename",
        json={"from": f"/{s.directory.name}/nothing", "to": f"/{s.directory.name}/x"},
    ),
    "a job that is not there": lambda s: s.http.get("/jobs/nothing"),
    "a job that is no JSON": lambda s: s.http.post(
        "/jobs", content=b"{", headers={"Content-Type": "application/json"}
    ),
}  # fmt: skip


def told(server: Server, answer: httpx.Response) -> tuple[int, str]:
    """Status and error text of an answer."""
    if answer.content and answer.headers["content-type"].startswith("application/json"):
        body = answer.json()
        text = body.get("errorMessage") or body.get("message") or str(body.get("permissions", ""))
        text += str(body.get("causedBy") or "")
    else:
        text = answer.text
    return answer.status_code, server.plain(text)


@pytest.mark.parametrize("name", FILE_REQUESTS)
def test_files_at_unicore(unicore_sandbox: Server, real_unicore: Server, name: str) -> None:
    found = []
    for server in (unicore_sandbox, real_unicore):
        for prepare in (put("file"), ask("POST", "d")):
            assert prepare(server).is_success
        found.append(told(server, FILE_REQUESTS[name](server)))
    if "no JSON" in name:  # whose parser says where, in its own way
        found = [(status, text.partition("JSONException")[0]) for status, text in found]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "request_of", [put("closed/y"), ask("POST", "closed/x"), ask("DELETE", "closed/x")]
)
def test_what_unicore_denies(
    faulty: Sandbox, unicore_sandbox: Server, real_unicore: Server, request_of: Act
) -> None:
    """Root made a directory at the real one; for who runs the sandbox nothing may be closed."""
    for server in (unicore_sandbox, real_unicore):
        closed = server.directory / "closed"
        closed.mkdir(mode=0o700)
        (closed / "x").mkdir()
    faulty.faults.add(Fault("fail_command", path="/closed/", message="Permission denied"))
    status, text = told(unicore_sandbox, request_of(unicore_sandbox))
    real_status, real_text = told(real_unicore, request_of(real_unicore))
    assert status == real_status == 500
    # Which of the directories is denied is not looked at, nor when in an upload.
    cause = "Permission denied"
    assert cause in text
    assert cause in real_text
    assert text.partition(":")[0] == real_text.partition(":")[0]
    assert ("Command failed" in text) == ("Command failed" in real_text)


REFUSED_JOBS = {
    "partition": raw_job("true", "--partition=nowhere"),
    "account": raw_job("true", "--account=nobody"),
    "memory": raw_job("true", "--mem=900G"),
    "queue": raw_job("true", Resources={"Queue": "nowhere"}),
    "unit": raw_job("true", Resources={"MemoryPerNode": "1.5G"}),
}


@pytest.mark.nightly
def test_jobs_that_unicore_refuses(unicore_sandbox: Server, real_unicore: Server) -> None:
    """All at once: the real one tries each four times in half a minute."""
    found = []
    for server in (unicore_sandbox, real_unicore):
        urls = {
            name: server.http.post("/jobs", json=job).headers["Location"]
            for name, job in REFUSED_JOBS.items()
        }
        found.append({name: _refusal(server, url) for name, url in urls.items()})
    assert found[0] == found[1]


def _refusal(server: Server, url: str) -> tuple[str, str]:
    wait_for(lambda: server.http.get(url).json()["status"] == "FAILED", 200)
    job = server.http.get(url).json()
    last = [line for line in job["log"] if "Could not submit job" in line]
    logged = server.plain(last[-1]).partition(": ")[2] if last else ""
    return server.plain(job["statusMessage"]), logged


@pytest.mark.nightly
def test_what_unicore_says_without_its_tsi(
    own_unicore: Unicore, sandbox: Sandbox, unicore_sandbox: Server
) -> None:
    home = str(Path(f"~{USER}").expanduser())
    with own_unicore.server.client() as http:
        real = _unicore(http, own_unicore.server.url, USER, home)
        own_unicore.tsi.kill()
        said = _without_tsi(real)
    with sandbox.tsi_down("hpc1"):
        assert _without_tsi(unicore_sandbox) == said


def _without_tsi(server: Server) -> list[tuple[int, str] | str]:
    """What is said of files and of a job while the TSI is away."""
    wait_for(lambda: "Unavailable" in ask("GET", "x")(server).text)
    requests = (ask("GET", "x"), ask("GET", "x", headers=DOWNLOAD), put("x"), ask("POST", "x"),
                ask("DELETE", "x"))  # fmt: skip
    url = server.http.post("/jobs", json=raw_job("true")).headers["Location"]
    wait_for(lambda: server.http.get(url).json()["status"] == "FAILED")
    job = server.http.get(url).json()
    logged = [line.partition(": ")[2] for line in job["log"] if "Problem creating" in line]
    return [*(told(server, act(server)) for act in requests), job["statusMessage"], *logged]


# --- firecREST -----------------------------------------------------------------------------------


@pytest.fixture
def firecrest_sandbox(fire: FirecrestClient) -> Server:
    return _firecrest(fire.http, fire.machine, Path(fire.home), "mantik")


@pytest.fixture
def firecrest_real(real_firecrest: Firecrest, centre: Centre) -> Iterator[Server]:
    with real_firecrest.client() as http:
        yield _firecrest(http, firecrest.SYSTEM, centre.scratch / USER, USER)


def _firecrest(http: httpx.Client, system: str, home: Path, user: str) -> Server:
    directory = home / str(uuid.uuid4())
    body = {"path": str(directory), "parent": True}
    assert http.post(f"/filesystem/{system}/ops/mkdir", json=body).status_code == 201
    return Server(http, directory, {str(directory): "DIR", str(home): "HOME", f"/{system}": "/SYS",
                                    f"({system})": "(SYS)", user: "USER"})  # fmt: skip


def ops(method: str, name: str, path: str, **more: Any) -> Act:
    """A request for a command on a file; a `path` with `/` at its start is taken as it is."""

    def act(server: Server) -> httpx.Response:
        full = path if path.startswith(("/", "relative")) else f"{server.directory}/{path}"
        url = f"/filesystem/{_system(server)}/ops/{name}"
        if "json" in more:
            return server.http.request(method, url, json={"path": full, **more["json"]})
        return server.http.request(method, url, params={"path": full}, **more)

    return act


def _system(server: Server) -> str:
    (found,) = (word[1:] for word, stands in server.own.items() if stands == "/SYS")
    return found


def upload(path: str, name: str, content: bytes) -> Act:
    return ops("POST", "upload", path, files={"file": (name, content)})


def jobs(method: str, path: str = "", **more: Any) -> Act:
    return lambda s: s.http.request(method, f"/compute/{_system(s)}/jobs{path}", **more)


def submit(*options: str, script: str | None = None) -> Act:
    lines = "".join(f"#SBATCH {option}\n" for option in options)
    text = script if script is not None else f"#!/bin/bash\n{lines}true\n"

    def act(server: Server) -> httpx.Response:
        job = {"workingDirectory": str(server.directory), "script": text}
        return jobs("POST", json={"job": job})(server)

    return act


FIRECREST_REQUESTS: Mapping[str, Act] = {
    "mkdir over a file": ops("POST", "mkdir", "file", json={"parent": True}),
    "mkdir below a file": ops("POST", "mkdir", "file/below", json={"parent": True}),
    "mkdir over a directory": ops("POST", "mkdir", "d", json={"parent": False}),
    "mkdir below what is missing": ops("POST", "mkdir", "x/y", json={"parent": False}),
    "listing of what is missing": ops("GET", "ls", "nothing"),
    "stat of what is missing": ops("GET", "stat", "nothing"),
    "stat below a file": ops("GET", "stat", "file/below"),
    "checksum of what is missing": ops("GET", "checksum", "nothing"),
    "download of what is missing": ops("GET", "download", "nothing"),
    "download of a directory": ops("GET", "download", "d"),
    "the end of what is missing": ops("GET", "tail", "nothing"),
    "removal of what is missing": ops("DELETE", "rm", "nothing"),
    "mode of what is missing": ops("PUT", "chmod", "nothing", json={"mode": "600"}),
    "upload of too much": upload(".", "x", bytes(5 * MIB + 1)),
    "a path outside": ops("GET", "ls", "/etc"),
    "a relative path": ops("GET", "ls", "relative"),
    "an unknown job": jobs("GET", "/99999999"),
    "cancelling an unknown job": jobs("DELETE", "/99999999"),
    "an unknown partition": submit("--partition=nowhere"),
    "an unknown account": submit("--account=nobody"),
    "too much memory": submit("--mem=900G"),
    "no interpreter": submit(script="true\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRECREST_REQUESTS)
def test_requests_at_firecrest(
    firecrest_sandbox: Server, firecrest_real: Server, name: str
) -> None:
    found = []
    for server in (firecrest_sandbox, firecrest_real):
        assert upload(".", "file", b"1")(server).is_success
        assert ops("POST", "mkdir", "d", json={"parent": True})(server).is_success
        found.append(told(server, FIRECREST_REQUESTS[name](server)))
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [3_932_100, 3_932_160, 5_500_000])
def test_downloads_at_firecrest(
    firecrest_sandbox: Server, firecrest_real: Server, size: int
) -> None:
    found = []
    for server in (firecrest_sandbox, firecrest_real):
        _write(server, size)
        answer = ops("GET", "download", "file")(server)
        found.append((size, "") if answer.is_success else told(server, answer))
    assert found[0] == found[1]


CLOSED_CHANNEL = (500, "('Channel not open for sending',)")
FAILED = "Remote process failed with exit"
TOO_SLOW = (408, "Command execution timeout limit exceeded.")
RACES: Mapping[str, tuple[Act, set[tuple[int, str]]]] = {
    "download of too much": (ops("GET", "download", "large"), {CLOSED_CHANNEL, TOO_SLOW}),
    "upload of nothing": (
        upload(".", "empty", b""),
        {TOO_SLOW, (408, f"{FAILED} status:124")},
    ),
    "upload over a directory": (
        upload(".", "d", b"1"),
        {
            CLOSED_CHANNEL,
            (500, f"{FAILED} status:1 and error message:bash: line 1: DIR/./d: Is a directory"),
            (500, f"{FAILED} status:2 and error message:sh: 1: cannot create DIR/./d: "
                  "Is a directory"),  # where the user's shell is another one
        },
    ),
}  # fmt: skip
"""Where the server and a command end each other, and either may be first."""


@pytest.mark.parametrize("name", RACES)
def test_races_at_firecrest(firecrest_sandbox: Server, firecrest_real: Server, name: str) -> None:
    request_of, allowed = RACES[name]
    for server in (firecrest_sandbox, firecrest_real):
        _write(server, 5_600_000, "large")
        assert ops("POST", "mkdir", "d", json={"parent": True})(server).is_success
        assert told(server, request_of(server)) in allowed


def _write(server: Server, size: int, name: str = "file") -> None:
    """Make a file behind the server's back."""
    file = server.directory / name
    file.write_bytes(bytes(size))
    shutil.chown(file, server.directory.stat().st_uid)
