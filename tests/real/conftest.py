"""Real servers and programs."""

import os
import pwd
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.real import apptainer, slurm
from tests.support.needs import require
from tests.support.places import PATIENT, REAL, MakeProject
from tests.support.workflows import UNTRACKED, Place, Project, place_in


@pytest.hookimpl(trylast=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """See that no test of this directory is without its mark: `make test-real` goes by it."""
    if item.get_closest_marker("software") is None:
        raise pytest.UsageError(f"{item.nodeid} needs the mark `software`")


@pytest.fixture(scope="session", autouse=True)
def _programs() -> Iterator[None]:
    """Let the sites' jobs find apptainer: they have the search path of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", apptainer.search_path())
        yield


@pytest.fixture(scope="session")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """The worker's Slurm, and this process led to it."""
    require(slurm.lacking(), "Slurm")
    directory = tmp_path_factory.mktemp("slurm")
    with slurm.Slurm(directory) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def slurm_box(
    real_slurm: slurm.Slurm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sandbox]:
    """A sandbox on the worker's Slurm: `hpc1` is UNICORE, `hpc2` firecREST."""
    sites = [SiteOption("hpc1"), SiteOption("hpc2", "firecrest")]
    settings = replace(PATIENT, scheduler="slurm")
    with Sandbox(tmp_path_factory.mktemp("sandbox-slurm"), sites, settings) as box:
        yield box


@pytest.fixture
def sandbox_place(slurm_box: Sandbox) -> Place:
    return place_in(slurm_box, "hpc1")


@pytest.fixture
def firecrest_place(slurm_box: Sandbox) -> Place:
    return place_in(slurm_box, "hpc2")


@pytest.fixture(params=["project", "firecrest"])
def on_slurm(request: pytest.FixtureRequest) -> Project:
    made: Project = request.getfixturevalue(request.param)
    return made


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is a container image."""
    require(apptainer.lacking(), "Apptainer")
    return apptainer.make_root(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(params=REAL)
def centre_place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


@pytest.fixture
def at_centre(centre_place: Place, project_at: MakeProject) -> Project:
    return project_at(centre_place, dict(UNTRACKED))


@pytest.fixture(scope="session")
def user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
