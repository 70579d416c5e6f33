"""`smk-mantik jobs`: show the jobs that a workflow has submitted, and their outcomes."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from snakemake_executor_plugin_mantik.common.errors import json_text, printable
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.connections.connect import site_visits
from snakemake_executor_plugin_mantik.journal import is_controlled, read_history
from snakemake_executor_plugin_mantik.views.sites import Visitors
from snakemake_executor_plugin_mantik.views.workflow import (
    Condition,
    JobView,
    Sight,
    overview_jobs,
)

from . import shared
from .shared import Sites, Workdir


def jobs(
    directory: Workdir = Path(),
    *,
    every: Annotated[
        bool, typer.Option("--all", help="Also show tries that later ones have replaced.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Show only failed jobs.")] = False,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Ask the sites about jobs that are there, with one request each, unless a"
            " Snakemake runs here: it does so anyway.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    site: Sites = None,
) -> None:
    """List the jobs that snakemake submitted from this directory: site, id, times, outcome.

    Shows the last try of each job, and all tries that may still run, without segments that wait
    for others. To cancel those, use smk-mantik cancel; to follow them, smk-mantik watch.
    """
    state = directory / STATE
    controlled = is_controlled(state)
    records = read_history(state)
    sights: Mapping[str, Sight] = {}
    if ask and not controlled:
        sights = asyncio.run(_asked(directory, site or []))
    found = [
        job
        for job in overview_jobs(records, controlled=controlled, sights=sights)
        if (every or job.present) and (job.condition is Condition.FAILED or not failed)
    ]
    now = time.time()
    if as_json:
        typer.echo(json_text([job.as_json(now) for job in found]))
    else:
        shared.make_console().print(jobs_table(found, now))


async def _asked(directory: Path, given: Sequence[str]) -> Mapping[str, Sight]:
    visitors = Visitors(directory, site_visits(directory, given))
    async with aclosing(visitors):
        await visitors.look()
    for words in visitors.away.values():
        typer.echo(printable(words), err=True)
    return visitors.sights


def jobs_table(found: Iterable[JobView], now: float) -> Table:
    """Return a table with one row per try, in the order of creation."""
    titles = ("job", "site", "queue", "id at the site", "try", "waited", "ran", "outcome")
    shown = shared.new_table(titles, right=("try", "waited", "ran"))
    for job in found:
        record = job.record
        waited = job.waited(now)
        times = [humanize_duration(waited) if waited is not None else "", job.ran_words(now)]
        ids = ", ".join(record.site_jobs)
        words = f"{record.part}: {job.words}" if record.part else job.words
        cells = [record.name, record.site, record.queue, ids, str(job.number), *times, words]
        shared.add_row(shown, cells)
    return shown
