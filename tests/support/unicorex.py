"""A real UNICORE/X server on loopback, for tests: users, roles, queues, two storages.

It runs in embedded mode: jobs are processes of the server's own user, started at once as far as
there is room. Whoever aborts one is told that it ended, but it runs on. Its jars
come through Maven into `.cache/unicorex` of the checkout, once. All pytest workers share one server
(2 s to start, 220 MB). Without Java or Maven the tests are skipped, in CI they fail.
"""

import fcntl
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import httpx
import pytest

from tests.real import apptainer
from tests.support.needs import require
from tests.support.ports import free_port
from tests.support.shared import STOP_S, Told, keep, session_directory, shared

DATA = Path(__file__).parent / "unicorex"
CACHE = Path(__file__).parents[2] / ".cache" / "unicorex"

SOFTWARE = "UNICORE/X"
"""What the marks `software` call it."""

USER = "demo"
PASSWORD = "pässwörd:1"
"""Not ASCII, with a colon: both are allowed in a password and break naive clients."""
KEY_USER = "keyuser"

FETCH_S = 300.0
"""How long Maven may take to bring the jars, seconds."""
START_S = 180.0
"""How long the server may take until it answers, seconds."""

SLOTS = 16
"""How many jobs run at the same time on the server that tests share; others wait in turn."""
OWN_SLOTS = 3
"""How many jobs run at the same time on a server of a test's own; others wait in its memory."""

_SALT = "salt"
_STORE_PASSWORD = "the12345"
_JARS_DONE = ".complete"


@dataclass(frozen=True)
class UnicoreX:
    """A server that runs.

    Attributes:
        directory: holds all of its files; `scratch` and `work` are its storages.
        url: base of its REST API.
        ca_file: the certificate that its clients must trust.
        key_file: private SSH key of the user KEY_USER.
    """

    directory: Path
    port: int

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/rest/core"

    @property
    def ca_file(self) -> Path:
        return self.directory / "server.pem"

    @property
    def key_file(self) -> Path:
        return self.directory / "id_key"

    def client(self) -> httpx.Client:
        """A client with the user's credentials."""
        return httpx.Client(
            verify=ssl.create_default_context(cafile=str(self.ca_file)),
            auth=(USER.encode(), PASSWORD.encode()), timeout=100, trust_env=False,
            headers={"Accept": "application/json"},
        )  # fmt: skip

    def ask(self, path: str, method: str = "GET", **more: Any) -> httpx.Response:
        """The answer to a request of the user's; `more` as for httpx."""
        with self.client() as client:
            return client.request(method, f"{self.url}/{path}", **more)

    def status(self, job: str) -> str:
        """What the server says of a job; empty if it knows none such."""
        answer = self.ask(f"jobs/{job}", params={"fields": "status"})
        return str(answer.json()["status"]) if answer.status_code == httpx.codes.OK else ""


@dataclass(frozen=True)
class OwnUnicoreX(UnicoreX):
    """A server of one test, which may stop, kill and start it."""

    processes: list["subprocess.Popen[bytes]"]
    """The latest is the server."""

    def start(self) -> None:
        """Start it, again or for the first time, and wait until it answers."""
        with (self.directory / "console.log").open("ab") as console:
            process = subprocess.Popen(
                _command(), cwd=self.directory, stdin=subprocess.DEVNULL, stdout=console,
                stderr=console,
            )  # fmt: skip
        self.processes.append(process)
        _wait_until_it_answers(self, process)

    def stop(self) -> None:
        """End it."""
        process = self.processes[-1]
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it with -9; jobs that it has started go on."""
        self.processes[-1].kill()
        self.processes[-1].wait()


def _start_shared(directory: Path, users: Path, slots: int = SLOTS) -> Told:
    server = UnicoreX(directory, free_port())
    command = _command()
    _write_configuration(server, slots)
    environment = {**os.environ, **apptainer.environment()}
    console = directory / "console.log"
    keeper = keep(users, command, directory=directory, console=console, env=environment)
    _wait_until_it_answers(server, keeper)
    return {"directory": str(directory), "port": server.port}


@pytest.fixture(scope="session")
def unicorex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnicoreX]:
    """The session's UNICORE/X server; tests keep apart by workspaces of their own."""
    require(_lacking(), SOFTWARE)
    with shared(session_directory(tmp_path_factory) / "unicorex", _start_shared) as told:
        yield UnicoreX(Path(told["directory"]), told["port"])


