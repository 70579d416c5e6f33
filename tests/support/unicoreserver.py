"""What all UNICORE/X servers of the tests have in common, whatever runs their jobs.

A server's jars come through Maven into `.cache/unicorex` of the checkout, once. It listens on
loopback, has two users and the configuration of `unicorex/main.config`; the part that says where
jobs run is its mode's.
"""

import fcntl
import hashlib
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

import httpx

from tests.support.daemons import Daemon
from tests.support.shared import Told

DATA = Path(__file__).parent / "unicorex"
CACHE = Path(__file__).parents[2] / ".cache" / "unicorex"

USER = "demo"
PASSWORD = "pässwörd:1"
"""Not ASCII, with a colon: both are allowed in a password and break naive clients."""
KEY_USER = "keyuser"

FETCH_S = 600.0
"""How long Maven may take to bring the jars, seconds."""
START_S = 600.0
"""How long the server may take until it answers, seconds."""

_QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options of a JVM that lives for minutes: it starts with half the CPU, 4.6 instead of 8.8 s."""
_SALT = "salt"
_STORE_PASSWORD = "the12345"
_JARS_DONE = ".complete"


@dataclass(frozen=True)
class UnicoreX:
    """A server that runs.

    Attributes:
        directory: holds all of its files.
        port: what it listens at.
        scratch: the directory of its storage SCRATCH.
        url: base of its REST API.
        ca_file: the certificate that its clients must trust.
        key_file: private SSH key of the user KEY_USER.
    """

    directory: Path
    port: int
    scratch: Path

    @classmethod
    def from_json(cls, told: Told) -> "UnicoreX":
        return cls(Path(told["directory"]), told["port"], Path(told["scratch"]))

    def to_json(self) -> Told:
        paths = {"directory": str(self.directory), "scratch": str(self.scratch)}
        return {**paths, "port": self.port}

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
        return httpx.Client(
            verify=ssl.create_default_context(cafile=str(self.ca_file)),
            auth=(USER.encode(), PASSWORD.encode()), timeout=600, trust_env=False,
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
    """A server of this process, which may stop, kill and start it."""

    @cached_property
    def _daemon(self) -> Daemon:
        return Daemon(server_command(), self.directory, self.directory / "console.log")

    def start(self) -> None:
        """Start it, again or for the first time, and wait until it answers."""
        self._daemon.start()
        wait_until_it_answers(self, lambda: self._daemon.runs)

    def stop(self) -> None:
        self._daemon.stop()

    def kill(self) -> None:
        """Kill it with -9; jobs that it has started go on."""
        self._daemon.kill()


def version() -> str:
    """The release of the server's main part, as its jar is called."""
    return ", ".join(jar.stem for jar in CACHE.glob("*/uas-core-*.jar"))


def lacking() -> list[str]:
    tools = ("java", "openssl", "mvn", "ssh-keygen", "setpriv")
    return [tool for tool in tools if not shutil.which(tool)]


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


def server_command() -> Sequence[str]:
    """What starts a server in its directory."""
    return (
        "java", *_QUICK_START, "-Xmx512m", "-Dlog4j.configurationFile=file:log4j.xml",
        "-cp", f"{_jars()}/*", "eu.unicore.uas.UAS", "main.config",
    )  # fmt: skip


def write_configuration(server: UnicoreX, mode: str, idb: Path, login: str) -> None:
    """Write all files of a server into its directory.

    Args:
        server: the server.
        mode: the part of its configuration that says where jobs run and what storages there are.
        idb: the file that describes its queues.
        login: the login name that its users' jobs run as.
    """
    directory = server.directory
    (directory / "data").mkdir()
    shutil.copy(DATA / "log4j.xml", directory)
    shutil.copy(idb, directory / "idb.json")
    common = Template((DATA / "main.config").read_text())
    text = common.substitute(PORT=server.port, STORE_PASSWORD=_STORE_PASSWORD)
    (directory / "main.config").write_text(text + mode)
    digest = hashlib.md5((_SALT + PASSWORD).encode()).hexdigest()
    (directory / "users.txt").write_text(f"{USER}:{digest}:{_SALT}:CN={USER}\n")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / "id_key"], check=True
    )
    public = (directory / "id_key.pub").read_text().strip()
    (directory / "ssh-users.txt").write_text(f"{KEY_USER}:{public}:CN={KEY_USER}\n")
    role = {"role": "user", "xlogin": [login], "group": [login]}
    (directory / "roles.json").write_text(
        json.dumps({f"CN={user}": role for user in (USER, KEY_USER)})
    )
    _make_certificate(directory, f"/OU=port {server.port}/CN=localhost")


def trust(server: UnicoreX, other: UnicoreX) -> None:
    """Let a server accept another one's certificate, and what that one asks for its users.

    It must be started, or started again, afterwards.
    """
    configuration = server.directory / "main.config"
    lines = (
        f"container.security.truststore.directoryLocations.2={other.ca_file}",
        f"container.security.rest.jwt.trustedIssuerCert.1={other.ca_file}",
    )
    configuration.write_text("\n".join([configuration.read_text(), *lines, ""]))


def _make_certificate(directory: Path, name: str) -> None:
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.pem"]
    extensions = ("subjectAltName=DNS:localhost,IP:127.0.0.1", "basicConstraints=critical,CA:TRUE")
    added = [word for extension in extensions for word in ("-addext", extension)]
    store = ["-in", "server.pem", "-inkey", "server.key", "-out", "server.p12", "-name", "server"]
    password = ["-passout", f"pass:{_STORE_PASSWORD}"]
    for words in (
        ["req", "-x509", *key, "-days", "30", "-subj", name, *added],
        ["pkcs12", "-export", *store, *password],
    ):
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)


def wait_until_it_answers(server: UnicoreX, runs: Callable[[], bool]) -> None:
    """Wait until a server takes jobs; it answers some seconds before it knows where to run them.

    Args:
        server: the server.
        runs: tells whether its process is there still.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and runs():
        with suppress(httpx.TransportError, ValueError, KeyError):
            if server.ask("factories").json()["factories"]:
                return
        time.sleep(0.1)
    log = (server.directory / "console.log").read_text(errors="replace")
    raise RuntimeError(f"UNICORE/X does not answer at {server.url}; it said:\n{log[-4000:]}")
