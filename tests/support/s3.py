"""A local S3 server for tests of storage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class S3:
    """An S3 server on this machine; it takes any credentials.

    Attributes:
        url: where it is.
        access_key, secret_key: what the tests call themselves there.
    """

    url: str
    access_key: str = "an-access-key"
    secret_key: str = "a-secret-key-that-stays-here"

    def client(self) -> Any:
        """A client of it."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key, region_name="us-east-1",
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """What Snakemake's storage plugin is given."""
        return {
            "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": self.url,
            "SNAKEMAKE_STORAGE_S3_ACCESS_KEY": self.access_key,
            "SNAKEMAKE_STORAGE_S3_SECRET_KEY": self.secret_key,
        }


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A running S3 server."""
    pytest.importorskip("snakemake_storage_plugin_s3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3(f"http://{host}:{port}")
    server.stop()
