"""What is there, what may go and what must stay, at the centre's real servers.

Files that a job reads, journals that know too little, directories for temporary files.
"""

import json
import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.faults.faults import refusal
from tests.support.command import smk_mantik
from tests.support.proxy import Answer, Exchange, Proxy, Request, Rule
from tests.support.workflows import FILES_STAY, UNTRACKED, Place, Project, Ran, tells, until

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


@pytest.fixture
def place(centre_place: Place) -> Place:
    return centre_place


@pytest.fixture
def project(at_centre: Project) -> Project:
    return at_centre


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
    until(lambda: "slow" in {record.rule for record in project.attempts}, "what the place knows")
    running.kill()

    # A power cut leaves an empty file.
    for name in ("journal.sqlite-wal", "journal.sqlite-shm"):
        (state / "mantik" / name).unlink(missing_ok=True)
    (state / "mantik/journal.sqlite").write_bytes(b"")
    running = project.start(*AGAIN)
    running.says("reattached")
    (outside / "go").touch()
    said = running.end().ok().output

    tells(said, "spare")
    assert (outside / "first").read_text() == (outside / "slow").read_text() == "x\n"


STORED = """
    localrules: all

    rule all:
        input: "set/sum.txt"

    rule make:
        output: "set/part.txt", "set/more.txt"
        shell: "echo make >> {outside}/ran; echo 1 | tee {{output[0]}} > {{output[1]}}"

    rule sum:
        input: "set/part.txt", "set/more.txt"
        output: "set/sum.txt"
        shell: "echo sum >> {outside}/ran; cat {{input}} > {{output}}"
"""
LISTED = {
    "unicore": r"GET .*/files/.*/set/?\?.*offset=",
    "firecrest": r"GET .*/ops/ls\?.*path=[^&]*/set/?(&|$)",
}
LISTS = {"unicore": "content", "firecrest": "output"}


async def empty(api: str, exchange: Exchange) -> None:
    answer = await exchange.forward()
    found = json.loads(answer.body)
    found[LISTS[api]] = type(found[LISTS[api]])()
    await exchange.send(Answer(200, answer.headers, json.dumps(found).encode()))


async def not_found(api: str, exchange: Exchange) -> None:
    await exchange.send(refusal(api, 404, "No such file or directory"))


@pytest.mark.parametrize("wrong", [empty, not_found])
def test_one_wrong_listing_forgets_no_stored_output(
    wrong: Callable[[str, Exchange], Awaitable[None]], place: Place, tmp_path: Path, outside: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    api = "unicore" if place.name == "uni" else "firecrest"
    found = re.search(r"https?://[^/\s]+", place.config)
    assert found is not None
    ca_file = request.getfixturevalue("tsi_unicorex").ca_file if api == "unicore" else None

    def kind(asked: Request) -> str:
        said = f"{asked.method} {unquote(asked.target)}"
        return "list" if re.search(LISTED[api], said) else "other"

    with Proxy(found[0], kind, ca_file=ca_file) as proxy:
        text = place.config.replace(found[0], proxy.url)
        behind = replace(place, config=re.sub(r" *CAFile: .*\n", "", text).removesuffix("Site:\n"))
        project = Project(tmp_path / "project", behind, dict(UNTRACKED))
        with closing(project):
            project.write("Snakefile", STORED.format(outside=outside))
            project.run(*FILES_STAY).ok()
            assert not project.exists("set")

            config = ("--mantik-backend-config", str(project.config))
            looks: list[Callable[[], Ran]] = [
                lambda: project.run(*FILES_STAY, "--dry-run"),
                lambda: project.run(*FILES_STAY),
                lambda: smk_mantik(project, "plan", *config, *FILES_STAY),
                lambda: smk_mantik(project, "get", "set/part.txt"),
            ]
            # `ls` does not ask the site: it shows what the looks leave.
            for look in looks:
                rule = proxy.add(Rule("wrong", {"list"}, partial(wrong, api)))
                said = look().ok().output
                assert rule.taken["list"] == 1, f"it saw no wrong answer: {proxy.counted()}\n{said}"
                proxy.heal()
                listed = smk_mantik(project, "ls").ok().output
                assert "set/part.txt" in listed, said
                assert "set/sum.txt" in listed, said
            tells(project.run(*FILES_STAY).ok().output, "Nothing to be done")
            smk_mantik(project, "get", "--all").ok()
            assert project.read("set/sum.txt") == "1\n1\n"
    assert (outside / "ran").read_text() == "make\nsum\n"
