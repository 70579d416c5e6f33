"""Snakemake's own tests of executors, as they are, at a site of each API."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from snakemake.common.tests import TestWorkflowsLocalStorageBase, TestWorkflowsMinioPlayStorageBase
from snakemake_interface_executor_plugins.settings import ExecutorSettingsBase

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from snakemake_executor_plugin_mantik import ExecutorSettings
from tests.support.s3 import S3
from tests.support.sandbox import FAST
from tests.support.workflows import FOREIGN, place_in


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Sites that do not look at the memory of jobs while a test runs.

    One of the rules asks for 5 MB, which is less than bash alone takes.
    """
    settings = replace(FAST, timing=replace(FAST.timing, memory_interval=3600.0))
    directory = tmp_path_factory.mktemp("sandbox-official")
    with Sandbox(directory, [SiteOption("hpc1"), SiteOption("hpc2", "firecrest")], settings) as box:
        yield box


class AtSite:
    """What is the same for all of them: they run at the site `site`."""

    site: str

    @pytest.fixture(autouse=True)
    def _credentials(
        self, lenient: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        place = place_in(lenient, self.site)
        for name in [name for name in os.environ if name.startswith(FOREIGN)]:
            monkeypatch.delenv(name)
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        self._config = tmp_path / f"{self.site}.yaml"
        self._config.write_text(place.config)
        # They leave the working directory changed.
        monkeypatch.chdir(tmp_path)

    def get_executor(self) -> str:
        return "mantik"

    def get_executor_settings(self) -> ExecutorSettingsBase | None:
        """The site's config; without tracking, since MLflow takes seconds to start."""
        return ExecutorSettings(backend_config=[str(self._config)], track="none")


class WithFiles(AtSite, TestWorkflowsLocalStorageBase):  # type: ignore[misc] # Snakemake is not typed
    """Those whose files are here."""


class WithS3(AtSite, TestWorkflowsMinioPlayStorageBase):  # type: ignore[misc] # Snakemake is not typed
    """Those whose files are in a bucket."""

    @pytest.fixture(autouse=True)
    def _storage(self, s3: S3) -> None:
        self._s3 = s3

    @property
    def endpoint_url(self) -> str:
        return self._s3.url

    @property
    def access_key(self) -> str:
        return self._s3.access_key

    @property
    def secret_key(self) -> str:
        return self._s3.secret_key


class TestUnicore(WithFiles):
    __test__ = True
    site = "hpc1"


class TestFirecrest(WithFiles):
    __test__ = True
    site = "hpc2"


@pytest.mark.nightly
class TestUnicoreWithS3(WithS3):
    __test__ = True
    site = "hpc1"


@pytest.mark.nightly
class TestFirecrestWithS3(WithS3):
    __test__ = True
    site = "hpc2"
