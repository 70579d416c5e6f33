"""A real firecREST v2 in front of the centre's Slurm, with all that it needs around it."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.real.centre import SERVERS, USER, Centre
from tests.real.centre.issuer import Issuer
from tests.real.centre.objects import object_store
from tests.real.centre.sshd import LoginNode, login_node
from tests.real.centre.sshd import lacking as sshd_lacking
from tests.support.daemons import Daemon
from tests.support.ports import free_port
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

CONFIG = """\
Firecrest:
  ApiUrl: {url}
  TokenUrl: {token_url}
  Machine: {system}
Resources:
  Queue: batch
Site:
  PollMin: 1s
  Heartbeat: 10s
"""


@dataclass(frozen=True)
class Firecrest:
    """A firecREST server, as its clients must know it.

    Attributes:
        directory: the centre's.
        url: base of its API.
        token_url: where its issuer gives tokens to the client `CLIENT`.
    """

    directory: Path
    url: str
    token_url: str

    def client(self, timeout_s: float = 100) -> httpx.Client:
        """A client with a token of the user's."""
        form = {"grant_type": "client_credentials", "client_id": CLIENT, "client_secret": SECRET}
        token = httpx.post(self.token_url, data=form, trust_env=False).json()["access_token"]
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=timeout_s,
            trust_env=False,
        )  # fmt: skip

    @property
    def config(self) -> str:
        """A backend config for it."""
        return CONFIG.format(url=self.url, token_url=self.token_url, system=SYSTEM)

    def place(self) -> Place:
        """The site of whole workflows."""
        return Place(
            "fire",
            self.config,
            {"MANTIK_FIRECREST_CLIENT_ID": CLIENT, "MANTIK_FIRECREST_CLIENT_SECRET": SECRET},
            Centre(self.directory).scratch / USER,
            self.directory,
        )

    def told(self) -> dict[str, str]:
        """This as JSON has it."""
        return {name: str(value) for name, value in asdict(self).items()}


@contextmanager
def serve(centre: Centre) -> Iterator[Firecrest]:
    """Run a server with a login node, an issuer and an object store."""
    home = centre.scratch / USER
    home.mkdir()
    shutil.chown(home, USER, USER)
    issuer = Issuer({(CLIENT, SECRET): USER, (PROBE, PROBE_SECRET): USER})
    (centre.directory / "firecrest").mkdir()
    with issuer.running(), object_store() as store, login_node(centre) as node:
        settings = _settings(centre, issuer, store, node)
        _config_path(centre.directory).write_text(json.dumps(settings))
        server, daemon = own(centre.directory, issuer.token_url, "shared")
        with daemon:
            yield server


def own(directory: Path, token_url: str, name: str) -> tuple[Firecrest, Daemon]:
    """Another server in front of the same login node, which has not been started.

    Args:
        directory: of a centre whose servers run.
        token_url: of its issuer.
        name: of the server's log.
    """
    port = free_port()
    server = Firecrest(directory, f"http://127.0.0.1:{port}", token_url)
    daemon = Daemon(
        [PYTHON, "-m", "uvicorn", "firecrest.main:app", "--host", "127.0.0.1", "--port", str(port)],
        SERVERS / "firecrest-v2" / "src",
        directory / "firecrest" / f"{name}.log",
        # The sources may belong to somebody else.
        {
            **os.environ,
            "YAML_CONFIG_FILE": str(_config_path(directory)),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        answers=lambda: _is_healthy(server),
    )
    return server, daemon


def lacking() -> list[str]:
    """What the server needs and this machine does not have."""
    return [*sshd_lacking(), *([] if PYTHON.exists() else ["firecREST's environment"])]


def version() -> str:
    """What it is; its sources tell no number."""
    return "firecREST v2, from its sources"


def _config_path(directory: Path) -> Path:
    return directory / "firecrest" / "config.yaml"


def _is_healthy(server: Firecrest) -> bool:
    """Whether the server has found all that it depends on in order."""
    with (
        suppress(httpx.TransportError, KeyError, ValueError, TypeError),
        server.client(5) as client,
    ):
        (system,) = client.get("/status/systems").json()["systems"]
        return all(service["healthy"] for service in system["servicesHealth"])
    return False


def _settings(centre: Centre, issuer: Issuer, store: str, node: LoginNode) -> Mapping[str, Any]:
    """The server's configuration; limits and waits are its own defaults."""
    scratch = {"path": str(centre.scratch), "data_type": "scratch", "default_work_dir": True}
    cluster = {
        "name": SYSTEM,
        "ssh": {
            "host": "127.0.0.1", "port": node.port, "max_clients": 100,
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
        "ssh_credentials": {
            "type": "SSHStaticKeys",
            "keys": {USER: {"private_key": f"secret_file:{node.key}"}},
        },
        "clusters": [cluster],
    }
