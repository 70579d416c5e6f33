"""`smk-mantik jobs` and `watch`: list or follow the jobs that a workflow has submitted."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from snakemake_executor_plugin_mantik.common.errors import json_text, one_line, printable
from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)
from snakemake_executor_plugin_mantik.common.state_directory import STATE, read_end
from snakemake_executor_plugin_mantik.connections.connect import site_visits
from snakemake_executor_plugin_mantik.engine.transfer_meter import TransferView, read_transfers
from snakemake_executor_plugin_mantik.journal import JOURNAL_FILE, is_controlled, read_history
from snakemake_executor_plugin_mantik.views.sites import TAIL_BYTES, Visitors, find_last_line
from snakemake_executor_plugin_mantik.views.workflow import (
    Condition,
    JobView,
    Sight,
    overview_jobs,
)

from . import shared
from .shared import AsJson, Sites, Workdir

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
    jobs: Sequence[JobView],
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
    lines = []
    for site, counts in site_totals(jobs).items():
        numbers = ", ".join(f"{number} {condition}" for condition, number in counts.items())
        lines.append(Text(f"{site}: {numbers}"))
    if left := len(ordered) - len(shown):
        lines.insert(0, Text(f"… and {left} more"))
    lines += _transfers(transfers)
    lines += [Text(one_line(note), "dim") for note in notes]
    return Group(table, *([Text("")] if lines else []), *lines)


def site_totals(jobs: Iterable[JobView]) -> Mapping[str, Mapping[Condition, int]]:
    """Count the jobs of each site by their condition, in the order of conditions."""
    found: dict[str, Counter[Condition]] = {}
    for job in jobs:
        found.setdefault(job.site, Counter())[job.condition] += 1
    return {site: {c: n[c] for c in Condition if n[c]} for site, n in sorted(found.items())}


def watch_order(jobs: Iterable[JobView]) -> list[JobView]:
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
        expand=width < shared.ONE_LINE,
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
    job: JobView, now: float, directory: Path, last_lines: Mapping[str, str]
) -> tuple[str, ...]:
    record = job.record
    running = job.condition is Condition.RUNNING
    since = job.started if running else job.queued if job.condition.active else job.ended
    spent = job.ran_words(now)
    if job.condition.active and not running:
        waited = job.waited(now)
        spent = humanize_duration(waited) if waited is not None else ""
    walltime = humanize_duration(record.runtime) if record.runtime else ""
    if running and record.runtime and (ran := job.ran(now)) is not None:
        walltime = f"{ran / record.runtime:.0%} of {walltime}"
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


def _note(job: JobView, directory: Path, line: str) -> str:
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
    return find_last_line(read_end(log, TAIL_BYTES))


def _recent(job: JobView) -> float:
    """Return a key that has the latest end first, and otherwise the longest wait or run."""
    if not job.condition.active:
        return -(job.ended or 0.0)
    return job.started or job.queued or job.record.created


def _moment(when: float, now: float) -> str:
    """Format a moment: the time of day, and the date if it is another day."""
    local, today = time.localtime(when), time.localtime(now)
    same = local[:3] == today[:3]
    return time.strftime("%H:%M" if same else "%d %b %H:%M", local)


_REFRESH_S: Final = 1.0
"""Seconds between two pictures; each looks here whether the journal has changed."""

_LOOK_S: Final = 30.0
"""Seconds between two looks at the sites."""

_OTHER_LINES: Final = 6
"""Lines of a terminal that are not for jobs: title, totals, notes, and the cursor's own."""


def watch(
    directory: Workdir = Path(),
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Show the table once, as without a terminal.")
    ] = False,
    as_json: AsJson = False,
    site: Sites = None,
) -> None:
    """Follow the jobs of a workflow in a table: what each does, since when, and why it waits.

    Works beside a running Snakemake, which asks the sites anyway. Without one, asks each site that
    has jobs itself, with one request each half minute. In both cases, reads the last line of one
    running job at each site in that time. Ends when no job is left to watch, or with Ctrl-C; the
    jobs go on.
    """
    console = shared.make_console()
    with suppress(KeyboardInterrupt):
        if as_json or once or not console.is_terminal:
            asyncio.run(_once(directory, site or [], as_json=as_json))
        else:
            asyncio.run(_live(directory, site or []))


