"""`smk-mantik cancel`, `unlock` and `clean`: end what earlier runs left, without Snakemake."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from ..common.errors import MantikError, UserError
from ..common.humanize import humanize_count, humanize_size
from ..connections.connect import ReconnectedSite, open_journal, reach_sites
from ..engine.cancel import CANCEL_WAIT_S
from ..engine.clear import Clearer, WorkspacePart
from ..engine.messages import waiting_message
from ..jobs.paths import display_path
from ..journal import AttemptRecord, AttemptState, Journal, RemoteOutput, read_history
from ..staging.transfers import OutputStaging
from ..storage.copies import is_here
from ..views.workflow import is_meant, list_names
from .shared import NOT_DONE, Sites, Workdir, Yes, confirm, say


def cancel(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB…]",
            help="Jobs by name, id at the site, or rule, as `smk-mantik jobs` shows them.",
        ),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All jobs that may still run.")] = False,
    directory: Workdir = Path(),
    site: Sites = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait until the sites confirm.")] = 2
    * CANCEL_WAIT_S,
) -> None:
    """Cancel jobs of a workflow, and wait until their sites confirm it.

    Snakemake must not be running in the directory. Jobs that have already succeeded stay: the next
    run fetches their outputs. The exit code is 1 if a job may still run.
    """
    with closing(open_journal(directory, say)) as journal:
        if not (records := _chosen(journal, jobs or [], every=every)):
            say("No job is at a site.")
        elif asyncio.run(_cancel(journal, site or [], records, wait)):
            raise typer.Exit(NOT_DONE)


def _chosen(journal: Journal, wanted: Sequence[str], *, every: bool) -> list[AttemptRecord]:
    """Return those of the planned attempts, and of those that may wait or run, that are named."""
    there = [
        record
        for record in read_history(journal.path.parent)
        if record.may_run or record.state is AttemptState.PLANNED
    ]
    known = list_names(record.name for record in there) or " none"
    if every or not there:
        if wanted and every:
            raise UserError("JOB and --all exclude each other", do="Name jobs, or use --all")
        if not wanted:
            return there
    if not wanted:
        raise UserError(
            f"no job is named; these may still run:{known}", do="Name jobs, or use --all"
        )
    found = {word: [r for r in there if is_meant(word, r)] for word in wanted}
    if lacking := [word for word, records in found.items() if not records]:
        raise UserError(
            f"nothing was cancelled: no job at a site is named {', '.join(lacking)}; these may"
            f" still run:{known}",
            do="Use the names that smk-mantik jobs shows",
        )
    chosen = {record.id for records in found.values() for record in records}
    return [record for record in there if record.id in chosen]


async def _cancel(
    journal: Journal, given: Sequence[str], records: Sequence[AttemptRecord], wait_s: float
) -> list[AttemptRecord]:
    names = sorted({record.site for record in records})
    async with reach_sites(journal, names, given, say) as there:
        left = await cancel_attempts(there, records, wait_s)
        now = {record.id: record for record in read_history(journal.path.parent)}
        unconfirmed = {record.id for record in left}
        for record in records:
            if record.id not in unconfirmed:
                say(_ended(record.state, now[record.id]))
        cancelled = {r.id: r.name for r in records if now[r.id].outcome == "cancelled"}
        for record in now.values():  # makers come first
            if record.may_run and (lacking := [*filter(None, map(cancelled.get, record.before))]):
                cancelled[record.id] = record.name
                ids = ", ".join(record.site_jobs)
                waits = waiting_message(record.name, record.site, ids or record.id, lacking)
                say(f"{waits} It will not run.")
    return left


async def cancel_attempts(
    there: ReconnectedSite, records: Sequence[AttemptRecord], wait_s: float
) -> list[AttemptRecord]:
    """Cancel attempts and wait for their ends; report and return those that may still run.

    The wait takes up to `wait_s` seconds, and longer for many attempts.
    """
    within = [record for record in records if there.holds(record)]
    beyond = [record for record in records if not there.holds(record)]
    for record in beyond:
        say(f"{record.name}: could not be cancelled. {there.unreached(record)}")
    left = await asyncio.gather(
        *(
            runner.canceller.cancel([r for r in within if r.site == name], wait_s)
            for name, runner in there.runners.items()
        )
    )
    unconfirmed = [record for of_site in left for record in of_site]
    for record in unconfirmed:
        say(
            f"{record.name}: its job {', '.join(record.site_jobs) or record.id} at {record.site}"
            " did not confirm that it was cancelled and may still run. Try again."
        )
    return [*beyond, *unconfirmed]


def _ended(before: AttemptState, record: AttemptRecord) -> str:
    if before is AttemptState.PLANNED:
        return f"{record.name}: it was not submitted yet, and will not be."
    if record.outcome == "cancelled":
        return f"{record.name}: cancelled at {record.site}, which has confirmed it."
    return f"{record.name}: it had succeeded at {record.site}; the next run fetches its outputs."


def unlock(*, directory: Workdir = Path(), yes: Yes = False) -> None:
    """Let the next run lead a workspace that another Snakemake of the workflow has led.

    A run that was refused has named it: make certain that it has ended. Its jobs that run are
    followed; what still waits in a queue and is not known here ends when it starts.
    """
    with closing(open_journal(directory, say)) as journal:
        if not (locked := journal.locked()):
            say("No run here was refused because of another controller.")
            return
        for about in locked:
            say(about)
        if yes or confirm("Has it ended?" if len(locked) == 1 else "Have they all ended?"):
            journal.unlock()
            say("The next run here may lead.")


def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SITE…]", help="Sites whose workspaces to empty; default: all."),
    ] = None,
    *,
    directory: Workdir = Path(),
    site: Sites = None,
    yes: Yes = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also cancel jobs, and lose outputs that are nowhere else."),
    ] = False,
) -> None:
    """Show what a workflow has in its workspaces, and remove it.

    Local inputs and outputs stay; a later run uploads what it needs again. A workspace with jobs
    that may still run, or with outputs that are nowhere else, is kept unless you use --force.
    """
    with closing(open_journal(directory, say)) as journal:
        sites = journal.sites()
        if strange := [name for name in names or [] if name not in sites]:
            raise UserError(
                f"no job was submitted to a site named {', '.join(strange)}",
                do=f"Use one of the sites with jobs: {', '.join(sites) or 'none'}",
            )
        if not sites:
            typer.echo("There is no workspace.")
        elif asyncio.run(_clean(journal, names or [*sites], site or [], yes=yes, force=force)):
            raise typer.Exit(NOT_DONE)


async def _clean(
    journal: Journal, names: Sequence[str], given: Sequence[str], *, yes: bool, force: bool
) -> bool:
    """Show, ask and remove; return whether something had to stay, apart from a "no"."""
    async with reach_sites(journal, names, given, typer.echo) as there:
        troubled = bool(there.away)
        for why in there.away.values():
            say(why)
        cleared = {}
        for name, clearer in _clearers(there).items():
            where = f"{name}: {there.runners[name].facts.workspace}"
            try:
                found = await clearer.measure()
            except MantikError as error:
                say(f"{where}\n  {error}")
                troubled = True
                continue
            say("\n".join([where, *_table(found)]))
            needed = _needed(journal, name)
            for record in needed:
                say(f"  needed: {record.name} ({_why(record)})")
            alone = _only_there(there, name)
            for output in alone:
                say(
                    f"  only there: {display_path(output.path)} ({humanize_size(output.size)},"
                    f" made by {output.job})"
                )
            if needed and not force:
                typer.echo("  Kept: let snakemake finish these jobs, cancel them, or add --force.")
                troubled = True
            elif alone and not force:
                typer.echo(
                    "  Kept: bring these outputs here with smk-mantik get, or add --force to lose"
                    " them."
                )
                troubled = True
            elif found:
                cleared[name] = clearer
        if not cleared or not (yes or confirm("Remove all of this?")):
            return troubled
        for name, clearer in cleared.items():
            troubled = not await _clear(there, name, clearer) or troubled
    return troubled


def _clearers(there: ReconnectedSite) -> dict[str, Clearer]:
    """Return a `Clearer` for each workspace within reach, by the first of its sites' names."""
    found: dict[str, Clearer] = {}
    seen: set[str] = set()
    for name, runner in there.runners.items():
        known = there.journal.sites()[name]
        if known.workspace != runner.facts.workspace:
            typer.echo(
                f"{name}: its backend config now names {runner.facts.workspace}, but the last run"
                f" used {known.workspace}; use the config of that run: --site {name}=FILE."
            )
        elif runner.place.id not in seen:
            seen.add(runner.place.id)
            shared = bool(runner.planner.config.site.workspace)
            found[name] = Clearer(runner.site, runner.place.id, there.journal, shared=shared)
    return found


