"""A group of jobs in one script, with a real bash: order, limits, failures, pipes, services."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs.group import (
    GroupMember,
    GroupProgram,
    render_group,
)
from tests.support.trial import Trial, wait_until

WAIT_S = 600


class Place(Trial):
    """A workspace in which groups run."""

    def begin(self, group: GroupProgram) -> "subprocess.Popen[str]":
        script = self.workspace / "group.sh"
        script.write_bytes(render_group(group).encode("utf-8", "surrogateescape"))
        self.scratch = self.bin / "scratch"
        self.scratch.mkdir()
        return self.bash("exec bash group.sh 2>&1", TMPDIR=str(self.scratch))

    def ran(self, group: GroupProgram) -> tuple[int, str]:
        """Exit code and log. It waits for all that holds the log open: nothing may be left."""
        process = self.begin(group)
        said, _ = process.communicate(timeout=WAIT_S)
        assert list(self.scratch.iterdir()) == [], said
        return process.returncode, said

    def read(self, path: str) -> str:
        return (self.workspace / path).read_text()

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.workspace / path)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.stop()


def member(name: str, command: str = "", team: int = 0, **values: object) -> GroupMember:
    commands = (f"set -euo pipefail; {command}",) if command else ()
    return replace(GroupMember(name, commands, team), **values)  # type: ignore[arg-type]


def singles(*members: GroupMember, needs: dict[int, tuple[int, ...]] | None = None) -> GroupProgram:
    """A group in which each member is a team of its own."""
    numbered = [replace(each, team=number) for number, each in enumerate(members)]
    teams = [((needs or {}).get(number, ()), (1,)) for number in range(len(members))]
    return GroupProgram(numbered, teams, "report dir/report", (100,))


def team(*members: GroupMember, needs: int | None = None, **values: object) -> GroupProgram:
    """A group in which all members start at the same time, but for one that all others need."""
    first = [] if needs is None else [((), (1,))]
    numbered = [replace(m, team=int(bool(first) and n != needs)) for n, m in enumerate(members)]
    teams = [*first, (() if needs is None else (needs,), (2,))]
    return replace(GroupProgram(numbered, teams, "report", (100,)), **values)  # type: ignore[arg-type]


MEET = "touch {me}; for i in {{1..6000}}; do [ -e {other} ] && exit; sleep 0.1; done; exit 9"
"""Succeeds only where another member runs at the same time."""


def test_a_diamond(place: Place) -> None:
    group = singles(
        member("top", "echo t > top", outputs=("top",)),
        member("left", MEET.format(me="l", other="r") + "\n", outputs=("l",)),
        member("right", MEET.format(me="r", other="l"), outputs=("r",)),
        member("bottom", "cat top > bottom; ls l r", outputs=("bottom",)),
        needs={1: (0,), 2: (0,), 3: (1, 2)},
    )
    code, said = place.ran(group)
    assert code == 0, said
    assert place.read("bottom") == "t\n"
    assert "[bottom] l\n[bottom] r\n" in said
    assert not place.exists("report dir/report")


def test_limits_keep_members_apart(place: Place) -> None:
    apart = "mkdir here; sleep 0.3; rmdir here"  # fails where another one does the same
    group = replace(
        singles(member("a", apart), member("b", apart), member("c", apart)), limits=(3, 10)
    )
    teams = [((), (number, 1)) for number in (2, 2, 50)]  # the last is more than all
    code, said = place.ran(replace(group, teams=teams))
    assert (code, said.count(": succeeded after")) == (0, 3), said


def test_a_failure_stops_what_depends_on_it(place: Place) -> None:
    group = singles(
        member("bad x=1", "echo oh; exit 7"),
        member("runs on", "sleep 1; touch on"),
        member("after", "touch after"),
        needs={2: (0,)},
    )
    code, said = place.ran(group)
    assert code == 7
    assert place.exists("on")
    assert not place.exists("after")
    assert place.read("report dir/report") == "0 7\n"
    assert "mantik: bad x=1: failed with exit code 7" in said
    assert "of 3 members 1 succeeded, 1 failed and 1 did not start" in said


@pytest.mark.parametrize("keep_going", [False, True])
def test_what_is_independent_of_a_failure(place: Place, *, keep_going: bool) -> None:
    group = replace(
        singles(
            member("bad", "exit 7"),
            member("waits", "touch waits"),
            member("after both", "touch both"),
            needs={2: (0, 1)},
        ),
        limits=(1,),
        keep_going=keep_going,
    )
    code, said = place.ran(group)
    assert code == 7, said
    assert place.exists("waits") is keep_going
    assert not place.exists("both")


def test_a_missing_output_is_a_failure(place: Place) -> None:
    group = singles(
        member("a", "touch one", outputs=("one", "it's two")), member("b", "x"), needs={1: (0,)}
    )
    code, said = place.ran(group)
    assert code == 1
    assert "[a] mantik: it ended with 0 but did not make it's two" in said


def test_touched_files_are_there_for_those_who_need_them_and_some_run_nothing(place: Place) -> None:
    group = singles(
        member("a", ":", touches=("dir/-done",)), member("b", "ls dir/-done"), member("all"),
        member("c"), needs={1: (0,), 2: (1,)},
    )  # fmt: skip
    assert place.ran(group)[0] == 0


def test_variables_of_each_member(place: Place) -> None:
    show = 'echo "$OMP_NUM_THREADS $TMPDIR $TMP"'
    mine = {"OMP_NUM_THREADS": "4", "TMPDIR": str(place.workspace)}
    group = singles(
        member("a", show, variables=mine),
        member("b", show, variables={"OMP_NUM_THREADS": "1", "TMPDIR": "new/$OMP_NUM_THREADS"}),
        member("c", 'echo "$0 $TMPDIR"', shell="sh", commands=('echo "$0 $TMPDIR"',)),
    )
    code, said = place.ran(group)
    assert code == 0, said
    assert f"[a] 4 {str(place.workspace).splitlines()[0]}" in said
    assert (place.workspace / "new/1").is_dir()
    assert f"[c] sh {place.scratch}" in said


def test_a_long_command_and_a_nasty_name(place: Place) -> None:
    long = f'# {"x" * 90_000}\necho "$BASH_VERSION"'
    code, said = place.ran(singles(member("a/b & \\c\n%", long)))
    assert code == 0, said
    assert "[a/b & \\c %] 5." in said


def test_temporary_files_go_when_they_were_read(place: Place) -> None:
    place.write("t dir/old")
    group = singles(
        member("a", "mkdir -p 't dir'; ls 't dir'; touch 't dir/new' t2"),
        member("b", "cp 't dir/new' b"),
        member("c", "[ ! -e 't dir' ]; [ -e t2 ]"),
        needs={1: (0,), 2: (1,)},
    )
    temporary = (("t dir", (0, 1)), ("t2", (0, 2)))
    code, said = place.ran(replace(group, temporary=temporary))
    assert code == 0, said
    assert "old" not in said
    assert place.exists("b")
    assert not place.exists("t2")


def test_a_pipe(place: Place) -> None:
    group = team(
        member("from", "seq 20000 > 'a pipe'"),
        member("to", "sort -n 'a pipe' | tail -n 1 > last", outputs=("last",)),
        member("before", "touch before"),
        needs=2,
        pipes=("a pipe",),
    )
    code, said = place.ran(group)
    assert code == 0, said
    assert place.read("last") == "20000\n"
    assert not place.exists("a pipe")
    assert said.index("before: succeeded") < said.index("from: starts")


@pytest.mark.parametrize("failing", ["from", "to"])
def test_a_pipe_whose_other_end_fails(place: Place, failing: str) -> None:
    fail = "exit 3"
    group = team(
        member("from", fail if failing == "from" else "exec 3> p; sleep 600"),
        # Its shell dies of TERM while a child of it goes on, unless all are told to end.
        member("to", fail if failing == "to" else "sleep 600 & cat p; wait"),
        pipes=("p",),
    )
    code, said = place.ran(group)
    assert code == 3, said
    assert place.read("report").split()[1] == "3"
    assert "was ended, since what it shares a pipe or service with failed" in said


SERVICE = (
    "trap 'echo ended > ended; exit' TERM; sleep 0.3; touch 'a socket'; while :; do sleep 1; done"
)


def test_a_service(place: Place) -> None:
    group = team(
        member("service", SERVICE, service=True),
        member("one", "ls 'a socket'", waits=("a socket",)),
        member("two", "sleep 1; [ ! -e ended ]"),
        temporary=(("a socket", (0, 1)),),
    )
    code, said = place.ran(group)
    assert code == 0, said
    assert place.read("ended") == "ended\n"
    assert "the service ended by itself" not in said


def test_a_service_that_does_not_come(place: Place) -> None:
    group = team(
        member("service", "exit 5", service=True), member("one", ":", waits=("s",)),
        service_wait_s=1,
    )  # fmt: skip
    code, said = place.ran(group)
    assert code == 1
    assert "service: the service ended by itself, with 5" in said
    assert "[one] mantik: its service has not made ./s within 1 s" in said


def test_measured_members(place: Place) -> None:
    two = ("echo one", "exit 0")
    sampled = 'until [ -s "${TMPDIR:-/tmp}"/mantik.*/"sample.$PPID" ]; do sleep 0.1; done'
    group = singles(
        member("a", commands=two, measured="bench/a", benchmark="b/a.tsv"),
        member("b", sampled, measured="bench/b", benchmark="b/b.tsv"),
    )
    (place.workspace / "bench").mkdir()
    code, said = place.ran(group)
    assert code == 0, said
    assert len(place.read("bench/a").splitlines()) == 2
    assert len(place.read("bench/b").split()) == 10


def test_term_reaches_all_members(place: Place) -> None:
    careful = (
        "trap 'sleep 1; touch saved-$n; exit 0' TERM; touch up-$n; while :; do sleep 0.1; done"
    )
    group = singles(
        member("a", f"n=a; {careful}"),
        member("b", "touch up-b; sleep 600"),
        member("c", "touch c"),
        needs={2: (0,)},
    )
    process = place.begin(group)
    wait_until(lambda: place.exists("up-a") and place.exists("up-b"))
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 143, said
    assert place.exists("saved-a")
    assert not place.exists("c")
    assert "a: succeeded after" in said
    assert "b: failed with exit code 143" in said


def test_a_member_that_is_killed_with_all_of_it(place: Place) -> None:
    code, said = place.ran(singles(member("a", "kill -9 $PPID")))
    assert code == 137, said
