"""`smk-mantik jobs`: what a workflow has sent to its sites, and what became of it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from snakemake_executor_plugin_mantik.cli import tables
from snakemake_executor_plugin_mantik.cli.options import Workdir
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState, read_history

_SHOWN = {
    TryState.PLANNED: "planned",
    TryState.SUBMITTING: "submitting",
    TryState.SUBMITTED: "queued or running",
    TryState.ENDED: "ended, not taken over yet",
    TryState.ABANDONED: "given up",
}


def jobs(
    directory: Workdir = Path(),
    every: Annotated[
        bool, typer.Option("--all", help="Also what later tries of the same jobs have replaced.")
    ] = False,
) -> None:
    """Show the jobs of the workflow in a directory: site, id there, waiting and running time.

    The last try of each job, and all that may still be at a site. smk-mantik cancel ends them.
    """
    records = read_history(directory / STATE)
    if not every:
        last = {record.job: record.id for record in records}
        records = [r for r in records if r.id == last[r.job] or r.may_run]
    tables.make_console().print(jobs_table(records))


def jobs_table(records: list[TryRecord]) -> Table:
    """A table of tries, a line each, in the order of their making."""
    titles = ("job", "site", "queue", "id at the site", "waited", "ran", "outcome")
    shown = tables.new_table(titles, right=("waited", "ran"))
    for record in records:
        times = [humanize_duration(t) if t is not None else "" for t in (record.waited, record.ran)]
        ids = ", ".join(record.site_jobs)
        cells = [record.name, record.site, record.queue, ids, *times, _outcome(record)]
        tables.add_row(shown, cells)
    return shown


def _outcome(record: TryRecord) -> str:
    """What became of a try, in a word or a line."""
    if record.reason:
        return record.outcome.replace("failed", f"failed ({Reason(record.reason).words})", 1)
    if record.left_behind:
        return f"{record.outcome}; may still run"
    if record.hindrance:
        return f"cannot start: {record.hindrance}"
    return record.outcome or _SHOWN.get(record.state, record.state.value)
