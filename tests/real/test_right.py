"""What is there, what may go and what must stay, at the centre's real servers.

Files that a job reads, journals that know too little, directories for temporary files.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.centre import firecrest, open_directory, tsi
from tests.support.workflows import UNTRACKED, Place, Project, tells, until

pytestmark = pytest.mark.timeout(1800)

SITES = [
    pytest.param("unicore_centre_place", marks=pytest.mark.software(tsi.SOFTWARE)),
    pytest.param("firecrest_centre_place", marks=pytest.mark.software(firecrest.SOFTWARE)),
]

AGAIN = ("--nolock", "--rerun-incomplete")

READERS = """
    O = "{outside}"

    rule make:
        output: temp(directory("d"))
        shell: "mkdir {{output}}; touch {{output}}/1 {{output}}/2"

    rule slow:
        input: "d"
        output: "slow.txt"
        resources: tmpdir="../tmp-$SLURM_JOB_ID"
        shell:
            "echo $SLURM_JOB_ID >> {{O}}/slow; until [ -e {{O}}/go ]; do sleep 0.2; done; "
            "ls {{input}} > {{output}}; basename $TMPDIR >> {{output}}; "
            "touch {{resources.tmpdir}}/x"

    rule quick:
        input: "d"
        output: "quick.txt"
        shell: "ls {{input}} > {{output}}"
"""

JOURNAL = """
    O = "{outside}"

    rule all:
        input: "first.txt", "slow.txt"

    rule first:
        output: "first.txt"
        shell: "echo x >> {{O}}/first; echo 1 > {{output}}"

    rule slow:
        input: "first.txt"
        output: "slow.txt"
        shell:
            "echo x >> {{O}}/slow; until [ -e {{O}}/go ]; do sleep 0.2; done; "
            "cp {{input}} {{output}}"
"""


@pytest.fixture(params=SITES)
def place(request: pytest.FixtureRequest) -> Place:
    made: Place = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def project(place: Place, tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path / "project", place, dict(UNTRACKED))
    yield made
    made.close()


@pytest.fixture
def outside() -> Iterator[Path]:
    with open_directory() as directory:
        yield directory


def test_a_reader_of_an_earlier_run_keeps_its_temporary_input(
    project: Project, outside: Path
) -> None:
    project.write("Snakefile", READERS.format(outside=outside))
    running = project.start("slow.txt")
    until((outside / "slow").exists, "the job")
    running.kill()

    project.run(*AGAIN, "quick.txt").ok()
    assert not project.exists("d")
    assert (project.workspace / "d/1").exists(), "it was removed under the job"
    (outside / "go").touch()
    # Snakemake makes the input again, and what is made of it.
    project.run(*AGAIN, "slow.txt").ok()

    last = (outside / "slow").read_text().split()[-1]
    assert project.read("slow.txt") == f"1\n2\ntmp-{last}\n"


def test_a_journal_that_knows_too_little_doubles_nothing(project: Project, outside: Path) -> None:
    project.write("Snakefile", JOURNAL.format(outside=outside))
    state = project.directory / ".snakemake"
    project.run("first.txt").ok()
    shutil.copytree(state, project.directory.parent / "backup")
    running = project.start()
    until((outside / "slow").exists, "the job")
    running.kill()

    # A backup is put back in place.
    shutil.rmtree(state)
    shutil.copytree(project.directory.parent / "backup", state)
    running = project.start(*AGAIN)
    until(lambda: "slow" in {record.rule for record in project.tries}, "what the place knows")
    running.kill()

    # A power cut leaves an empty file.
    for name in ("journal.sqlite-wal", "journal.sqlite-shm"):
        (state / "mantik" / name).unlink(missing_ok=True)
    (state / "mantik/journal.sqlite").write_bytes(b"")
    running = project.start(*AGAIN)
    running.says("taken up again")
    (outside / "go").touch()
    said = running.end().ok().output

    tells(said, "spare")
    assert (outside / "first").read_text() == (outside / "slow").read_text() == "x\n"
