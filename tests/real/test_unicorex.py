"""A real UNICORE/X where it hurts: killed, forgetful, with many jobs and odd names."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.config.settings import Timing
from tests.support.places import MakeProject, unicorex_place
from tests.support.unicoreserver import OwnUnicoreX, UnicoreX
from tests.support.unicorex import OWN_SLOTS, SLOTS, SOFTWARE, own_unicorex
from tests.support.workflows import UNTRACKED, Project, Running, until

pytestmark = pytest.mark.software(SOFTWARE)

LONG_S = 800.0
"""How long what is much may take, seconds."""

Make = Callable[[UnicoreX], Project]


@pytest.fixture
def at(project_at: MakeProject) -> Make:
    return lambda server: project_at(unicorex_place(server), dict(UNTRACKED), folder="projects/one")


COUNTED = """
    rule all:
        input: expand("out/{{n}}.txt", n=range({jobs}))

    rule one:
        output: "out/{{n}}.txt"
        shell:
            "echo {{wildcards.n}} >> {seen}; {wait}; echo {{wildcards.n}} > {{output}}"
"""


@pytest.mark.nightly  # CI kills the one with a TSI, in `test_outages.py`
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
        # What the server was just importing for a job is gone with it: that job fails at launch.
        running = project.start("--retries", "2")
        until(
            lambda: running.output.count(": submitted to ") >= self.JOBS  # more on a busy machine
            and seen.exists()
            and len(seen.read_text().split()) == OWN_SLOTS,
            "jobs that run and jobs that wait", LONG_S,
        )  # fmt: skip
        server.kill()
        if meanwhile == "end":
            go.touch()
        server.start()
        go.touch()

        said = running.end(LONG_S).ok().output

        assert each_once(seen, self.JOBS), said


def each_once(seen: Path, jobs: int) -> bool:
    return Counter(seen.read_text().split()) == Counter(map(str, range(jobs)))


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[UnicoreX]:
    """A server for many jobs: other tests' would wait behind them at the one that all share."""
    with own_unicorex(tmp_path / "unicorex", SLOTS) as server:
        server.start()
        yield server


@pytest.mark.nightly
def test_many_jobs(at: Make, crowded: UnicoreX, tmp_path: Path) -> None:
    """500 at a time, more than a page of the server's lists."""
    project, seen = at(crowded), tmp_path / "seen"
    project.write("Snakefile", COUNTED.format(jobs=500, seen=seen, wait=":"))
    config = ("--mantik-backend-config", str(project.config))

    running = project.start("--executor", "mantik", "--jobs", "500", *config, plain=True)
    said = running.end(LONG_S).ok().output

    assert each_once(seen, 500), said
    made = {path.stem: path.read_text() for path in (project.directory / "out").iterdir()}
    assert made == {str(n): f"{n}\n" for n in range(500)}
    left = [job for each in project.attempts for job in each.site_jobs if crowded.status(job)]
    assert left == [], "records of jobs that have ended go"


def expire(server: UnicoreX, job: str) -> None:
    """Let a job's life end now, record and directory; the server looks for such jobs seldom."""
    soon = datetime.now(UTC) + timedelta(seconds=2)
    wanted = {"terminationTime": f"{soon:%Y-%m-%dT%H:%M:%S+0000}"}
    assert server.ask(f"jobs/{job}", method="PUT", json=wanted).json() == {"terminationTime": "OK"}
    until(lambda: not server.status(job), "the end of its life", LONG_S)


