"""What is made once at a site is made once, whatever becomes of the jobs that make it."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs.deployment import (
    CondaFile,
    Image,
    wrap_conda,
    wrap_container,
    wrap_modules,
)
from tests.support import condas
from tests.support.trial import NASTY, Trial, wait_until

PATIENT = "_m_beat_s=0.1 _m_poll_s=0.05 _m_stale_s=60\n"
"""How long jobs wait for one another, of whom nobody dies."""
QUICK = PATIENT.replace("=60", "=2")
"""For one who waits for somebody dead, and nobody else: a busy machine lets a job rest for a while.
"""
MACHINE = os.uname().machine
COMMAND = "set -euo pipefail; tool"


class Node(Trial):
    """A workspace, and jobs in it; `bin` is what this node has beside the system's programs."""

    @property
    def environments(self) -> Path:
        return self.workspace / f".mantik/conda/e1-{MACHINE}"

    def file(self, text: str) -> CondaFile:
        """An environment that is made of a file."""
        self.write(".mantik/files/env.yaml", text)
        return CondaFile("envs/it's.yaml", "e1", ".mantik/files/env.yaml")

    def made(self) -> list[str]:
        """What the tool began to make, in its order."""
        path = self.bin / "made"
        return path.read_text().splitlines() if path.exists() else []

    def ran(self, text: str, **variables: str) -> tuple[int, str, str]:
        """Run a job's text: exit code, standard output and standard error."""
        return ended(self.bash(text, **variables))


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=600)
    return process.returncode, output, errors


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    condas.install(made.bin, "conda")
    yield made
    made.stop()


def conda(environment: CondaFile | str, command: str = COMMAND, times: str = PATIENT) -> str:
    return times + wrap_conda(environment, command, rule="train's", blocked=["R_LIBS"])


def waiting(jobs: Sequence["subprocess.Popen[str]"]) -> int:
    """How many of some jobs wait for another one; all others make something."""
    told = []
    for job in jobs:
        assert job.stderr is not None
        told.append(job.stderr.readline())
    assert all("waits for another job" in line or "makes the" in line for line in told), told
    return sum("waits for another job" in line for line in told)


def test_many_jobs_at_once_make_it_once(node: Node) -> None:
    text = conda(node.file("held one"))
    jobs = [node.bash(text) for _ in range(30)]
    assert waiting(jobs) == 29
    (node.bin / "go").touch()
    results = [ended(job) for job in jobs]
    assert {code for code, *_ in results} == {0}, results
    assert len({output for _, output, _ in results}) == 1
    assert results[0][1] == f"held one from {node.environments}/1\n"
    assert len(node.made()) == 1
    # Who comes later finds it.
    assert node.ran(text)[1] == results[0][1]
    assert len(node.made()) == 1


def test_a_killed_job_leaves_nothing_half_made(node: Node) -> None:
    # Of those who wait one makes it then: the others have to see for a while that it lives.
    text = conda(node.file("endless"), times=QUICK.replace("=2", "=5"))
    killed = node.bash(text)
    wait_until((node.environments / "1/half").exists)
    node.file("quick")
    others = [node.bash(text) for _ in range(8)]
    os.killpg(killed.pid, signal.SIGKILL)
    results = [ended(job) for job in others]
    assert {output for _, output, _ in results} == {f"quick from {node.environments}/2\n"}
    assert len(node.made()) == 2
    assert any("shows no life any more" in errors for *_, errors in results)
    assert not (node.environments / "1").exists()


def test_what_only_the_killed_shell_had_begun_goes_on(node: Node) -> None:
    text = conda(node.file("slow"))
    killed = node.bash(text)
    wait_until((node.environments / "1/half").exists)
    os.kill(killed.pid, signal.SIGKILL)
    assert node.ran(text)[1] == f"slow from {node.environments}/1\n"
    assert len(node.made()) == 1


