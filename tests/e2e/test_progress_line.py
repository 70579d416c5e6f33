"""The line below Snakemake's log on a terminal."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal import Terminal
from tests.support.workflows import UNTRACKED, Project, until

SNAKEFILE = """
    rule all:
        input: expand("{n}.txt", n=range(4)), "local.txt"

    rule train:
        input: "big.bin"
        output: "{n}.txt"
        shell: "until [ -e go ]; do sleep 0.1; done; head -c 3000000 /dev/urandom > {output}"

    localrules: speak

    rule speak:
        output: "local.txt"
        shell:
            "until [ -e speak ]; do sleep 0.1; done;"
            " for i in 1 2 3; do echo said $i by a child; echo and $i >&2; done;"
            " until [ -e heard ]; do sleep 0.1; done; touch {output}"
"""
LINE = re.compile(r"^\d+ of \d+ jobs done")
TIME = re.compile(r"\d\d:\d\d:\d\d")


@pytest.fixture
def seat(project: Project) -> Iterator["Seat"]:
    project.extra |= UNTRACKED | {"TERM": "xterm"}
    project.write("Snakefile", SNAKEFILE)
    project.write("big.bin", "x" * 3_000_000)
    seat = Seat(project)
    yield seat
    for terminal in seat.opened:
        terminal.close()


class Seat:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.opened: list[Terminal] = []

    def start(self, *arguments: str, columns: int = 140) -> Terminal:
        self.opened.append(
            Terminal(
                self.project.command(*arguments),
                columns=columns,
                cwd=self.project.directory,
                env=self.project.environment,
            )
        )
        return self.opened[-1]


def last_line(terminal: Terminal) -> str:
    return next((line for line in reversed(terminal.screen) if line), "")


def logged(directory: Path) -> list[str]:
    [log] = (directory / ".snakemake" / "log").glob("*.log")
    return [line.rstrip() for line in log.read_text().splitlines() if line.strip()]


def test_the_line_is_last_while_jobs_run_and_gone_at_the_end(seat: Seat) -> None:
    project = seat.project
    terminal = seat.start(columns=1000)
    # Nothing is logged then: a line of Snakemake's may be written in two parts.
    until(lambda: terminal.output.count(": runs at") == 2, "two jobs that run")
    (project.directory / "speak").touch()
    until(lambda: "and 3" in terminal.output, "the local rule's child")
    assert not LINE.match(last_line(terminal)), "a child writes there"
    (project.directory / "heard").touch()
    until(lambda: re.match(r"1 of 6 jobs done, 2 running, 2 queued", last_line(terminal)), "it")
    terminal.type(b"\x03")
    until(lambda: "Your choice" in terminal.output, "the question")
    assert last_line(terminal).startswith("Your choice [c/d/g]:")
    assert not [line for line in terminal.screen if LINE.match(line)]
    terminal.type(b"g\n")
    until(lambda: LINE.match(last_line(terminal)), "the line again")
    project.go()
    assert terminal.end() == 0, terminal.output

    said = [line for line in terminal.screen if line]
    assert not [line for line in said if "jobs done" in line], said
    for i in (1, 2, 3):
        assert f"said {i} by a child" in said
        assert f"and {i}" in said
    # Each line of the log is whole, in the same order. Each of the two has a time of its own.
    lines = iter(re.sub(TIME, "", line) for line in said)
    lacking = [line for line in logged(project.directory) if re.sub(TIME, "", line) not in lines]
    assert not lacking, "\n".join(said)
