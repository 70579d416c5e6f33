"""`smk-mantik jobs`: show the jobs that a workflow has submitted, and their outcomes."""

from collections.abc import Mapping
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
    TryState.ENDED: "ended, outputs not accepted yet",
    TryState.ABANDONED: "given up",
}


def jobs(
    directory: Workdir = Path(),
    every: Annotated[
        bool, typer.Option("--all", help="Also show tries that later ones have replaced.")
    ] = False,
) -> None:
    """Show the jobs of a workflow: site, id at the site, waiting and running time, outcome.

    Shows the last try of each job, and all tries that may still run. To cancel those, use
    smk-mantik cancel.
    """
    records = read_history(directory / STATE)
    if not every:
        last = {record.job: record.id for record in records}
        records = [r for r in records if r.id == last[r.job] or r.may_run]
    tables.make_console().print(jobs_table(records))


def jobs_table(records: list[TryRecord]) -> Table:
    """Return a table with one row per try, in the order of creation."""
    titles = ("job", "site", "queue", "id at the site", "waited", "ran", "outcome")
    shown = tables.new_table(titles, right=("waited", "ran"))
    open_names = {r.id: r.name for r in records if r.may_run}
    for record in records:
        times = [humanize_duration(t) if t is not None else "" for t in (record.waited, record.ran)]
        ids = ", ".join(record.site_jobs)
        cells = [record.name, record.site, record.queue, ids, *times, _outcome(record, open_names)]
        tables.add_row(shown, cells)
    return shown


def _outcome(record: TryRecord, open_names: Mapping[str, str]) -> str:
    """Describe how a try ended, or its state; `open_names` are those of tries that may run."""
    if record.reason:
        return record.outcome.replace("failed", f"failed ({Reason(record.reason).words})", 1)
    if record.left_behind:
        return f"{record.outcome}; may still run"
    if record.hindrance:
        return f"cannot start: {record.hindrance}"
    makers = dict.fromkeys(record.makers.values()) if record.may_run else {}
    if behind := [open_names[maker] for maker in makers if maker in open_names]:
        return f"queued behind {', '.join(behind)}"
    return record.outcome or _SHOWN.get(record.state, record.state.value)
