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
from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)
from snakemake_executor_plugin_mantik.engine.transfer_meter import TransferView
from snakemake_executor_plugin_mantik.watching.overview import (
    Condition,
    JobOverview,
    site_totals,
)
from snakemake_executor_plugin_mantik.watching.site_looks import TAIL_BYTES, find_last_line

_WIDE: Final = 110
"""Columns from which on the table has the queue, the moment, the walltime, and the number of jobs
that wait for a job at its site."""

MOST_TRANSFERS: Final = 4
"""Most lines about transfers."""

_ORDER: Final = (
    Condition.RUNNING, Condition.OVER, Condition.WENT_ON, Condition.WAITING, Condition.OPEN,
    Condition.SUBMITTING, Condition.PLANNED, Condition.LEFT, Condition.FAILED,
    Condition.CANCELLED, Condition.SUCCEEDED,
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
    transfers: Sequence[TransferView] = (),
    last_lines: Mapping[str, str] | None = None,
) -> RenderableType:
    """Return the table of jobs with the totals per site and the transfers below it.

    Active jobs come first, then the last ones that have ended. `rows` limits their number; a line
    counts the others. `notes` are lines about the view itself. `directory` is the workflow's.
    `last_lines` are those that running tries have written, by their ids.
    """
    ordered = watch_order(jobs)
    shown = ordered if rows is None else ordered[: max(1, rows)]
    table = _table(width, ahead=any(job.awaited_by for job in shown))
    for job in shown:
        cells = _cells(job, now, directory, last_lines or {})
        names = ("job", "site", "queue", "state", "since", "for", "walltime", "next", "note")
        known: Mapping[str, str] = dict(zip(names, cells, strict=True))
        style = _STYLES.get(job.condition, "")
        texts = [Text(one_line(known[str(c.header)]).strip(), style) for c in table.columns]
        table.add_row(*texts)
    lines = [Text(total.words) for total in site_totals(jobs)]
    if left := len(ordered) - len(shown):
        lines.insert(0, Text(f"… and {left} more"))
    lines += _transfers(transfers)
    lines += [Text(one_line(note), "dim") for note in notes]
    return Group(table, *([Text("")] if lines else []), *lines)


def watch_order(jobs: Iterable[JobOverview]) -> list[JobOverview]:
    """Return jobs in the order of the table's rows."""
    return sorted(jobs, key=lambda job: (_ORDER.index(job.condition), _recent(job)))


def _transfers(transfers: Sequence[TransferView]) -> list[Text]:
    """Return a line for each of the first transfers, the last of which counts the others."""
    shown = transfers if len(transfers) <= MOST_TRANSFERS else transfers[: MOST_TRANSFERS - 1]
    lines = [_transfer(transfer) for transfer in shown]
    if left := transfers[len(shown) :]:
        size, moved = sum(each.size for each in left), sum(each.moved for each in left)
        lines.append(
            f"… and {humanize_count(len(left), 'more transfer')}: {humanize_size(moved)} of"
            f" {humanize_size(size)}"
        )
    return [Text(one_line(line), no_wrap=True, overflow="ellipsis") for line in lines]


def _transfer(transfer: TransferView) -> str:
    said = f"{transfer.site}: {transfer.direction} of {transfer.what},"
    said += f" {humanize_size(transfer.moved)} of {humanize_size(transfer.size)}"
    if transfer.rate:
        left = humanize_duration((transfer.size - transfer.moved) / transfer.rate)
        said += f", {humanize_size(transfer.rate)}/s, {left} left"
    return said


def _table(width: int, *, ahead: bool) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0),
        expand=width < tables.ONE_LINE,
    )  # fmt: skip
    wide = width >= _WIDE
    names = ["job", "site", "queue", "state", "since", "for", "walltime", "next", "note"]
    narrow = [name for name in names if name not in ("queue", "since", "walltime", "next")]
    for name in names if wide else narrow:
        if name == "next" and not ahead:
            continue
        table.add_column(
            name,
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if name in ("since", "for", "walltime", "next") else "left",
            max_width=_job_width(width) if name == "job" else None,
            ratio=1 if name == "note" else None,  # it takes what the others leave
        )
    return table


def _job_width(width: int) -> int:
    return max(12, width // 3)


def _cells(
    job: JobOverview, now: float, directory: Path, last_lines: Mapping[str, str]
) -> tuple[str, ...]:
    record = job.record
    running = job.condition is Condition.RUNNING
    since = job.running_since if running else job.waiting_since
    if not job.condition.active:
        since = record.times.ended or record.finished
    spent = job.ran_words(now)
    if job.condition.active and not running:
        waited = job.waited(now)
        spent = humanize_duration(waited) if waited is not None else ""
    walltime = humanize_duration(record.runtime) if record.runtime else ""
    if (share := job.share(now)) is not None:
        walltime = f"{share:.0%} of {walltime}"
    return (
        record.name,
        record.site,
        record.queue,
        _SHORT.get(job.condition, job.condition.value),
        _moment(since, now) if since else "",
        spent,
        walltime,
        str(len(job.awaited_by) or ""),
        _note(job, directory, last_lines.get(job.record.id, "")),
    )


def _note(job: JobOverview, directory: Path, line: str) -> str:
    """Return what the state alone does not say: a reason, an end, or the last line of the log."""
    again = f"try {job.number}" if job.number > 1 else ""
    part = job.record.part
    said = job.words.removeprefix(job.condition.value).removeprefix(": ")
    if job.condition is Condition.RUNNING:
        said = line
    elif job.condition is Condition.FAILED:
        said = job.record.outcome.removeprefix("failed: ")
    elif job.condition is Condition.SUCCEEDED:
        said = last_line(directory / job.record.log) if job.record.log else ""
    return "; ".join(filter(None, [again, part, said]))


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return find_last_line(file.read())
    except OSError:
        return ""


def _recent(job: JobOverview) -> float:
    """Return a key that has the latest end first, and otherwise the longest wait or run."""
    if not job.condition.active:
        return -(job.record.times.ended or job.record.finished or 0.0)
    return job.running_since or job.waiting_since or job.record.created


def _moment(when: float, now: float) -> str:
    """Format a moment: the time of day, and the date if it is another day."""
    local, today = time.localtime(when), time.localtime(now)
    same = local[:3] == today[:3]
    return time.strftime("%H:%M" if same else "%d %b %H:%M", local)