def test_a_job_that_is_ended_makes_room_at_once(node: Node) -> None:
    text = conda(node.file("endless"))
    told = node.bash(text)
    wait_until((node.environments / "1/half").exists)
    node.file("quick")
    other = node.bash("_m_poll_s=0.05\n" + wrap_conda(node.file("quick"), COMMAND, rule="b"))
    os.killpg(told.pid, signal.SIGTERM)
    assert ended(told)[0] == 143
    code, output, _ = ended(other)  # long before a missing sign of life would tell
    assert (code, output) == (0, f"quick from {node.environments}/2\n")


def test_those_who_waited_for_a_failure_fail_with_it(node: Node) -> None:
    text = conda(node.file("held broken package"))
    jobs = [node.bash(text) for _ in range(6)]
    assert waiting(jobs) == 5
    (node.bin / "go").touch()
    results = [ended(job) for job in jobs]
    assert {code for code, *_ in results} == {1}
    assert {output for _, output, _ in results} == {""}
    for *_, errors in results:
        assert "nothing provides held broken package" in errors
        assert "rule train's: the conda environment envs/it's.yaml could not be made" in errors
        assert "where compute nodes reach no package server" in errors
    assert len(node.made()) == 1
    # The next job tries again.
    node.file("quick")
    code, output, _ = node.ran(text)
    assert code == 0
    assert output.startswith("quick from")


def test_a_slow_one_is_waited_for(node: Node) -> None:
    text = conda(node.file("held x"), times=QUICK.replace("=2", "=4"))
    first = node.bash(text)
    alive = node.environments / "1.lock/alive"
    wait_until(alive.exists)
    second = node.bash(text)
    assert waiting([second]) == 1
    # Many more heartbeats come than there is time for without one.
    wait_until(lambda: int(alive.read_text() or 0) > 60)
    (node.bin / "go").touch()
    assert ended(first)[0] == ended(second)[0] == 0
    assert len(node.made()) == 1


def test_one_that_wakes_up_late_spoils_nothing(node: Node) -> None:
    text = conda(node.file("slow x"), times=QUICK)
    sleeper = node.bash(text)
    wait_until((node.environments / "1/half").exists)
    os.killpg(sleeper.pid, signal.SIGSTOP)
    other = ended(node.bash(text))
    assert other[:2] == (0, f"slow x from {node.environments}/2\n")
    os.killpg(sleeper.pid, signal.SIGCONT)
    assert ended(sleeper)[:2] == other[:2]
    assert not (node.environments / "1").exists()


