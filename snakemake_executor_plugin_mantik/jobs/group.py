"""Render the program of a group: one bash script that runs many jobs on one node (`group.sh.j2`).

It runs as the command of a job. A member starts as soon as the members that it needs have
succeeded. Independent members run at the same time as far as the group's resources allow. Each line
of their output begins with the member's name.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .script import COMMAND_BYTES, encode_text, export_lines, path_argument, shell_quote
from .templates import load_template
from .tmpdir import make_tmpdir_code

TEMPORARY = ("TMPDIR", "TMP", "TEMPDIR", "TEMP")
"""Variables with the directory for temporary files."""


@dataclass(frozen=True)
class GroupMember:
    """One job of a group. Paths are relative to the workspace.

    Attributes:
        name: readable name, the prefix of each line of its output.
        commands: arguments of the shell's `-c`, run one after the other; empty if the member runs
            nothing.
        shell: base name of the shell.
        variables: environment variables of the commands. TMPDIR is made on the node
            (`tmpdir`), and the other variables for temporary files get its value.
        settled: those other variables that keep their own value.
        team: members of the same team start at the same time; teams are numbered in the order of
            their start.
        service: whether it runs until all other members of its team have ended.
        waits: outputs of its service: the member starts when they exist.
        outputs: files that must exist in the end.
        touches: files to make or touch when the commands have succeeded.
        measured: file for measurements of the commands (`Benchmark.path`); empty for none.
        benchmark: the benchmark file (`Benchmark.file`), if something is measured.
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
    benchmark: str = ""


@dataclass(frozen=True)
class GroupTeam:
    """Members that start at the same time; most teams have only one.

    Attributes:
        needs: numbers of the members that must succeed first.
        takes: the team's share of each limit, in the order of the limits.
    """

    needs: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()


@dataclass(frozen=True)
class TemporaryFile:
    """A file or directory that is removed when its readers have succeeded, or the group ends.

    Attributes:
        path: relative to the workspace.
        readers: numbers of the members that make and read it.
    """

    path: str
    readers: tuple[int, ...]


@dataclass(frozen=True)
class GroupProgram:
    """Everything that the script of a group is made from.

    Attributes:
        members, teams: in the order of their numbers.
        report: file that lists the members that failed by themselves: number and exit code, one
            member a line.
        limits: what the teams that run at the same time may take together, CPUs first; a team that
            takes more runs alone.
        pipes: named pipes between members.
        temporary: files and directories to remove.
        keep_going: whether members that do not depend on a failed one still start.
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
    """Render the bash script of a group; the same group gives the same script.

    Raises:
        UserError: for text that no script can hold (`jobs.script.render_script`).
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
    variables = dict(member.variables)
    tmpdir = variables.pop("TMPDIR", "")
    return {
        "title": " ".join(member.name.split()),
        "variables": export_lines(variables),
        "temporary": "".join(
            f' {name}="$TMPDIR"' for name in TEMPORARY[1:] if name not in member.settled
        ),
        "tmpdir": tmpdir
        and make_tmpdir_code(tmpdir, '"$PWD"', "{ _m_say {}; return 1; }").replace("\n", "\n  "),
        "waits": [shell_quote(path_argument(path), "an input") for path in member.waits],
        "touches": [shell_quote(path_argument(path), "an output") for path in member.touches],
        "outputs": "".join(
            f" {shell_quote(path_argument(path), 'an output')}" for path in member.outputs
        ),
        "measured": member.measured
        and shell_quote(path_argument(member.measured), "the measurements"),
        "benchmark": member.measured
        and shell_quote(path_argument(member.benchmark), "the benchmark"),
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
    """Escape the text for the right side of sed's `s/…/…/`."""
    return "".join(f"\\{sign}" if sign in "\\/&" else sign for sign in " ".join(text.splitlines()))
