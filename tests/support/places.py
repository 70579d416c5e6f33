"""The sites that whole workflows run at."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.real.centre import tsi
from tests.real.centre.firecrest import SOFTWARE as FIRECREST
from tests.support.sandbox import FAST
from tests.support.unicoreserver import PASSWORD, USER, UnicoreX
from tests.support.workflows import Place, Project, place_in

UNICOREX_CONFIG = """\
UnicoreApiUrl: {url}
Resources:
  Queue: batch
Site:
  CAFile: {ca_file}
"""


PATIENT = replace(
    FAST,
    timing=replace(FAST.timing, kill_wait=15.0),
    firecrest=replace(FAST.firecrest, command_timeout=15.0),
)
"""As a real scheduler the sandbox gives a job more time to end than the job gives its command. On a
busy machine its commands may take long."""


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The worker's sandbox for whole workflows: `hpc1` is UNICORE, `hpc2` firecREST."""
    directory = tmp_path_factory.mktemp("sandbox-e2e")
    with Sandbox(directory, [SiteOption("hpc1"), SiteOption("hpc2", "firecrest")], PATIENT) as box:
        yield box


@pytest.fixture
def sandbox_place(sandbox: Sandbox) -> Place:
    return place_in(sandbox, "hpc1")


@pytest.fixture
def firecrest_place(sandbox: Sandbox) -> Place:
    return place_in(sandbox, "hpc2")


def unicorex_place(server: UnicoreX) -> Place:
    def end(ids: Sequence[str]) -> None:
        with suppress(httpx.TransportError):  # the server of a test that stops it may be gone
            for job in ids:
                server.ask(f"jobs/{job}", method="DELETE")

    return Place(
        "uni",
        UNICOREX_CONFIG.format(url=server.url, ca_file=json.dumps(str(server.ca_file))),
        {"MANTIK_UNICORE_USERNAME": USER, "MANTIK_UNICORE_PASSWORD": PASSWORD},
        server.scratch,
        server.directory,
        end,
    )


@pytest.fixture(name="unicorex_place")
def _unicorex_place(unicorex: UnicoreX) -> Place:
    return unicorex_place(unicorex)


REAL = [
    pytest.param("unicore_centre", marks=pytest.mark.software(tsi.SOFTWARE)),
    pytest.param("firecrest_centre", marks=pytest.mark.software(FIRECREST)),
]


@pytest.fixture(params=["firecrest", *REAL])
def place(request: pytest.FixtureRequest) -> Place:
    """The sandbox's firecREST site, and the centre's site of each API."""
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


MakeProject = Callable[..., Project]


@pytest.fixture
def project_at(tmp_path: Path) -> Iterator[MakeProject]:
    """Makes a project at a site, with further values as `Project` takes them; closes it."""
    with ExitStack() as made:

        def make(place: Place, *values: Any, folder: str = "project") -> Project:
            project = Project(tmp_path / folder, place, *values)
            made.callback(project.close)
            return project

        yield make


@pytest.fixture
def both(place: Place, project_at: MakeProject) -> Project:
    """A project at each of these sites."""
    return project_at(place)


@pytest.fixture
def project(sandbox_place: Place, project_at: MakeProject) -> Project:
    return project_at(sandbox_place)


@pytest.fixture
def firecrest(firecrest_place: Place, project_at: MakeProject) -> Project:
    return project_at(firecrest_place)
