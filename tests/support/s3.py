"""A local S3 server for tests of storage."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.daemons import Daemon
from tests.support.needs import require
from tests.support.ports import free_port
from tests.support.sandbox import wait_for

SOFTWARE = "S3"
"""What the marks `software` call a real S3 server."""
RCLONE = Path(__file__).parents[2] / ".cache" / "real" / "rclone" / "bin" / "rclone"
"""As tests/real/install brings it."""
START_S = 600.0
"""How long the server may take until it answers, seconds."""


@dataclass(frozen=True)
class S3:
    """An S3 server on this machine.

    Attributes:
        url: where it is.
        access_key, secret_key: what the tests call themselves there.
    """

    url: str
    access_key: str = "an-access-key"
    secret_key: str = "a-secret-key-that-stays-here"

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key, region_name="us-east-1",
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return {
            "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": self.url,
            "SNAKEMAKE_STORAGE_S3_ACCESS_KEY": self.access_key,
            "SNAKEMAKE_STORAGE_S3_SECRET_KEY": self.secret_key,
        }


@contextmanager
def rclone(directory: Path) -> Iterator[S3]:
    """`rclone serve s3` of a directory: buckets are directories, keys are checked."""
    require([] if RCLONE.exists() else ["rclone"], SOFTWARE)
    (directory / "buckets").mkdir(parents=True)
    s3 = S3(f"http://127.0.0.1:{free_port()}")
    command = (RCLONE, "serve", "s3", "--config", directory / "none", "--addr", s3.url[7:],
               "--auth-key", f"{s3.access_key},{s3.secret_key}", directory / "buckets")  # fmt: skip
    server = Daemon(command, directory, directory / "rclone.log")
    server.start()
    try:
        wait_for(lambda: _answers(s3), START_S)
        yield s3
    finally:
        server.stop()


def _answers(s3: S3) -> bool:
    try:
        return httpx.get(s3.url, timeout=5).is_client_error  # nobody's request is refused
    except httpx.TransportError:
        return False


@pytest.fixture(
    scope="session", params=["moto", pytest.param("rclone", marks=pytest.mark.software(SOFTWARE))]
)
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A running S3 server: moto's, and a real one."""
    pytest.importorskip("snakemake_storage_plugin_s3")
    if request.param == "rclone":
        with rclone(tmp_path_factory.mktemp("s3")) as served:
            yield served
        return
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3(f"http://{host}:{port}")
    server.stop()
