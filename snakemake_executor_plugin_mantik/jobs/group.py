"""Write the program of a group: one bash script that runs many jobs on one node (`group.sh`).

It runs as the command of a job. A member starts as soon as the members that it needs have
succeeded. Independent members run at the same time as far as the group's resources allow. Each line
of their output begins with the member's name.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .library import use_library
from .quoting import quote_paths, quote_words
from .script import export_lines, tmpdir_parts

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
class GroupProgram:
    """Everything that the script of a group is made from.

    Attributes:
        members: in the order of their numbers.
        teams: members that start at the same time; most have only one. For each, the numbers of the
            members that must succeed first, and its share of each limit, in the order of these.
        report: file that lists the members that failed by themselves: number and exit code, one
            member a line.
        limits: what the teams that run at the same time may take together, CPUs first; a team that
            takes more runs alone.
        pipes: named pipes between members.
        temporary: files and directories that are removed when their readers have succeeded, or the
            group ends: paths, and the numbers of the members that make and read them.
        keep_going: whether members that do not depend on a failed one still start.
        service_wait_s: seconds that a service has to make its output.
    """

    members: Sequence[GroupMember]
    teams: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    report: str
    limits: tuple[int, ...]
    pipes: tuple[str, ...] = ()
    temporary: tuple[tuple[str, tuple[int, ...]], ...] = ()
    keep_going: bool = False
    service_wait_s: int = 5


def render_group(group: GroupProgram) -> str:
    """Write the bash script of a group; the same group gives the same script."""
    members, teams = group.members, group.teams
    numbers = range(len(members))
    arrays = {
        "name": shlex.join(member.name for member in members),
        "prefix": shlex.join(_in_sed(f"[{member.name}] ") for member in members),
        "team": _numbers(member.team for member in members),
        "service": _numbers(int(member.service) for member in members),
        "followers": shlex.join(
            _numbers(n for n, (needs, _) in enumerate(teams) if number in needs)
            for number in numbers
        ),
        "members": shlex.join(
            _numbers(n for n, member in enumerate(members) if member.team == number)
            for number in range(len(teams))
        ),
        "awaits": _numbers(len(needs) for needs, _ in teams),
        "takes": shlex.join(_numbers(takes) for _, takes in teams),
        "limit": _numbers(group.limits),
        "pipes": quote_paths(group.pipes),
        "temporary": quote_paths(path for path, _ in group.temporary),
        "readers": shlex.join(_numbers(readers) for _, readers in group.temporary),
    }
    return "\n".join(
        [
            "#!/bin/bash",
            "# Runs a group of jobs on one node; the library says what these data mean.",
            *(f"_m_{name}=({words})" for name, words in arrays.items()),
            f"_m_report={quote_paths([group.report], 'the report')}",
            f"_m_keep_going={'yes' if group.keep_going else 'no'}",
            f"_m_service_wait_s={group.service_wait_s}",
            *(line for n, member in enumerate(members) for line in _member(n, member)),
            f"{use_library()} && _m_run_group",
            "",
        ]
    )


def _member(number: int, member: GroupMember) -> Iterator[str]:
    """Yield the function that runs a member, or fails as soon as a part of it does."""
    variables = dict(member.variables)
    tmpdir = variables.pop("TMPDIR", "")
    lines = [f"export {name}={value}" for name, value in export_lines(variables)]
    if tmpdir:
        parts = quote_words(tmpdir_parts(tmpdir), "a directory")
        names = [name for name in TEMPORARY[1:] if name not in member.settled]
        lines.append(f'_m_make_tmpdir "$PWD" {parts} || {{ _m_say "$_m_reason"; return 1; }}')
        lines.append(" ".join(["export", "TMPDIR", *(f'{name}="$TMPDIR"' for name in names)]))
    lines += [f"_m_wait_for_service {quote_paths([p], 'an input')}" for p in member.waits]
    measures = ""
    if member.measured:
        measures = quote_paths([member.measured, member.benchmark], "the measurements")
        lines.append(f": > {quote_paths([member.measured], 'the measurements')}")
    for text in member.commands:
        words = quote_words([member.shell, text], "the command")
        lines.append(f"_m_run_member {words} {measures}".rstrip())
    lines += [f"_m_touch {quote_paths([path], 'an output')}" for path in member.touches]
    if member.outputs:
        lines.append(f"_m_check_made {quote_paths(member.outputs, 'an output')}")
    yield f"_m_member_{number}() {{  # {' '.join(member.name.split())}"
    yield from (f"  {line} || return" for line in lines or [":"])
    yield "}"


def _numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _in_sed(text: str) -> str:
    """Escape the text for the right side of sed's `s/…/…/`."""
    return "".join(f"\\{sign}" if sign in "\\/&" else sign for sign in " ".join(text.splitlines()))
