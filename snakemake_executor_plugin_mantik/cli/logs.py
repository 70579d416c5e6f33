"""`smk-mantik logs` and `exec`: what a job writes, and commands beside it while it runs."""

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..common.errors import UserError, printable
from ..common.state_directory import STATE
from ..connections.connect import site_visits
from ..jobs.paths import display_path
from ..journal import AttemptRecord, is_controlled, read_history
from ..views.sites import JobLog, run_beside
from ..views.workflow import find_attempt
from .shared import Follow, Sites, Workdir, say, warn


def logs(
    job: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB",
            help="A job by name, by rule and wildcards (train sample=a), or by id, as"
            " `smk-mantik jobs` shows it; or by the path of one of its outputs.",
        ),
    ],
    *,
    follow: Follow = False,
    log: Annotated[
        bool, typer.Option("--log", help="Show the log file of the rule, not the job's output.")
    ] = False,
    directory: Workdir = Path(),
    site: Sites = None,
) -> None:
    """Show what a job writes, while it runs and afterwards.

    That of a running job is read from its site. The output of a job that has ended is here. Of a
    job in segments, it is that of all segments so far.
    """
    found = find_attempt(directory / STATE, " ".join(job))
    files = found.log_files if log else ("",)
    if not files:
        raise UserError(
            "its rule has no log: file",
            where=found.name,
            do="Leave out --log to see its output",
        )
    if follow and len(files) > 1:
        raise UserError(
            f"its rule has several log files: {', '.join(map(display_path, files))}",
            where=found.name,
            do="Leave out --follow to see them all, or --log to follow its output",
        )
    said = False

    def write(text: str) -> None:
        nonlocal said
        said = said or bool(text)
        typer.echo(printable(text), nl=False)

    state, visit = directory / STATE, site_visits(directory, site or [])

    def copy(file: str, segment: AttemptRecord | None = None) -> None:
        source = JobLog(
            directory,
            lambda: segment or _last(state, found),
            lambda record: visit(record.site, True),
            is_controlled=lambda: is_controlled(state),
            is_over=lambda: not _last(state, found).may_run,
            file=file,
        )
        asyncio.run(source.copy(write, follow=follow and segment is None))

    before = [] if log else _segments_before(state, found)  # a rule's log file goes on by itself
    for segment in before:
        say(f"==> {segment.part} <==")
        copy("", segment)
    for file in files:
        if len(files) > 1 or before:
            say(f"==> {display_path(file) if file else found.part} <==")
        copy(file)
    last = _last(state, found)
    if follow and last.outcome:
        warn(f"{last.name}: {last.outcome}")
    elif not said:
        warn(_silent(last))


def exec_(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="A running job, as for smk-mantik logs; in quotes.")
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="A command and its arguments, or one line of bash in quotes."
        ),
    ],
    *,
    directory: Workdir = Path(),
    site: Sites = None,
) -> None:
    """Run a command beside a running job: `nvidia-smi`, `py-spy dump`, `tail`.

    It runs on the job's first node, in the workspace and outside the container, within ten seconds
    or so, and may take five minutes. The exit code is the command's.
    """
    found = find_attempt(directory / STATE, job)
    if not found.may_run:
        raise UserError(
            f"it does not run any more ({found.outcome.rstrip('.')})",
            where=found.name,
            do="See what runs with smk-mantik jobs",
        )
    line = command[0] if len(command) == 1 else shlex.join(command)

    async def ask() -> tuple[bytes, int]:
        async with site_visits(directory, site or [])(found.site, True) as opened:
            return await run_beside(opened, found, line)

    output, code = asyncio.run(ask())
    typer.echo(printable(output.decode(errors="replace")), nl=False)
    raise typer.Exit(code)


def _last(state: Path, found: AttemptRecord) -> AttemptRecord:
    """Return an attempt as it is now, or a later one of the same job that may run."""
    same = [r for r in read_history(state) if r.job == found.job]
    now = next(record for record in same if record.id == found.id)
    return next((r for r in same if r.may_run and not now.may_run and r.created > now.created), now)


def _segments_before(state: Path, found: AttemptRecord) -> list[AttemptRecord]:
    """Return the segments that an attempt goes on from, the first one first."""
    known = {record.id: record for record in read_history(state)}
    chain, record = list[AttemptRecord](), known.get(found.follows)
    while record is not None:
        chain.insert(0, record)
        record = known.get(record.follows)
    return chain


def _silent(record: AttemptRecord) -> str:
    if not record.site_jobs and not record.outcome:
        return f"{record.name}: it has not been submitted yet."
    if record.may_run:
        return f"{record.name}: there is no output at {record.site} yet."
    return f"{record.name}: it wrote nothing ({record.outcome.rstrip('.')})."