@pytest.fixture(scope="session")
def narrow_unicorex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnicoreX]:
    """Another one, which runs one job at a time: the next ones wait."""
    require(_lacking(), SOFTWARE)
    start = partial(_start_shared, slots=1)
    with shared(session_directory(tmp_path_factory) / "narrow-unicorex", start) as told:
        yield UnicoreX(Path(told["directory"]), told["port"])


@contextmanager
def own_unicorex(directory: Path, slots: int) -> Iterator[OwnUnicoreX]:
    """A server of one test, in a new directory."""
    require(_lacking(), SOFTWARE)
    directory.mkdir()
    server = OwnUnicoreX(directory, free_port(), [])
    _write_configuration(server, slots)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def unicorex_to_stop(tmp_path: Path) -> Iterator[OwnUnicoreX]:
    """A server for one test that stops it."""
    with own_unicorex(tmp_path / "unicorex", OWN_SLOTS) as server:
        yield server


def version() -> str:
    """The release of the server's main part, as its jar is called."""
    return ", ".join(jar.stem for jar in CACHE.glob("*/uas-core-*.jar"))


def _lacking() -> list[str]:
    """The programs that are not installed."""
    return [tool for tool in ("java", "keytool", "mvn", "ssh-keygen") if not shutil.which(tool)]


def _jars() -> Path:
    """The directory of the server's jars, brought by Maven when the pom is new."""
    pom = DATA / "pom.xml"
    jars = CACHE / hashlib.sha256(pom.read_bytes()).hexdigest()[:12]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (jars / _JARS_DONE).exists():
            return jars
        subprocess.run(
            [
                "mvn",
                "--batch-mode",
                "--quiet",
                "--file",
                str(pom),
                "dependency:copy-dependencies",
                f"-DoutputDirectory={jars}",
                "-DincludeScope=runtime",
            ],
            check=True,
            timeout=FETCH_S,
        )
        (jars / _JARS_DONE).touch()
    return jars


def _command() -> Sequence[str]:
    return (
        "java", "-Xmx512m", "-Dlog4j.configurationFile=file:log4j.xml", "-cp", f"{_jars()}/*",
        "eu.unicore.uas.UAS", "main.config",
    )  # fmt: skip


def _write_configuration(server: UnicoreX, slots: int) -> None:
    directory = server.directory
    for name in ("scratch", "work", "jobs", "data"):
        (directory / name).mkdir()
    for name in ("idb.json", "log4j.xml"):
        shutil.copy(DATA / name, directory)
    (directory / "main.config").write_text(
        Template((DATA / "main.config").read_text()).substitute(
            PORT=server.port, DIRECTORY=directory, STORE_PASSWORD=_STORE_PASSWORD, SLOTS=slots
        )
    )
    digest = hashlib.md5((_SALT + PASSWORD).encode()).hexdigest()
    (directory / "users.txt").write_text(f"{USER}:{digest}:{_SALT}:CN={USER}\n")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / "id_key"], check=True
    )
    public = (directory / "id_key.pub").read_text().strip()
    (directory / "ssh-users.txt").write_text(f"{KEY_USER}:{public}:CN={KEY_USER}\n")
    role = {"role": "user", "xlogin": ["root"], "group": ["root"]}
    (directory / "roles.json").write_text(
        json.dumps({f"CN={user}": role for user in (USER, KEY_USER)})
    )
    _make_certificate(directory)


def _make_certificate(directory: Path) -> None:
    store = ["-keystore", "server.p12", "-storetype", "PKCS12", "-storepass", _STORE_PASSWORD]
    for words in (
        "-genkeypair -alias server -keyalg RSA -keysize 2048 -dname CN=localhost -validity 30 "
        "-ext SAN=dns:localhost,ip:127.0.0.1 -ext BasicConstraints:critical=ca:true",
        "-exportcert -alias server -rfc -file server.pem",
    ):
        subprocess.run(
            ["keytool", *words.split(), *store],
            cwd=directory,
            check=True,
            capture_output=True,
            timeout=START_S,
        )


def _wait_until_it_answers(server: UnicoreX, process: "subprocess.Popen[bytes]") -> None:
    """Wait until a server takes jobs; it answers some seconds before it knows where to run them."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError, ValueError, KeyError):
            if server.ask("factories").json()["factories"]:
                return
        time.sleep(0.1)
    log = (server.directory / "console.log").read_text(errors="replace")
    raise RuntimeError(f"UNICORE/X does not answer at {server.url}; it said:\n{log[-4000:]}")
