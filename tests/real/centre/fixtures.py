"""The centre that all workers of a test session share, and its servers."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.centre import USER, Centre, firecrest, lacking, open_directory
from tests.real.centre.firecrest import Firecrest, OwnFirecrest
from tests.real.centre.tsi import SOFTWARE, Unicore, unicore
from tests.support import unicoreserver
from tests.support.needs import require
from tests.support.places import unicorex_place
from tests.support.shared import Told, keep, session_directory, shared
from tests.support.unicoreserver import UnicoreX
from tests.support.workflows import Place

START_S = 900.0
"""How long all servers of a centre may take to start, seconds."""
CHECKOUT = Path(__file__).parents[3]


def _start(directory: Path, users: Path) -> Told:
    # pytest's own directories are closed to the user whose jobs run here. The centre removes it.
    place = Path(tempfile.mkdtemp(prefix="mantik-centre-"))
    place.chmod(0o755)
    console = directory / "console.log"
    command = (sys.executable, "-m", "tests.real.centre", place)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    keeper = keep(users, command, directory=directory, console=console, env=environment)
    told = place / "told.json"
    deadline = time.monotonic() + START_S
    while not told.exists():
        late = time.monotonic() > deadline
        if late or keeper.poll() is not None:
            raise RuntimeError(f"the centre did not start; it said:\n{console.read_text()}")
        time.sleep(0.1)
    found: Told = json.loads(told.read_text())
    return found


@pytest.fixture(scope="session")
def _told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """What the centre tells of itself."""
    require(lacking(), "the centre")
    with shared(session_directory(tmp_path_factory) / "centre", _start) as told:
        yield told


@pytest.fixture(scope="session")
def centre(_told: Told) -> Centre:
    return Centre(Path(_told["directory"]))


@pytest.fixture(scope="session")
def tsi_unicorex(_told: Told) -> UnicoreX:
    """The centre's UNICORE/X, whose jobs its TSI submits to Slurm."""
    require(unicoreserver.lacking(), SOFTWARE)
    return UnicoreX.from_json(_told["unicorex"])


@pytest.fixture
def unicore_centre_place(tsi_unicorex: UnicoreX) -> Place:
    return unicorex_place(tsi_unicorex)


@pytest.fixture
def own_unicore(centre: Centre) -> Iterator[Unicore]:
    """A TSI and a UNICORE/X for one test that stops them, in front of the centre's Slurm."""
    require(unicoreserver.lacking(), SOFTWARE)
    directory = Path(tempfile.mkdtemp(prefix="unicore-", dir=centre.directory))
    directory.chmod(0o755)
    scratch = directory / "scratch"
    scratch.mkdir()
    shutil.chown(scratch, USER, USER)
    with unicore(centre, directory / "servers", scratch) as pair:
        yield pair


@pytest.fixture(scope="session")
def real_firecrest(_told: Told) -> Firecrest:
    """The centre's firecREST; tests keep apart by workspaces of their own."""
    require(firecrest.lacking(), firecrest.SOFTWARE)
    return Firecrest.from_json(_told["firecrest"])


@pytest.fixture
def own_firecrest(real_firecrest: Firecrest) -> Iterator[OwnFirecrest]:
    """A firecREST for one test that stops it, in front of the centre's login node and Slurm."""
    with real_firecrest.twin() as server:
        yield server


@pytest.fixture
def firecrest_centre_place(real_firecrest: Firecrest) -> Place:
    return real_firecrest.place()


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory that jobs at the centre see, too."""
    with open_directory() as directory:
        yield directory
