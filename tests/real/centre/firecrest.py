"""A real firecREST v2 in front of the centre's Slurm, with all that it needs around it."""

import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import httpx

from snakemake_executor_plugin_mantik.sites.http import MALFORMED
from tests.real.centre import SERVERS, USER, Centre
from tests.real.centre.issuer import Issuer
from tests.real.centre.objects import object_store
from tests.real.centre.sshd import MAX_SESSIONS, login_node
from tests.real.centre.sshd import lacking as sshd_lacking
from tests.support.daemons import Daemon
from tests.support.ports import free_port
from tests.support.shared import Told
from tests.support.workflows import Place

SOFTWARE = "firecREST"
"""What the marks `software` call it."""
PYTHON = Path(__file__).parents[3] / ".cache" / "real" / "firecrest" / "bin" / "python"
"""Of the environment that tests/real/install makes for it."""
SYSTEM = "centre"
"""The name of its system."""
CLIENT, SECRET = "a-client", "a-secret-that-stays-here"
"""What the user's client calls itself at the issuer."""
PROBE, PROBE_SECRET = "a-health-check", "its-secret"
CONFIGURATION, LOG, LOGIN_NODE = "config.yaml", "console.log", "login"
"""Names in the directory of a server."""
_REQUEST = re.compile(r'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/')
START_S = 600.0
"""How long the server may take until it answers, seconds."""

CONFIG = """\
Firecrest:
  ApiUrl: {url}
  TokenUrl: {token_url}
  Machine: {system}
Resources:
  Queue: batch
Site:
  Poll: 15s
"""


@dataclass(frozen=True)
class Firecrest:
    """A firecREST server, as its clients must know it.

    Attributes:
        directory: of the centre whose login node it commands.
        url: base of its API.
        token_url: where its issuer gives tokens to the client `CLIENT`.
    """

    directory: Path
    url: str
    token_url: str

    def client(self, timeout_s: float = 100) -> httpx.Client:
        form = {"grant_type": "client_credentials", "client_id": CLIENT, "client_secret": SECRET}
        token = httpx.post(self.token_url, data=form, trust_env=False).json()["access_token"]
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=timeout_s,
            trust_env=False,
        )  # fmt: skip

    def place(self) -> Place:
        return Place(
            "fire",
            CONFIG.format(url=self.url, token_url=self.token_url, system=SYSTEM),
            {"MANTIK_FIRECREST_CLIENT_ID": CLIENT, "MANTIK_FIRECREST_CLIENT_SECRET": SECRET},
            Centre(self.directory).scratch / USER,
            self.directory,
        )

    @contextmanager
    def twin(self, *, stores: bool = True) -> Iterator["OwnFirecrest"]:
        """Run another server, with a login node of its own in front of the same Slurm.

        Without `stores` it knows no object store.
        """
        settings = json.loads((self.directory / "firecrest" / CONFIGURATION).read_text())
        if not stores:
            cluster = settings["clusters"][0]
            del cluster["data_operation"]["data_transfer"], cluster["probing"]["services"]["s3"]
        place = Path(tempfile.mkdtemp(prefix="firecrest-", dir=self.directory))
        place.chmod(0o755)
        with _running(Centre(self.directory), place, settings, self.token_url) as server:
            yield server

    def to_json(self) -> Told:
        known = {"directory": self.directory, "url": self.url, "token_url": self.token_url}
        return {name: str(value) for name, value in known.items()}

    @classmethod
    def from_json(cls, told: Told) -> Self:
        return cls(Path(told["directory"]), told["url"], told["token_url"])