class _Watched:
    """The jobs of a workflow as they are now; the journal is read again when it has changed."""

    def __init__(self, directory: Path, visitors: Visitors) -> None:
        self._directory = directory
        self._visitors = visitors
        self._changed: list[tuple[int, int]] = []
        self._records = read_history(directory / STATE)
        self.controlled = is_controlled(directory / STATE)

    def look(self) -> list[JobView]:
        """Return the last try of each job."""
        state = self._directory / STATE
        self.controlled = is_controlled(state)
        if (changed := _changes(state)) != self._changed:
            self._changed = changed
            self._records = read_history(state)
        found = overview_jobs(
            self._records,
            controlled=self.controlled,
            # A controller knows more than an earlier look.
            sights={} if self.controlled else self._visitors.sights,
        )
        return [job for job in found if job.present]

    @property
    def transfers(self) -> list[TransferView]:
        """What the controller transfers just now."""
        return read_transfers(self._directory / STATE) if self.controlled else []

    @property
    def notes(self) -> list[str]:
        """Lines about the view itself."""
        if self.controlled:
            return [*self._visitors.unread.values()]
        away = [*self._visitors.away.values()]
        away += [
            words
            for site, words in self._visitors.unread.items()
            if site not in self._visitors.away
        ]
        if not any(record.may_run for record in self._records):
            return away
        return ["No Snakemake runs here: start it to go on. Jobs at the sites run on.", *away]

    def as_json(self, jobs: Sequence[JobView]) -> dict[str, Any]:
        """Return all of it as a value for JSON."""
        now = time.time()
        return {
            "controlled": self.controlled,
            "sites": site_totals(jobs),
            "transfers": [asdict(transfer) for transfer in self.transfers],
            "away": {} if self.controlled else self._visitors.away,
            "jobs": [job.as_json(now) for job in jobs],
        }


def _changes(state: Path) -> list[tuple[int, int]]:
    """Return what changes whenever the journal does."""
    found = []
    for name in (JOURNAL_FILE, f"{JOURNAL_FILE}-wal"):
        with suppress(FileNotFoundError):
            status = (state / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
    return found


async def _once(directory: Path, given: Sequence[str], *, as_json: bool) -> None:
    visitors = Visitors(directory, site_visits(directory, given))
    async with aclosing(visitors):
        watched = _Watched(directory, visitors)
        if not watched.controlled:
            await visitors.look()
        jobs = watched.look()
        if as_json:
            typer.echo(json_text(watched.as_json(jobs)))
            return
        console = shared.make_console()
        view = watch_view(
            jobs, now=time.time(), width=console.width, directory=directory, notes=watched.notes,
            transfers=watched.transfers,
        )  # fmt: skip
        console.print(view)


async def _live(directory: Path, given: Sequence[str]) -> None:
    console = shared.make_console()
    visitors = Visitors(directory, site_visits(directory, given))
    async with aclosing(visitors):
        watched = _Watched(directory, visitors)
        look: asyncio.Task[None] | None = None
        due = 0.0

        def view(*, last: bool = False) -> RenderableType:
            transfers = watched.transfers
            others = _OTHER_LINES + min(len(transfers), MOST_TRANSFERS)
            return watch_view(
                there, now=time.time(), width=console.width, directory=directory,
                rows=None if last else console.height - others,
                notes=watched.notes, transfers=transfers, last_lines=visitors.last_lines,
            )  # fmt: skip

        async def ask() -> None:
            if not watched.controlled:
                await visitors.look()
            running = [job for job in there if job.condition is Condition.RUNNING]
            shown = watch_order(running)[: max(1, console.height - _OTHER_LINES)]
            await visitors.read_logs([job.record for job in shown])

        there = watched.look()
        try:
            with Live(view(), console=console, auto_refresh=False, transient=True) as live:
                while True:
                    there = watched.look()
                    live.update(view(), refresh=True)
                    if look is None and time.monotonic() >= due:
                        due = time.monotonic() + _LOOK_S
                        look = asyncio.create_task(ask())
                    await asyncio.sleep(_REFRESH_S)
                    if look is not None and look.done():
                        look.result()
                        look = None
                        there = watched.look()
                        moving = any(job.condition.moving for job in there)
                        if not watched.controlled and not moving:
                            break
        finally:
            if look is not None:
                look.cancel()
                await asyncio.gather(look, return_exceptions=True)
        console.print(view(last=True))


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
    as_json: AsJson = False,
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