async def _clear(there: ReconnectedSite, name: str, clearer: Clearer) -> bool:
    """Cancel the attempts in a workspace and empty it; return whether everything was removed."""
    journal = there.journal
    running = [record for record in _needed(journal, name) if record.may_run]
    if await cancel_attempts(there, running, 2 * CANCEL_WAIT_S):
        typer.echo(f"{name}: kept, because one of its jobs may still run.")
        return False
    for record in _needed(journal, name):
        journal.segments.forget_checkpoint(record.id)
        if not record.state.final:
            OutputStaging(there.workdir, record.id, record.basis.get("makes", ())).clear()
            journal.abandoned(record.id, "failed: its outputs were removed by smk-mantik clean")
    alone = {output.path for output in _only_there(there, name)}
    stored = journal.files.all_stored(there.runners[name].place.id)
    left = await clearer.remove(o.path for o in stored if o.path not in alone)
    for path in left:
        say(f"{name}: could not be removed: {path}")
    if not left:
        typer.echo(f"{name}: removed.")
    return not left


def _needed(journal: Journal, name: str) -> list[AttemptRecord]:
    """Return the attempts that use a workspace, or whose outputs may not be fetched yet."""
    place = journal.sites()[name].place
    using = {record.id for record in journal.uses.of(place)}
    return [
        record
        for record in read_history(journal.path.parent)
        if record.id in using
        or (
            record.place == place
            and (
                record.may_run
                or (record.state, record.outcome) == (AttemptState.ENDED, "succeeded")
            )
        )
    ]


def _only_there(there: ReconnectedSite, name: str) -> list[RemoteOutput]:
    """Return the outputs that are stored in a workspace, and not on this machine, too."""
    stored = there.journal.files.all_stored(there.runners[name].place.id)
    return [output for output in stored if not is_here(output, there.workdir)]


def _why(record: AttemptRecord) -> str:
    if record.goes_on and not record.may_run:
        return f"it can go on from its checkpoint after {record.part}"
    if record.state is AttemptState.ENDED:
        return "Snakemake has not accepted its outputs yet"
    return "it may still run, or its outputs have not been fetched"


def _table(found: Mapping[str, WorkspacePart]) -> list[str]:
    return [
        f"  {name}: {'more than ' if part.more else ''}{humanize_count(part.files, 'file')},"
        f" {humanize_size(part.size)}"
        for name, part in found.items()
    ] or ["  nothing"]