@dataclass(frozen=True)
class OwnFirecrest(Firecrest):
    """A server of this process, which may stop, kill and start it.

    Attributes:
        files: holds its configuration, its log and what belongs to its login node.
    """

    files: Path

    def program(self, name: str, script: str) -> None:
        """Put a program on its login node before the one of the same name; bash runs `script`."""
        path = self.files / LOGIN_NODE / "bin" / name
        path.with_suffix(".new").write_text(f"#!/bin/bash\n{script}\n")
        path.with_suffix(".new").chmod(0o755)
        path.with_suffix(".new").rename(path)

    @cached_property
    def _daemon(self) -> Daemon:
        port = self.url.rpartition(":")[2]
        return Daemon(
            [str(PYTHON), "-m", "uvicorn", "firecrest.main:app", "--port", port],
            SERVERS / "firecrest-v2" / "src",
            self.files / LOG,
            # The project files may belong to somebody else.
            {**os.environ, "YAML_CONFIG_FILE": str(self.files / CONFIGURATION),
             "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip

    def start(self) -> None:
        """Start it, again or for the first time, and wait until it finds all services healthy."""
        self._daemon.start()
        deadline = time.monotonic() + START_S
        while self._daemon.runs and time.monotonic() < deadline:
            if self._is_healthy():
                return
            time.sleep(0.1)
        raise RuntimeError(
            f"firecREST does not answer:\n{self._daemon.console.read_text()[-4000:]}"
        )

    def stop(self) -> None:
        self._daemon.stop()

    def kill(self) -> None:
        """Kill it with -9; the commands that it has started go on."""
        self._daemon.kill()

    def _is_healthy(self) -> bool:
        with suppress(httpx.TransportError, *MALFORMED), self.client(5) as client:
            (system,) = client.get("/status/systems").json()["systems"]
            return all(service["healthy"] for service in system["servicesHealth"])
        return False


@contextmanager
def firecrest(centre: Centre) -> Iterator[Firecrest]:
    """Run a server with a login node, an issuer and an object store."""
    home = centre.scratch / USER
    home.mkdir()
    shutil.chown(home, USER, USER)
    issuer = Issuer({(CLIENT, SECRET): USER, (PROBE, PROBE_SECRET): USER})
    place = centre.directory / "firecrest"
    place.mkdir()
    with issuer.running(), object_store() as store:
        settings = _settings(centre, issuer, store)
        # So many tests at a time share what each of their users would have.
        with _running(centre, place, settings, issuer.token_url, 12 * MAX_SESSIONS) as server:
            yield server


@contextmanager
def _running(
    centre: Centre, place: Path, settings: dict[str, Any], token_url: str,
    sessions: int = MAX_SESSIONS,
) -> Iterator[OwnFirecrest]:  # fmt: skip
    """Run a server with a new login node, which is entered into its `settings`."""
    with login_node(centre, place / LOGIN_NODE, sessions) as node:
        settings["clusters"][0]["ssh"]["port"] = node.port
        settings["ssh_credentials"]["keys"] = {USER: {"private_key": f"secret_file:{node.key}"}}
        (place / CONFIGURATION).write_text(json.dumps(settings))
        url = f"http://127.0.0.1:{free_port()}"
        server = OwnFirecrest(centre.directory, url, token_url, place)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def requests(log: Path) -> "Counter[str]":
    """Count the requests in the log of a server by method and path below its system."""
    asked: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        if (found := _REQUEST.search(line)) is not None:
            path = found["path"].partition("?")[0].split(f"/{SYSTEM}/")[-1]
            asked[f"{found['method']} {'jobs/ID' if path.startswith('jobs/') else path}"] += 1
    return asked


def lacking() -> list[str]:
    return [*sshd_lacking(), *([] if PYTHON.exists() else ["firecREST's environment"])]


def version() -> str:
    """What it is; its project files tell no number."""
    return "firecREST v2, from its sources"


def _settings(centre: Centre, issuer: Issuer, store: str) -> dict[str, Any]:
    """The server's configuration without its login node; limits and waits are its own defaults."""
    scratch = {"path": str(centre.scratch), "data_type": "scratch", "default_work_dir": True}
    cluster = {
        "name": SYSTEM,
        "ssh": {
            "host": "127.0.0.1", "max_clients": 100,
            "timeout": {"connection": 5, "login": 5, "command_execution": 5,
                        "idle_timeout": 60, "keep_alive": 5},
        },
        "scheduler": {
            "type": "slurm", "version": "22.05.8", "timeout": 10, "connection_mode": "ssh",
        },
        "service_account": {"client_id": PROBE, "secret": PROBE_SECRET},
        "probing": {
            "interval_check": 120,
            "services": {
                kind: {"timeout": 20} for kind in ("ssh", "filesystem", "scheduler", "s3")
            },
        },
        "file_systems": [scratch],
        "data_operation": {
            "max_ops_file_size": 5 << 20,
            "datatransfer_jobs_directives": [
                "#SBATCH --nodes=1", "#SBATCH --time=0-00:15:00", "#SBATCH --account={account}",
            ],
            "data_transfer": {
                "service_type": "s3", "name": "objects", "private_url": store,
                "public_url": store, "access_key_id": "a-key", "secret_access_key": "its-secret",
                "region": "us-east-1", "ttl": 604800,
                "multipart": {"use_split": False, "max_part_size": 100 << 20, "parallel_runs": 3,
                              "tmp_folder": "tmp"},
            },
        },
    }  # fmt: skip
    return {
        "apis_root_path": "",
        "doc_servers": [],
        "auth": {
            "authentication": {
                "scopes": {},
                "tokenUrl": issuer.token_url,
                "tokenEndpointAuthMethod": "client_secret_post",
                "publicCerts": [issuer.certificates_url],
                "usernameClaim": "preferred_username",
            }
        },
        "ssh_credentials": {"type": "SSHStaticKeys"},
        "clusters": [cluster],
    }
