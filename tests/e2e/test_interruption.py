"""Ctrl-C at a terminal: what the user answers is what becomes of the jobs."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.terminal import Terminal
from tests.support.workflows import WAIT_S, Project, until

SNAKEFILE = r"""
    rule slow:
        output: "out.txt"
        shell:
            "trap 'trap \"\" TERM; echo term >> ran.txt; sleep {config[linger]}; exit 1' TERM; "
            "echo run >> ran.txt; "
            "until [ -e go ]; do sleep 0.1 || :; done; echo done > {output}"
"""
CTRL_C = b"\x03"
QUESTION = "Your choice [c/d/g]: "


def asked(terminal: Terminal, times: int = 1) -> None:
    until(lambda: terminal.output.count(QUESTION) >= times, "the question")


Sit = Callable[..., Terminal]


@pytest.fixture
def sit(project: Project) -> Iterator[Sit]:
    """Start the workflow at a terminal, and return when its job runs."""
    opened: list[Terminal] = []

    def start(*arguments: str, linger: str = "0") -> Terminal:
        project.write("Snakefile", SNAKEFILE)
        command = project.command(*arguments, "--config", f"linger={linger}")
        terminal = Terminal(command, cwd=project.directory, env=project.environment)
        opened.append(terminal)

        def runs() -> bool:
            assert terminal.process.poll() is None, terminal.output
            return project.lines() == ["run"]

        until(runs, "the job")
        return terminal

    yield start
    for terminal in opened:
        terminal.close()


def test_go_on_and_detach(project: Project, sit: Sit) -> None:
    terminal = sit()
    terminal.type(CTRL_C)
    asked(terminal)
    terminal.type(b"g\n")
    until(lambda: "Going on." in terminal.output, "the answer's effect")
    terminal.type(CTRL_C)
    asked(terminal, 2)
    terminal.type(b"what?\n")
    asked(terminal, 3)
    terminal.type(b"d\n")

    assert terminal.end() != 0
    assert "Detached: the jobs go on at their sites" in terminal.output
    assert "did not complete successfully" not in terminal.output
    project.go()
    project.run("--nolock", "--rerun-incomplete", "--config", "linger=0").ok()
    assert project.lines() == ["run"]
    assert project.read("out.txt") == "done\n"


def test_cancel(project: Project, sit: Sit) -> None:
    terminal = sit()
    terminal.type(CTRL_C)
    asked(terminal)
    terminal.type(b"c\n")

    assert terminal.end() != 0
    assert project.lines() == ["run", "term"]
    assert [record.outcome for record in project.attempts] == ["cancelled"]


@pytest.mark.parametrize("first", ["c\n", pytest.param("", marks=pytest.mark.nightly)])
def test_cancel_at_once(project: Project, sit: Sit, first: str) -> None:
    config = project.config.read_text()
    project.config.write_text(re.sub("  TermGrace: .*", "  TermGrace: 12s", config))
    terminal = sit(linger="10")
    terminal.type(CTRL_C)
    asked(terminal)
    if first:
        terminal.type(first.encode())
        until(lambda: "term" in project.lines(), "the job to be told")
    terminal.type(CTRL_C)

    assert terminal.end() != 0
    assert "did not confirm that it was cancelled and may still run" in terminal.output
    until(lambda: "term" in project.lines(), "the job to be told")


def test_a_signal_while_snakemake_records_a_group_doubles_no_member(project: Project) -> None:
    """It takes 0.1 s for each member."""
    project.write(
        "Snakefile",
        """
        rule member:
            input: lambda wildcards: f"{int(wildcards.n) - 1}.txt" if wildcards.n != "0" else []
            output: "{n,[0-9]+}.txt"
            group: "chain"
            shell: "echo {wildcards.n} >> ran; touch {output}"
        """,
    )
    running = project.start("11.txt")
    recorded = project.directory / ".snakemake/metadata"
    until(lambda: recorded.exists() and any(recorded.iterdir()), "the first member")
    running.process.send_signal(signal.SIGTERM)
    running.end()
    said = project.run("11.txt", "--rerun-incomplete").ok().output
    assert sorted((project.workspace / "ran").read_text().split(), key=int) == [
        str(number) for number in range(12)
    ], said


IN_A_TASK = """
import asyncio, os
from snakemake_executor_plugin_mantik.adapter.signals import Interruption

async def end(number):
    os.kill(os.getpid(), number)
    await asyncio.sleep(60)

async def main(number):
    await asyncio.gather(end(number), asyncio.sleep(60))

Interruption("cancel").handle()
asyncio.run(main(int(os.sys.argv[1])))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_snakemake_runs_tasks_prints_no_traceback(number: int) -> None:
    command = [sys.executable, "-c", IN_A_TASK, str(int(number))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, "", "")


AFTER_THE_RUN = """
import os, signal, {module}

onsuccess:
    end = lambda: os.kill(os.getpid(), signal.SIGINT)
    try:
        {at}
    finally:
        open("cleaned", "w").close()

rule one:
    output: "out.txt"
    shell: "touch {{output}}"
"""


@pytest.mark.parametrize(
    ("module", "at"), [("os", "end()"), ("atexit", "atexit.register(end)")], ids=["end", "exit"]
)
def test_interrupted_when_all_jobs_have_ended(project: Project, module: str, at: str) -> None:
    project.write("Snakefile", AFTER_THE_RUN.format(module=module, at=at))
    ran = subprocess.run(
        project.command(), cwd=project.directory, env=project.environment, capture_output=True,
        text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 128 + signal.SIGINT, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr
    assert project.exists("cleaned"), "the program ends in order"


NOTHING_TO_DO = """
import atexit, threading

atexit.register(lambda: print([one.name for one in threading.enumerate() if "wait" in one.name]))

rule one:
    output: "out.txt"
    shell: "touch {output}"
"""


def test_no_thread_waits_for_jobs_at_the_end_of_a_run_without_any(project: Project) -> None:
    project.write("Snakefile", NOTHING_TO_DO)
    project.write("out.txt")
    ran = subprocess.run(
        project.command(), cwd=project.directory, env=project.environment, capture_output=True,
        text=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    assert "Nothing to be done" in ran.stderr
    assert ran.stdout == "[]\n"


INTERRUPTED_WHILE_IT_LOGS = """
import io, logging, os, signal, sys
from snakemake_executor_plugin_mantik.adapter.signals import Interruption

class Interrupted(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        written = os.write(2, data)
        if b"first" in bytes(data):
            os.kill(os.getpid(), signal.SIGINT)  # handled before the stream's lock is released
        return written

sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted()), line_buffering=True)
logging.basicConfig(level=logging.INFO)
Interruption("ask").handle()
logging.info("first")
logging.info("second")
"""


def test_the_question_comes_in_the_middle_of_a_line_of_the_log() -> None:
    terminal = Terminal([sys.executable, "-c", INTERRUPTED_WHILE_IT_LOGS])
    try:
        asked(terminal)
        terminal.type(b"g\n")
        assert terminal.end() == 0
        for line in ("first", "Going on.", "second"):
            assert terminal.output.count(line) == 1, terminal.output
    finally:
        terminal.close()