class TestForgotten:
    """The server forgets a job before its workflow does."""

    def start(self, project: Project, seen: Path, go: Path) -> Running:
        wait = f"until [ -e {go} ]; do sleep 0.2; done"
        project.write("Snakefile", COUNTED.format(jobs=1, seen=seen, wait=wait))
        running = project.start()
        until(lambda: running.output.count(": submitted to ") and seen.exists(), "a job that runs")
        return running

    def test_removed_while_it_runs(self, at: Make, unicorex: UnicoreX, tmp_path: Path) -> None:
        project, seen, go = at(unicorex), tmp_path / "seen", tmp_path / "go"
        running = self.start(project, seen, go)
        ((job,),) = (each.site_jobs for each in project.attempts)
        assert unicorex.ask(f"jobs/{job}", method="DELETE").status_code == 204
        assert not unicorex.status(job)
        go.touch()

        # This server lets what it started run on: the marker counts, not the lack of a record.
        running.end().ok()

        assert each_once(seen, 1)

    def test_expired_while_nobody_looks(self, at: Make, unicorex: UnicoreX, tmp_path: Path) -> None:
        project, seen, go = at(unicorex), tmp_path / "seen", tmp_path / "go"
        self.start(project, seen, go).kill()
        ((job,),) = (each.site_jobs for each in project.attempts)
        go.touch()
        until(lambda: unicorex.status(job) == "SUCCESSFUL", "the job's end")
        expire(unicorex, job)

        project.run("--nolock", "--rerun-incomplete").ok()

        assert each_once(seen, 1)
        assert project.read("out/0.txt") == "0\n"


def test_interrupted(at: Make, unicorex: UnicoreX, tmp_path: Path) -> None:
    """This server says of a job that is to be aborted that it has ended, and lets it run on."""
    project, seen, go = at(unicorex), tmp_path / "seen", tmp_path / "go"
    config = project.config.read_text()
    project.config.write_text(f"{config}  TermGrace: 1s\n")
    project.place = project.place.timed(Timing(marker_grace_s=1))
    wait = f"until [ -e {go} ]; do sleep 0.2; done"
    project.write("Snakefile", COUNTED.format(jobs=1, seen=seen, wait=wait))
    running = project.start()
    until(lambda: running.output.count(": submitted to ") and seen.exists(), "a job that runs")
    running.process.send_signal(signal.SIGINT)
    running.says("but it still runs; cancelling it again", LONG_S)
    go.touch()
    said = running.end(LONG_S).output

    project.run("--nolock", "--rerun-incomplete").ok()

    assert each_once(seen, 1), said


ODD = ["a b", "it's", 'q"q', "#h", "per%41cent", "ü", "back\\slash", "tab\there", "$HOME", "-dash",
       "a;b", "[1]*?", "new\nline", "x" * 200]  # fmt: skip


def test_odd_names(at: Make, unicorex: UnicoreX) -> None:
    """In and out, small ones and some too large for a marker; not all can be in a REST path."""
    project = at(unicorex)
    content = {name: os.urandom(100) for name in ODD}
    large = {name: os.urandom(300_000) for name in ODD[:7]}
    for name, data in content.items():
        project.write(f"in/{name}/{name}")
        (project.directory / "in" / name / name).write_bytes(data)
    for name, data in large.items():
        project.write(f"large/{name}")
        (project.directory / "large" / name).write_bytes(data)
    project.write(
        "Snakefile",
        f"""
        SMALL, LARGE = {ODD!r}, {ODD[:7]!r}
        rule all:
            input: [f"out/{{name}}" for name in SMALL], [f"out.large/{{name}}" for name in LARGE]
        """
        + "".join(
            f"""
        rule small_{number}:
            input: {f"in/{name}/{name}"!r}
            output: {f"out/{name}"!r}
            shell: "cat {{input:q}} > {{output:q}}"
        """
            for number, name in enumerate(ODD)
        )
        + "".join(
            f"""
        rule large_{number}:
            input: {f"large/{name}"!r}
            output: {f"out.large/{name}"!r}
            shell: "cat {{input:q}} > {{output:q}}"
        """
            for number, name in enumerate(ODD[:7])
        ),
    )

    project.run().ok()

    for name, data in content.items():
        assert (project.directory / "out" / name).read_bytes() == data
    for name, data in large.items():
        assert (project.directory / "out.large" / name).read_bytes() == data