def test_pins_come_first_and_a_script_follows(node: Node) -> None:
    files = node.write(".mantik/files/pin.txt", "pinned").parent
    (files / "bad.txt").write_text("broken")
    (files / "post.sh").write_text('echo "$0 $CONDA_PREFIX $PWD" > "$CONDA_PREFIX/posted"')
    plain = node.file("plain")
    pins = {"linux-64": ".mantik/files/pin.txt", "linux-aarch64": ".mantik/files/pin.txt"}
    one = CondaFile(plain.label, "p1", plain.file, pins, ".mantik/files/post.sh", "bash -e")
    code, output, errors = node.ran(conda(one))
    assert (code, output.split()[0]) == (0, "pinned"), errors
    prefix = node.workspace / f".mantik/conda/p1-{MACHINE}/1"
    assert (prefix / "posted").read_text() == f"{files}/post.sh {prefix} {node.workspace}\n"
    calls = (node.bin / "calls").read_text().splitlines()
    assert calls[0].startswith("conda create --no-default-packages --quiet --file ")

    two = CondaFile(plain.label, "p2", plain.file, dict.fromkeys(pins, ".mantik/files/bad.txt"))
    code, output, errors = node.ran(conda(two))
    assert (code, output.split()[0]) == (0, "plain"), errors

    (files / "post.sh").write_text("echo why; exit 4")
    three = CondaFile(plain.label, "p3", plain.file, {}, ".mantik/files/post.sh")
    code, output, errors = node.ran(conda(three))
    assert (code, output) == (1, "")
    assert "why" in errors


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("micromamba", ["create --quiet --file", "create --quiet --file", "shell activate"]),
        ("mamba", ["create --quiet --file", "env create --quiet --file", "shell activate"]),
        (
            "conda",
            [
                "create --no-default-packages --quiet --file",
                "env create --no-default-packages --quiet --file",
                "shell.posix activate",
            ],
        ),
    ],
)
def test_each_tool_is_called_in_its_own_words(node: Node, tool: str, words: list[str]) -> None:
    (node.bin / "conda").unlink()
    condas.install(node.bin, tool)
    node.write(".mantik/files/bad.txt", "broken")
    pins = dict.fromkeys(("linux-64", "linux-aarch64", "linux-ppc64le"), ".mantik/files/bad.txt")
    plain = node.file("x")
    code, output, errors = node.ran(conda(CondaFile("e", "e1", plain.file, pins)))
    assert (code, output) == (0, f"x from {node.environments}/1\n"), errors
    calls = [line for line in (node.bin / "calls").read_text().splitlines() if tool in line]
    called = [line for line in calls if line.startswith(f"{tool} ")]
    assert [line.startswith(f"{tool} {w}") for line, w in zip(called, words, strict=True)] == [
        True
    ] * 3, called


def test_environments_that_are_at_the_site(node: Node) -> None:
    for tool in ("conda", "micromamba"):
        prefix = node.bin / f"{tool}-envs/of {tool}"
        (prefix / "conda-meta").mkdir(parents=True)
    command = 'echo "$CONDA_PREFIX ${R_LIBS-unset} $1 ${_m_conda-unset} $(type -t _m_say)"'
    assert node.ran(conda("of conda", command), R_LIBS="x")[1] == (
        f"{node.bin}/conda-envs/of conda unset  unset \n"
    )
    # Each tool knows its own environments.
    assert "of micromamba" not in node.ran(conda("of micromamba", command))[1]
    condas.install(node.bin, "micromamba")
    for name in ("of conda", "of micromamba"):
        assert node.ran(conda(name, command))[1].endswith(f"{name} unset  unset \n")
    code, output, errors = node.ran(conda("it's", command))
    assert (code, output) == (1, "")
    assert "rule train's: there is no conda environment it's on this node" in errors


def test_a_path_needs_no_tool(node: Node) -> None:
    (node.bin / "conda").unlink()
    prefix = node.start_folder / NASTY
    (prefix / "conda-meta").mkdir(parents=True)
    scripts = prefix / "etc/conda/activate.d"
    scripts.mkdir(parents=True)
    (scripts / "a.sh").write_text("export ACTIVATED=yes")
    code, output, errors = node.ran(conda(str(prefix), 'echo "$ACTIVATED $CONDA_PREFIX"'))
    assert (code, output) == (0, f"yes {prefix}\n"), errors


def test_without_a_tool_nothing_runs(node: Node) -> None:
    (node.bin / "conda").unlink()
    code, output, errors = node.ran(conda(node.file("x"), "echo ran"))
    assert (code, output) == (1, "")
    assert "rule train's: no micromamba, mamba or conda found on this node" in errors
    assert "envs/it's.yaml" in errors
    assert "MANTIK_CONDA" in errors
    code, _, errors = node.ran(conda(node.file("x")), MANTIK_CONDA="/not/there")
    assert code == 1
    assert "MANTIK_CONDA names /not/there" in errors
    condas.install(node.start_folder, "micromamba")
    own = str(node.start_folder / "micromamba")
    code, output, errors = node.ran(conda(node.file("x")), MANTIK_CONDA=own)
    assert (code, output) == (0, f"x from {node.environments}/1\n"), errors


