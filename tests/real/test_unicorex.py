"""A real UNICORE/X where it hurts: killed, forgetful, with many jobs and odd names."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.places import unicorex_place
from tests.support.unicorex import OWN_SLOTS, SOFTWARE, OwnUnicoreX, UnicoreX
from tests.support.workflows import UNTRACKED, Project, until

pytestmark = [pytest.mark.software(SOFTWARE), pytest.mark.timeout(240)]

Make = Callable[[UnicoreX], Project]


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Make]:
    """Makes a project at a server."""
    made: list[Project] = []

    def make(server: UnicoreX) -> Project:
        place = unicorex_place(server)
        made.append(Project(tmp_path / "projects" / "one", place, dict(UNTRACKED)))
        return made[-1]

    yield make
    for project in made:
        project.close()


COUNTED = """
    rule all:
        input: expand("out/{{n}}.txt", n=range({jobs}))

    rule one:
        output: "out/{{n}}.txt"
        shell:
            "echo {{wildcards.n}} >> {seen}; {wait}; echo {{wildcards.n}} > {{output}}"
"""


class TestKilled:
    """The server is killed with -9 while jobs run and others wait in its memory."""

    JOBS = 3 * OWN_SLOTS

    @pytest.mark.parametrize("meanwhile", ["run on", "end"])
    def test_no_job_is_lost_or_doubled(
        self, at: Make, unicorex_to_stop: OwnUnicoreX, tmp_path: Path, meanwhile: str
    ) -> None:
        server = unicorex_to_stop
        project = at(server)
        seen, go = tmp_path / "seen", tmp_path / "go"
        wait = f"until [ -e {go} ]; do sleep 0.2; done"
        project.write("Snakefile", COUNTED.format(jobs=self.JOBS, seen=seen, wait=wait))
        running = project.start()
        until(
            lambda: running.output.count(": submitted to ") == self.JOBS
            and seen.exists()
            and len(seen.read_text().split()) == OWN_SLOTS,
            "jobs that run and jobs that wait",
        )  # fmt: skip
        server.kill()
        if meanwhile == "end":
            go.touch()
        server.start()
        go.touch()

        said = running.end().ok().output

        ran = Counter(seen.read_text().split())
        assert ran == Counter(map(str, range(self.JOBS))), said
