"""The sites that whole workflows run at."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.sandbox.settings import SiteOption
from tests.support.sandbox import FAST
from tests.support.unicorex import PASSWORD, USER, UnicoreX
from tests.support.workflows import Place, Project

UNICOREX_CONFIG = """\
UnicoreApiUrl: {url}
Resources:
  Queue: batch
Site:
  CAFile: {ca_file}
  PollMin: 1s
  Heartbeat: 10s
"""


PATIENT = replace(FAST, timing=replace(FAST.timing, kill_wait=15.0))
"""As a real scheduler the sandbox gives a job more time to end than the job gives its command."""


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The worker's sandbox for whole workflows, with one site, `hpc1`."""
    directory = tmp_path_factory.mktemp("sandbox-e2e")
    with Sandbox(directory, [SiteOption("hpc1")], PATIENT) as box:
        yield box


@pytest.fixture
def sandbox_place(sandbox: Sandbox) -> Place:
    return Place(
        "hpc1",
        sandbox.config_path("hpc1").read_text(),
        sandbox.environment(),
        sandbox.directory / "hpc1" / "scratch",
    )


@pytest.fixture
def unicorex_place(unicorex: UnicoreX) -> Place:
    return Place(
        "uni",
        UNICOREX_CONFIG.format(url=unicorex.url, ca_file=json.dumps(str(unicorex.ca_file))),
        {"MANTIK_UNICORE_USERNAME": USER, "MANTIK_UNICORE_PASSWORD": PASSWORD},
        unicorex.directory / "scratch",
    )


@pytest.fixture(params=["sandbox", "unicorex"])
def place(request: pytest.FixtureRequest) -> Place:
    """Both kinds of site, one after the other."""
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


@pytest.fixture
def both(place: Place, tmp_path: Path) -> Iterator[Project]:
    """A project at each kind of site."""
    made = Project(tmp_path / "project", place)
    yield made
    made.close()


@pytest.fixture
def project(sandbox_place: Place, tmp_path: Path) -> Iterator[Project]:
    """A project at the sandbox."""
    made = Project(tmp_path / "project", sandbox_place)
    yield made
    made.close()