MODULE = """
module() {
  case $1 in
    purge) unset LOADED ;;
    load) shift; for m; do [ "$m" != bad ] || return 1; export LOADED="$LOADED$m,"; done ;;
  esac
}
"""


def test_modules(node: Node) -> None:
    init = node.start_folder / "module.sh"
    init.write_text(MODULE)
    command = "set -u; module load late; echo $LOADED"
    text = wrap_modules(["A/1", "B C"], command, rule="x")
    assert node.ran(text, BASH_ENV=str(init), LOADED="before,")[1] == "A/1,B,C,late,\n"
    code, output, errors = node.ran(
        wrap_modules(["A", "bad"], command, rule="x"), BASH_ENV=str(init)
    )
    assert (code, output) == (1, "")
    assert "rule x: not all modules could be loaded: A bad" in errors
    # Where a login shell would define it.
    (node.start_folder / "init").mkdir()
    (node.start_folder / "init/bash").write_text(MODULE)
    for place in ("MODULESHOME", "LMOD_PKG"):
        assert node.ran(text, **{place: str(node.start_folder)})[1] == "A/1,B,C,late,\n"


ENGINE = """#!/bin/bash
printf '%s\\n' "${0##*/}" "$@" >> "${0%/*}/calls"
case $1 in
  pull) sleep 0.3; [[ $3 != *bad* ]] || { echo "FATAL: no such image"; exit 255; }
    echo "$3" > "$2" ;;
  exec) while [ "$1" != bash ]; do shift; done; exec "$@" ;;
esac
"""


def test_an_image_is_fetched_once(node: Node) -> None:
    node.program("apptainer", ENGINE)
    image = Image("docker://a/b:1", "i1", ("--nv", "-B", "$DATA:/d"), "--env 'A=b c'")
    text = PATIENT + wrap_container(image, "bash -c 'echo in; pwd'", rule="x")
    results = [ended(job) for job in [node.bash(text, DATA="/p d") for _ in range(5)]]
    assert {result[:2] for result in results} == {(0, f"in\n{node.workspace}\n")}, results
    sif = f"{node.workspace}/.mantik/images/i1-{MACHINE}/1.sif"
    assert Path(sif).read_text() == "docker://a/b:1\n"
    calls = (node.bin / "calls").read_text()
    assert calls.count(f"pull\n{sif}\ndocker://a/b:1\n") == 1
    bound = str(node.workspace).replace(",", "\\,")
    assert (
        f"exec\n--home\n{node.workspace}\n--bind\n{bound}\n--pwd\n{node.workspace}\n--nv\n-B\n"
        f"/p d:/d\n--env\nA=b c\n{sif}\nbash\n-c\necho in; pwd\n"
    ) in calls
    code, output, errors = node.ran(
        PATIENT + wrap_container(Image("docker://bad", "i2"), "bash -c 'echo in'", rule="x")
    )
    assert (code, output) == (1, "")
    assert "FATAL: no such image" in errors
    assert "apptainer pull FILE.sif URL" in errors


def test_an_image_that_is_a_file(node: Node) -> None:
    image = wrap_container(Image("img/it's.sif"), "bash -c 'echo in'", rule="x")
    assert "neither apptainer nor singularity" in node.ran(image)[2]
    node.program("singularity", ENGINE)
    assert f"there is no image {node.workspace}/img/it's.sif" in node.ran(image)[2]
    node.write("img/it's.sif")
    assert node.ran(image)[1] == "in\n"
    for directory in ("/tmp", "/var/tmp", "/not/there", "/usr/lib"):
        assert node.ran(image, TMPDIR=directory)[1] == "in\n"
    calls = (node.bin / "calls").read_text()
    assert calls.count("--bind\n") == 6
    assert calls.count("--bind\n/usr/lib\n") == 1
    assert (
        "there is no image /not/there"
        in node.ran(wrap_container(Image("/not/there"), "bash -c :", rule="x"))[2]
    )
