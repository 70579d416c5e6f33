"""Format the jobs of a workflow for `smk-mantik watch`, for terminals of any width."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from snakemake_executor_plugin_mantik.cli import tables
from snakemake_executor_plugin_mantik.common.errors import one_line
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.watching.overview import (
    Condition,
    JobOverview,
    site_totals,
)

_WIDE: Final = 110
"""Columns from which on the table has the queue, the moment and the walltime."""

_TAIL_BYTES: Final = 4096
"""Bytes at the end of a log in which its last line is looked for."""

_ORDER: Final = (
    Condition.RUNNING, Condition.OVER, Condition.WAITING, Condition.OPEN, Condition.SUBMITTING,
    Condition.PLANNED, Condition.LEFT, Condition.FAILED, Condition.CANCELLED, Condition.SUCCEEDED,
)  # fmt: skip

_STYLES: Final = {
    Condition.RUNNING: "bold",
    Condition.FAILED: "bold red",
    Condition.LEFT: "red",
    Condition.SUCCEEDED: "dim",
    Condition.CANCELLED: "dim",
}
"""Colours only stress what the words say."""

_SHORT: Final = {
    Condition.OPEN: "waits or runs",
    Condition.OVER: "ended",
}


def watch_view(
    jobs: Sequence[JobOverview],
    *,
    now: float,
    width: int,
    rows: int | None = None,
    directory: Path = Path(),
    notes: Iterable[str] = (),
) -> RenderableType:
    """Return the table of jobs with the totals per site below it.

    Active jobs come first, then the last ones that have ended. `rows` limits their number; a line
    counts the others. `notes` are lines about the view itself. `directory` is the workflow's.
    """
    ordered = sorted(jobs, key=lambda job: (_ORDER.index(job.condition), _recent(job)))
    shown = ordered if rows is None else ordered[: max(1, rows)]
    table = _table(width)
    for job in shown:
        cells = _cells(job, now, directory)
        names = ("job", "site", "queue", "state", "since", "for", "walltime", "note")
        known: Mapping[str, str] = dict(zip(names, cells, strict=True))
        style = _STYLES.get(job.condition, "")
        texts = [Text(one_line(known[str(c.header)]).strip(), style) for c in table.columns]
        table.add_row(*texts)
    lines = [Text(total.words) for total in site_totals(jobs)]
    if left := len(ordered) - len(shown):
        lines.insert(0, Text(f"… and {left} more"))
    lines += [Text(one_line(note), "dim") for note in notes]
    return Group(table, *([Text("")] if lines else []), *lines)


def _table(width: int) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0),
        expand=width < tables.ONE_LINE,
    )  # fmt: skip
    wide = width >= _WIDE
    names = ["job", "site", "queue", "state", "since", "for", "walltime", "note"]
    for name in names if wide else [n for n in names if n not in ("queue", "since", "walltime")]:
        table.add_column(
            name,
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if name in ("since", "for", "walltime") else "left",
            max_width=_job_width(width) if name == "job" else None,
            ratio=1 if name == "note" else None,  # it takes what the others leave
        )
    return table


def _job_width(width: int) -> int:
    return max(12, width // 3)


def _cells(job: JobOverview, now: float, directory: Path) -> tuple[str, ...]:
    record = job.record
    running = job.condition is Condition.RUNNING
    since = job.running_since if running else job.waiting_since
    if not job.condition.active:
        since = record.finished
    spent = job.ran(now) if running or not job.condition.active else job.waited(now)
    walltime = humanize_duration(record.runtime) if record.runtime else ""
    if (share := job.share(now)) is not None:
        walltime = f"{share:.0%} of {walltime}"
    return (
        record.name,
        record.site,
        record.queue,
        _SHORT.get(job.condition, job.condition.value),
        _moment(since, now) if since else "",
        humanize_duration(spent) if spent is not None else "",
        walltime,
        _note(job, directory),
    )


def _note(job: JobOverview, directory: Path) -> str:
    """Return what the state alone does not say: a reason, an end, or the last line of the log."""
    again = f"try {job.number}" if job.number > 1 else ""
    said = job.words.removeprefix(job.condition.value).removeprefix(": ")
    if job.condition is Condition.RUNNING:
        said = ""
    elif job.condition is Condition.FAILED:
        said = job.record.outcome.removeprefix("failed: ")
    elif job.condition is Condition.SUCCEEDED:
        said = last_line(directory / job.record.log) if job.record.log else ""
    return "; ".join(filter(None, [again, said]))


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _recent(job: JobOverview) -> float:
    """Return a key that has the latest end first, and otherwise the longest wait or run."""
    if not job.condition.active:
        return -(job.record.finished or 0.0)
    return job.running_since or job.waiting_since or job.record.created


def _moment(when: float, now: float) -> str:
    """Format a moment: the time of day, and the date if it is another day."""
    local, today = time.localtime(when), time.localtime(now)
    same = local[:3] == today[:3]
    return time.strftime("%H:%M" if same else "%d %b %H:%M", local)
