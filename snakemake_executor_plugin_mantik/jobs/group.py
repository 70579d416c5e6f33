"""Renders the program of a group: one bash script that runs many jobs on one node (`group.sh.j2`).

It runs as the command of a job. Members start as soon as those that they need have succeeded,
independent ones at the same time as far as the group's resources allow. What they say is told apart
by their names.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from snakemake_executor_plugin_mantik.jobs.script import (
    COMMAND_BYTES,
    encode_text,
    export_lines,
    path_argument,
    shell_quote,
)
from snakemake_executor_plugin_mantik.jobs.templates import load_template

TEMPORARY = ("TMPDIR", "TMP", "TEMPDIR", "TEMP")
"""The variables that tell where temporary files go."""


@dataclass(frozen=True)
class GroupMember:
    """One job of a group. Paths are relative to the workspace.

    Attributes:
        name: readable, it stands before each line that the member says.
        commands: what the shell is given after `-c`, one after the other; none for a member that
            runs nothing.
        shell: base name of the shell.
        variables: environment variables of the commands. Where TMPDIR is among them, the others
            that tell where temporary files go follow it.
        settled: those of the others that do not.
        team: members of the same team start at the same time; teams are numbered in the order in
            which they are to start.
        service: whether it runs until all other members of its team have ended.
        waits: what its service makes: it starts when they are there.
        outputs: what must be there in the end.
        touches: files that are made or touched when the commands have succeeded.
        measured: where measurements of the commands go, empty for none (`Benchmark.path`).
    """

    name: str
    commands: tuple[str, ...]
    team: int
    shell: str = "bash"
    variables: Mapping[str, str] = field(default_factory=dict)
    settled: tuple[str, ...] = ()
    service: bool = False
    waits: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()
    measured: str = ""


@dataclass(frozen=True)
class GroupTeam:
    """Members that start at the same time: most have one only.

    Attributes:
        needs: numbers of the members that must have succeeded before.
        takes: how much it takes of each limit, in their order.
    """

    needs: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()


@dataclass(frozen=True)
class TemporaryFile:
    """A file or directory that does not outlive the group.

    Attributes:
        path: relative to the workspace.
        readers: numbers of the members that make and read it.
    """

    path: str
    readers: tuple[int, ...]


@dataclass(frozen=True)
class GroupProgram:
    """A group, complete.

    Attributes:
        members, teams: by their numbers.
        report: where it is told which members failed: their number and exit code, one a line.
        limits: what the teams that run at the same time may take together, CPUs first.
        pipes: named pipes between members.
        temporary: what is removed when it was read.
        keep_going: whether what does not depend on a member that failed still starts.
        service_wait_s: seconds that a service has to make its output.
    """

    members: Sequence[GroupMember]
    teams: Sequence[GroupTeam]
    report: str
    limits: tuple[int, ...]
    pipes: tuple[str, ...] = ()
    temporary: tuple[TemporaryFile, ...] = ()
    keep_going: bool = False
    service_wait_s: int = 5


def render_group(group: GroupProgram) -> str:
    """The bash script of a group; the same group gives the same script.

    Raises:
        UserError: for what no script can carry (`jobs.script.render`).
    """
    return load_template("group.sh.j2").render(
        names=_words(member.name for member in group.members),
        prefixes=_words(_in_sed(f"[{member.name}] ") for member in group.members),
        teams=_numbers(member.team for member in group.members),
        services=_numbers(int(member.service) for member in group.members),
        followers=_words(
            _numbers(n for n, team in enumerate(group.teams) if number in team.needs)
            for number in range(len(group.members))
        ),
        of_teams=_words(
            _numbers(n for n, member in enumerate(group.members) if member.team == number)
            for number in range(len(group.teams))
        ),
        awaits=_numbers(len(team.needs) for team in group.teams),
        takes=_words(_numbers(team.takes) for team in group.teams),
        limits=_numbers(group.limits),
        pipes=_paths(group.pipes),
        temporary=_paths(temporary.path for temporary in group.temporary),
        readers=_words(_numbers(temporary.readers) for temporary in group.temporary),
        report=shell_quote(path_argument(group.report), "the report"),
        keep_going="yes" if group.keep_going else "no",
        service_wait_s=group.service_wait_s,
        measured=any(member.measured for member in group.members),
        members=[_member(number, member) for number, member in enumerate(group.members)],
    )


def _member(number: int, member: GroupMember) -> dict[str, object]:
    own_temporary = "TMPDIR" in member.variables
    return {
        "title": " ".join(member.name.split()),
        "variables": export_lines(member.variables),
        "temporary": "".join(
            f' {name}="$TMPDIR"'
            for name in TEMPORARY[1:]
            if own_temporary and name not in member.settled
        ),
        "waits": [shell_quote(path_argument(path), "an input") for path in member.waits],
        "touches": [shell_quote(path_argument(path), "an output") for path in member.touches],
        "outputs": "".join(
            f" {shell_quote(path_argument(path), 'an output')}" for path in member.outputs
        ),
        "measured": member.measured
        and shell_quote(path_argument(member.measured), "the benchmark"),
        "commands": [
            {
                "text": shell_quote(text, "the command"),
                "shell": shell_quote(member.shell, "the shell"),
                "file": f"command.{number}.{run}"
                if len(encode_text(text, "the command")) > COMMAND_BYTES
                else "",
            }
            for run, text in enumerate(member.commands)
        ],
    }


def _words(texts: Iterable[str]) -> str:
    return " ".join(shlex.quote(text) for text in texts)


def _numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _paths(paths: Iterable[str]) -> str:
    return " ".join(shell_quote(path_argument(path), "a path") for path in paths)


def _in_sed(text: str) -> str:
    """The text as the right side of sed's `s/…/…/`."""
    return "".join(f"\\{sign}" if sign in "\\/&" else sign for sign in " ".join(text.splitlines()))
