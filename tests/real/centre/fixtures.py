"""The fixtures of the centre's servers: all workers of a session share one centre."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.centre import firecrest, lacking
from tests.real.centre.daemons import START_S, Daemon
from tests.real.centre.firecrest import Firecrest
from tests.support.needs import require
from tests.support.shared import Told, keep, session_directory, shared
from tests.support.workflows import Place, Project

SOURCES = Path(__file__).parents[3]


def _start(_: Path, users: Path) -> Told:
    """Start a centre in a directory that the user may enter; pytest's own belong to us alone."""
    directory = Path(tempfile.mkdtemp(prefix="mantik-centre-"))
    directory.chmod(0o755)
    told, console = directory / "told.json", directory / "console.log"
    keeper = keep(
        users, [sys.executable, "-m", "tests.real.centre", directory],
        directory=SOURCES, console=console, env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )  # fmt: skip
    deadline = time.monotonic() + 2 * START_S
    while not told.exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the centre did not start; it said:\n{console.read_text()}")
        time.sleep(0.1)
    found: Told = json.loads(told.read_text())
    return found


@pytest.fixture(scope="session")
def centre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """What the session's centre tells of its servers."""
    require([*lacking(), *firecrest.lacking()], "the centre")
    with shared(session_directory(tmp_path_factory) / "centre", _start) as told:
        yield told


@pytest.fixture(scope="session")
def real_firecrest(centre: Told) -> Firecrest:
    """The session's firecREST server; tests keep apart by workspaces of their own."""
    told = centre["firecrest"]
    return Firecrest(Path(told["directory"]), told["url"], told["token_url"])


@pytest.fixture
def firecrest_to_stop(
    real_firecrest: Firecrest, tmp_path: Path
) -> Iterator[tuple[Firecrest, Daemon]]:
    """A server for one test that stops it, in front of the same login node and Slurm."""
    shared = real_firecrest
    server, daemon = firecrest.own(shared.directory, shared.token_url, tmp_path.name)
    with daemon:
        yield server, daemon


@pytest.fixture
def firecrest_centre_place(real_firecrest: Firecrest) -> Place:
    """The real firecREST as a site of whole workflows."""
    return real_firecrest.place()


@pytest.fixture
def at_firecrest(firecrest_centre_place: Place, tmp_path: Path) -> Iterator[Project]:
    """A project at the real firecREST."""
    made = Project(tmp_path / "project", firecrest_centre_place)
    yield made
    made.close()
