"""`smk-mantik cancel`: cancel jobs that earlier runs left at the sites, without Snakemake."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from snakemake_executor_plugin_mantik.common.errors import UserError, printable
from snakemake_executor_plugin_mantik.connections.reconnect import (
    ReconnectedSite,
    open_journal,
    reach_sites,
)
from snakemake_executor_plugin_mantik.engine.cancel import CANCEL_WAIT_S
from snakemake_executor_plugin_mantik.journal import Journal, TryRecord, TryState, read_history
from snakemake_executor_plugin_mantik.views.workflow import is_meant

from .options import Sites, Workdir

_UNCONFIRMED = 1
"""Exit code if a job may still run."""


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
    journal = open_journal(directory)
    if journal.remark:
        _say(journal.remark)
    try:
        records = _chosen(journal, jobs or [], every=every)
    except BaseException:
        journal.close()
        raise
    if not records:
        journal.close()
        _say("No job is at a site.")
        return
    if asyncio.run(_cancel(journal, site or [], records, wait)):
        raise typer.Exit(_UNCONFIRMED)


def _may_run(journal: Journal) -> list[TryRecord]:
    """Return planned tries, and those that may wait or run at a site, the oldest first."""
    return [
        record
        for record in read_history(journal.path.parent)
        if record.may_run or record.state is TryState.PLANNED
    ]


def _chosen(journal: Journal, wanted: Sequence[str], *, every: bool) -> list[TryRecord]:
    """Return the tries that the user has named.

    Raises:
        UserError: no job is named, a name matches none, or `every` comes with names.
    """
    there = _may_run(journal)
    known = "".join(f"\n  {record.name}" for record in there) or " none"
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
    journal: Journal, given: Sequence[str], records: Sequence[TryRecord], wait_s: float
) -> list[TryRecord]:
    names = sorted({record.site for record in records})
    async with reach_sites(journal, names, given, _say) as there:
        left = await cancel_tries(there, records, wait_s, _say)
        now = {record.id: record for record in read_history(journal.path.parent)}
        unconfirmed = {record.id for record in left}
        for record in records:
            if record.id not in unconfirmed:
                _say(_ended(record.state, now[record.id]))
    return left


async def cancel_tries(
    there: ReconnectedSite,
    records: Sequence[TryRecord],
    wait_s: float,
    say: Callable[[str], None],
) -> list[TryRecord]:
    """Cancel tries and wait for their ends; report and return those that may still run.

    The wait takes up to `wait_s` seconds, and longer for many tries. `say` writes a line for the
    user.
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


def _ended(before: TryState, record: TryRecord) -> str:
    if before is TryState.PLANNED:
        return f"{record.name}: it was not submitted yet, and will not be."
    if record.outcome == "cancelled":
        return f"{record.name}: cancelled at {record.site}, which has confirmed it."
    return f"{record.name}: it had succeeded at {record.site}; the next run fetches its outputs."


def _say(text: str) -> None:
    typer.echo(printable(text))
