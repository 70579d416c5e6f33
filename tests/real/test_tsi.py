"""Whole workflows at a real UNICORE/X with its TSI: what a server without one does not do."""

import subprocess
import uuid
from collections import Counter
from pathlib import Path

import pytest

from tests.real.centre import Centre
from tests.real.centre.tsi import SOFTWARE, Unicore
from tests.support.benches import in_use, unicore_site
from tests.support.command import smk_mantik
from tests.support.places import MakeProject, unicorex_place
from tests.support.unicoreserver import UnicoreX
from tests.support.workflows import UNTRACKED, Place, Project, Running, tells, until

pytestmark = pytest.mark.software(SOFTWARE)

LONG_S = 800.0
"""How long what takes many round trips may take, seconds."""

WAITS = """
    rule all:
        input: "out/0.txt", "out/1.txt"

    rule slow:
        output: "out/{n}.txt"
        shell:
            "trap 'echo {wildcards.n} >> ended; exit 1' TERM; echo {wildcards.n} >> ran; "
            "until [ -e go ]; do sleep 0.2 || :; done; echo {wildcards.n} > {output}"
"""


@pytest.fixture
def project(unicore_centre_place: Place, project_at: MakeProject) -> Project:
    return project_at(unicore_centre_place, dict(UNTRACKED))


def both_run(project: Project) -> Running:
    project.write("Snakefile", WAITS)
    running = project.start("--nolock", "--rerun-incomplete")
    until(lambda: sorted(project.lines("ran")) == ["0", "1"], "both jobs", LONG_S)
    # More often on a busy machine: what was lost there is submitted again.
    until(lambda: all(f"slow n={n}: submitted to" in running.output for n in "01"), "ids", LONG_S)
    return running


class TestRevoked:
    """A claim is a file, and a revocation a directory over it: the server says that in a text."""

    def test_interrupted(self, project: Project) -> None:
        running = both_run(project)

        said = running.interrupt().output

        assert set(project.lines("ended")) == {"0", "1"}, said
        assert {record.outcome for record in project.attempts} == {"cancelled"}, said
        assert "has not answered" not in said
        project.go()
        project.run("--nolock", "--rerun-incomplete").ok()
        assert sorted(project.lines("ran")) == ["0", "0", "1", "1"]

    def test_cancelled(self, project: Project) -> None:
        both_run(project).kill()

        said = smk_mantik(project, "cancel", "--all").ok().output

        tells(said, "slow n=0: cancelled", "slow n=1: cancelled", "which has confirmed it")
        assert set(project.lines("ended")) == {"0", "1"}

    def test_edited(self, project: Project) -> None:
        both_run(project).kill()
        project.write("Snakefile", WAITS.replace("until [ -e go ]", ": edited; until [ -e go ]"))
        (project.workspace / "ended").write_text("")
        (project.workspace / "ended").chmod(0o666)
        running = project.start("--nolock", "--rerun-incomplete")
        until(lambda: sorted(project.lines("ran")) == ["0", "0", "1", "1"], "the new jobs", LONG_S)
        assert set(project.lines("ended")) == {"0", "1"}, running.output
        project.go()

        running.end(LONG_S).ok()


COUNTED = """
    rule all:
        input: expand("out/{{n}}.txt", n=range({jobs}))

    rule one:
        output: "out/{{n}}.txt"
        shell: "echo {{wildcards.n}} >> ran; echo {{wildcards.n}} > {{output}}"
"""


class TestAway:
    """The TSI is killed with -9 while jobs are submitted, until UNICORE has given some up."""

    JOBS = 25
    GIVEN_UP = 3

    def test_tsi(self, own_unicore: Unicore, project_at: MakeProject) -> None:
        tsi, server = own_unicore.tsi, own_unicore.server
        project = project_at(unicorex_place(server), dict(UNTRACKED))
        project.write("Snakefile", COUNTED.format(jobs=self.JOBS))
        running = project.start()
        until(lambda: running.output.count(": submitted to ") > 5, "some jobs", LONG_S)
        tsi.kill()
        until(lambda: given_up(server, project) >= self.GIVEN_UP, "lost jobs", LONG_S)
        tsi.start()
        said = running.end(2 * LONG_S).ok().output

        assert Counter(project.lines("ran")) == Counter(map(str, range(self.JOBS))), said
        assert "rejected" not in said
        assert "they are submitted again" in said


def given_up(server: UnicoreX, project: Project) -> int:
    ids = [job for record in project.attempts for job in record.site_jobs]
    return sum(server.status(job) == "FAILED" for job in ids)


HOOKS = """\
Environment:
  PreRunCommandOnLoginNode:
    - 'echo a >> {log}; echo "b;c" >> {log}'
    - echo $(id -un) > {directory}/user
    - "cd {directory} && echo \\"it's $PWD\\" > where"
  PostRunCommandOnLoginNode: echo d >> {log}
"""


def test_hooks(project: Project, centre: Centre) -> None:
    directory = Path(subprocess.run(
        ["setpriv", "--reuid=mantik-user", "--regid=mantik-user", "--clear-groups", "mktemp", "-d",
         "-p", centre.scratch], capture_output=True, text=True, check=True,
    ).stdout.strip())  # fmt: skip
    log = directory / "log"
    hooks = HOOKS.format(log=log, directory=directory)
    project.config.write_text(project.place.config + hooks)
    told = "cp {log} {output}; echo ${{PYTHONPATH-unset}} >> {output}; id -un >> {output}"
    shell = told.replace("{log}", str(log))
    project.write("Snakefile", f'rule one:\n    output: "one"\n    shell: "{shell}"\n')

    project.run().ok()

    # Jobs do not see what is the TSI's.
    assert project.read("one") == "a\nb;c\nunset\nmantik-user\n"
    assert (directory / "user").read_text() == "mantik-user\n"
    assert (directory / "where").read_text() == f"it's {directory}\n"
    until(lambda: log.read_text() == "a\nb;c\nd\n", "the hook after the job")


@pytest.mark.parametrize("number", [30, pytest.param(250, marks=pytest.mark.nightly)])
async def test_no_limit_of_a_server_cuts_a_listing(tsi_unicorex: UnicoreX, number: int) -> None:
    """It has a setting for one of 20, which it does not heed: it lists what it is asked for."""
    server = tsi_unicorex
    names = {f"{n}" for n in range(number)}
    async with in_use(unicore_site(server, f"ws-{uuid.uuid4()}")) as site:
        facts = await site.open()
        await site.make_directory("many")
        for name in names:
            (Path(facts.workspace) / "many" / name).touch()
        assert set(await site.list("many")) == names
        url = f"{site._url('many')}".removeprefix("/")
    pages = [
        server.ask(url, params={"offset": offset, "num": 12}).json()["content"]
        for offset in range(0, number, 12)
    ]
    assert {len(page) for page in pages[:-1]} == {12}
    assert {path.rpartition("/")[2] for page in pages for path in page} == names
