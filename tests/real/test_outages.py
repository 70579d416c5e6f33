"""The centre's servers are killed with -9 and come back: no job is lost, doubled or misreported.

What the TSI does to jobs when it is away is tried in `test_tsi.py`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.real.centre import firecrest, tsi
from tests.real.centre.firecrest import OwnFirecrest
from tests.real.centre.tsi import Unicore
from tests.support.places import MakeProject, unicorex_place
from tests.support.workflows import UNTRACKED, Place, Project, until

LONG_S = 800.0
"""How long a whole workflow may take, seconds."""
JOBS, SOME = 12, 3
UNICORE = pytest.mark.software(tsi.SOFTWARE)
FIRECREST = pytest.mark.software(firecrest.SOFTWARE)
SNAKEFILE = f"""
    rule all:
        input: expand("out/{{n}}.txt", n=range({JOBS}))

    rule one:
        output: "out/{{n}}.txt"
        shell:
            "echo {{wildcards.n}} >> ran; until [ -e go ]; do sleep 0.2; done; "
            "echo {{wildcards.n}} > {{output}}"
"""


@dataclass(frozen=True)
class Server:
    """A server of one test, and the site that it serves."""

    place: Place
    kill: Callable[[], None]
    start: Callable[[], None]


@pytest.fixture
def unicore_server(own_unicore: Unicore) -> Server:
    server = own_unicore.server
    return Server(unicorex_place(server), server.kill, server.start)


@pytest.fixture
def firecrest_server(own_firecrest: OwnFirecrest) -> Server:
    return Server(own_firecrest.place(), own_firecrest.kill, own_firecrest.start)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def project(server: Server, project_at: MakeProject) -> Project:
    made = project_at(server.place, dict(UNTRACKED))
    made.write("Snakefile", SNAKEFILE)
    return made


@pytest.mark.parametrize(
    ("server", "submitted"),
    [
        pytest.param("unicore_server", SOME, marks=UNICORE),
        pytest.param("unicore_server", JOBS, marks=[UNICORE, pytest.mark.nightly]),
        pytest.param("firecrest_server", SOME, marks=[FIRECREST, pytest.mark.nightly]),
        pytest.param("firecrest_server", JOBS, marks=FIRECREST),
    ],
    indirect=["server"],
    ids=["unicore-submitting", "unicore-running", "firecrest-submitting", "firecrest-running"],
)
def test_killed(server: Server, project: Project, submitted: int) -> None:
    running = project.start()
    until(lambda: running.output.count(": submitted to ") >= submitted, "submissions", LONG_S)
    if submitted == JOBS:
        until(lambda: len(project.lines("ran")) == JOBS, "jobs that run", LONG_S)
    server.kill()
    project.go()
    running.says("has not answered for", LONG_S)
    server.start()

    said = running.end(LONG_S).ok().output

    assert Counter(project.lines("ran")) == Counter(map(str, range(JOBS))), said
    assert [record.outcome for record in project.attempts] == ["succeeded"] * JOBS, said
