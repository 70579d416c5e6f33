"""`smk-mantik jobs` and `watch`: list or follow the jobs that a workflow has submitted."""

import asyncio
import os
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..common.errors import MantikError, one_line
from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..common.state_directory import STATE, read_end
from ..connections.connect import open_journal, site_visits
from ..engine.transfer_meter import TransferView, read_transfers
from ..jobs.reasons import same_cause
from ..journal import JOURNAL_FILE, is_controlled, read_history, read_last_allocations
from ..views.picture import shorten_text
from ..views.sites import TAIL_BYTES, Visitors, find_last_line
from ..views.usage import PoolUsage, usage_by_pool
from ..views.workflow import Condition, JobView, Sight, list_names, overview_jobs, site_ids
from . import shared
from .cancel import cancel
from .logs import logs
from .shared import AsJson, Sites, Workdir

_WIDE: Final = 110
"""Columns from which on the table has the queue, the moment, the walltime, and the number of jobs
that wait for a job at its site."""

MOST_TRANSFERS: Final = 4
"""Most lines about transfers."""

_ORDER: Final = (
    Condition.FAILED, Condition.ORPHANED, Condition.RUNNING, Condition.OVER, Condition.WENT_ON,
    Condition.WAITING, Condition.OPEN, Condition.SUBMITTING, Condition.PLANNED,
    Condition.CANCELLED, Condition.SUCCEEDED,
)  # fmt: skip
_SPREAD: Final = _ORDER[:3]
"""Jobs in these conditions have rows of their own, as far as there is room for them."""

_STYLES: Final = {
    Condition.RUNNING: "bold",
    Condition.FAILED: "bold red",
    Condition.ORPHANED: "red",
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
    only: Collection[Condition] = _ORDER,
    numbered: bool = False,
    directory: Path = Path(),
    notes: Iterable[str] = (),
    transfers: Sequence[TransferView] = (),
    pools: Sequence[PoolUsage] = (),
    last_lines: Mapping[str, str] | None = None,
) -> RenderableType:
    """Return the table of jobs (`watch_rows`) with totals, pools and transfers below it.

    `rows` limits their number; a line counts the others. `only` are the conditions to show, and
    `notes` lines about the view itself. `directory` is the workflow's. `last_lines` are those that
    running attempts have written, by their ids.
    """
    totals = site_totals(jobs)
    found = watch_rows(jobs, rows, only)
    shown, left = (found, []) if rows is None else (found[:rows], found[rows:])
    awaited = any(job.awaited_by for group in shown for job in group)
    table = _table(width, awaited=awaited, sites=len(totals), numbered=numbered)
    kinds = [None, *(_alike(group[0]) for group in shown)]
    for number, group in enumerate(shown, 1):
        known = _cells(group, now, directory, last_lines or {})
        name, rule = group[0].record.name, group[0].rule
        if len(group) > 1:
            same = kinds[number] == kinds[number - 1]
            name = f"{rule} ({len(group):,} {'more' if same else 'jobs'})"
        else:
            name = shorten_text(name, max(width // 2, len(rule) + 1), rule)
        known |= {"#": str(number), "job": name}
        style = _STYLES.get(group[0].condition, "")
        texts = [Text(one_line(known[str(c.header)]).strip(), style) for c in table.columns]
        table.add_row(*texts)
    lines = []
    for site, counts in totals.items():
        numbers = ", ".join(f"{number} {condition}" for condition, number in counts.items())
        lines.append(Text(f"{site}: {numbers}"))
    lines += [Text(pool.words) for pool in pools]
    if left:
        lines.insert(0, Text(f"… and {sum(map(len, left))} more"))
    lines += _transfers(transfers)
    lines += [Text(one_line(note), "dim") for note in notes]
    return Group(table, *([Text("")] if lines else []), *lines)


def site_totals(jobs: Iterable[JobView]) -> Mapping[str, Mapping[Condition, int]]:
    """Count the jobs of each site by their condition, in the order of conditions."""
    found: dict[str, Counter[Condition]] = {}
    for job in jobs:
        found.setdefault(job.site, Counter())[job.condition] += 1
    return {site: {c: n[c] for c in Condition if n[c]} for site, n in sorted(found.items())}


def watch_rows(
    jobs: Iterable[JobView], most: int | None = None, only: Collection[Condition] = _ORDER
) -> list[list[JobView]]:
    """Return the jobs of each row: failed ones first, then those that run, wait and are over.

    Jobs of one rule that wait for the same reason, or that are over, share a row. So do those that
    run, or failed for the same cause, but the first of them, as many as fit into `most` rows.
    """
    groups: dict[object, list[JobView]] = {}
    shown = (job for job in jobs if job.condition in only)
    for job in sorted(shown, key=lambda job: (_ORDER.index(job.condition), _recent(job))):
        groups.setdefault(_alike(job), []).append(job)
    rows: list[list[JobView]] = []
    room = sys.maxsize if most is None else max(0, most - len(groups))
    run = any(group[0].condition is Condition.RUNNING for group in groups.values())
    for group in groups.values():
        alone = len(group) - 1 if group[0].condition in _SPREAD else 0
        # Failed jobs leave room for those that run.
        alone = min(alone, room // 2 if run and group[0].condition is Condition.FAILED else room)
        room -= alone
        rows += [[job] for job in group[:alone]] + [group[alone:]]
    return rows


def _alike(job: JobView) -> object:
    """Return what is equal for the jobs that may share a row."""
    # Each is expected to start at another time, behind others.
    why = "" if job.waits_for else replace(job, record=replace(job.record, expected=None)).words
    why = why if job.condition.active else same_cause(job.cause, job.name)
    return job.condition, job.rule, job.site, why


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


def _table(width: int, *, awaited: bool, sites: int, numbered: bool) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0),
        expand=width < shared.ONE_LINE,
    )  # fmt: skip
    wide = width >= _WIDE
    columns = {
        "#": numbered, "job": True, "site": wide or sites > 1, "queue": wide, "state": True,
        "since": wide, "for": True, "walltime": wide, "next": wide and awaited, "note": True,
    }  # fmt: skip
    for name in compress(columns, columns.values()):
        right = name in ("#", "since", "for", "walltime", "next")
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    table.columns[-1].ratio = 1  # it takes what the others leave
    return table


def _cells(
    group: Sequence[JobView], now: float, directory: Path, last_lines: Mapping[str, str]
) -> dict[str, str]:
    job = group[0]
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
    return {
        "site": record.site,
        "queue": record.queue,
        "state": _SHORT.get(job.condition, job.condition.value),
        "since": _moment(since, now) if since else "",
        "for": spent,
        "walltime": walltime,
        "next": str(len({name for each in group for name in each.awaited_by}) or ""),
        "note": _note(group, directory, last_lines.get(record.id, "")),
    }


def _note(group: Sequence[JobView], directory: Path, line: str) -> str:
    """Return what the state alone does not say: a reason, an end, or the last line of the log."""
    job, alone = group[0], len(group) == 1
    if not alone:  # the others are expected at other times
        job = replace(job, record=replace(job.record, expected=None))
    again = f"attempt {job.number}" if job.number > 1 and alone else ""
    part = job.record.part if alone else ""
    said = job.words.removeprefix(job.condition.value).removeprefix(": ")
    if job.condition is Condition.RUNNING:
        said = line if alone else ""
    elif job.condition is Condition.FAILED:
        said = job.cause.removeprefix("The command ended with ").rstrip(".")
        why = job.record.reason.replace("_", " ")
        said = said if why in said else f"{why}: {said}"
    elif job.condition is Condition.SUCCEEDED:
        said = last_line(directory / job.record.log) if job.record.log and alone else ""
    elif job.waits_for and not alone:
        others = {name for each in group for name in each.waits_for}
        said = f"waits for {humanize_count(len(others), 'job')}"
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

_OTHER_LINES: Final = 7
"""Lines of a terminal that are not for jobs: title, totals, notes, and the cursor's own."""

_HINT: Final = "Keys: f only failed jobs, or all; l log of a job; c cancel; q quit"


def watch(
    directory: Workdir = Path(),
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Show the table once, as without a terminal.")
    ] = False,
    as_json: AsJson = False,
    site: Sites = None,
) -> None:
    """Follow the jobs of a workflow in a table: failed ones, what others do, and why they wait.

    Jobs of one rule that wait for the same reason share a row. On a terminal, f shows failed jobs
    only, l the log of a job, c cancels jobs, and q ends the table.

    Works beside a running Snakemake, which asks the sites anyway. Without one, asks each site that
    has jobs itself, with one request each half minute. In both cases, reads the last line of one
    running job at each site in that time. Ends when no job is left to watch, or with q or Ctrl-C;
    the jobs go on.
    """
    console = shared.make_console()
    with suppress(KeyboardInterrupt):
        if as_json or once or not console.is_terminal:
            asyncio.run(_once(directory, site or [], as_json=as_json))
            return
        only = {*Condition}
        while asked := asyncio.run(_live(directory, site or [], only)):
            key, rows = asked
            if rows:
                _do(key, rows, directory, site)


def _do(key: bytes, rows: Sequence[Sequence[JobView]], directory: Path, site: Sites) -> None:
    """Show the log of a job, or cancel the jobs of a row, of which the user gives the number."""
    with suppress(typer.Abort, typer.Exit, KeyboardInterrupt):
        try:
            if key == b"c":  # beside a Snakemake it is refused: before questions are asked
                open_journal(directory, shared.say).close()
            question = f"{'Log of' if key == b'l' else 'Cancel'} number (1 to {len(rows)})"
            number = typer.prompt(question, default=1)
            group = rows[min(max(number, 1), len(rows)) - 1]
            if key == b"l":
                logs(
                    [group[0].id], follow=group[0].condition.active, directory=directory, site=site
                )
            else:
                shared.say(list_names(job.name for job in group)[1:])
                if shared.confirm(f"Cancel {humanize_count(len(group), 'job')}?"):
                    cancel([job.id for job in group], directory=directory, site=site)
        except MantikError as error:
            shared.warn(str(error))
        typer.prompt("Enter goes back", default="", show_default=False, prompt_suffix=". ")


class _Watched:
    """The jobs of a workflow as they are now; the journal is read again when it has changed."""

    def __init__(self, directory: Path, visitors: Visitors) -> None:
        self._directory = directory
        self._visitors = visitors
        self._changed: list[tuple[int, int]] = []
        self._records = read_history(directory / STATE)
        self._allocations = read_last_allocations(directory / STATE)
        self.controlled = is_controlled(directory / STATE)

    def look(self) -> list[JobView]:
        """Return the last attempt of each job."""
        state = self._directory / STATE
        self.controlled = is_controlled(state)
        if (changed := _changes(state)) != self._changed:
            self._changed = changed
            self._records = read_history(state)
            self._allocations = read_last_allocations(state)
        found = overview_jobs(
            self._records,
            controlled=self.controlled,
            # A controller knows more than an earlier look.
            sights={} if self.controlled else self._visitors.sights,
        )
        return [job for job in found if job.present]

    def pools(self, jobs: Iterable[JobView]) -> list[PoolUsage]:
        return usage_by_pool(self._allocations, jobs)

    @property
    def transfers(self) -> list[TransferView]:
        return read_transfers(self._directory / STATE) if self.controlled else []

    @property
    def notes(self) -> list[str]:
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
        now = time.time()
        return {
            "controlled": self.controlled,
            "sites": site_totals(jobs),
            "pools": [asdict(pool) for pool in self.pools(jobs)],
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
            shared.print_json(watched.as_json(jobs))
            return
        console = shared.make_console()
        view = watch_view(
            jobs, now=time.time(), width=console.width, directory=directory, notes=watched.notes,
            transfers=watched.transfers, pools=watched.pools(jobs),
        )  # fmt: skip
        console.print(view)


@contextmanager
def _keys() -> Iterator[asyncio.Queue[bytes]]:
    """Yield a queue that gets each key that is pressed, and leave the terminal as it was."""
    pressed: asyncio.Queue[bytes] = asyncio.Queue()
    if not sys.stdin.isatty():
        yield pressed
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        loop.add_reader(terminal, lambda: pressed.put_nowait(os.read(terminal, 1)))
        yield pressed
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def _live(
    directory: Path, given: Sequence[str], only: set[Condition]
) -> tuple[bytes, list[list[JobView]]] | None:
    """Follow the jobs, or those in the conditions `only`, which the key f changes.

    Return the key and the rows, which are then shown with numbers, if the user asks for more.
    """
    console = shared.make_console()
    visitors = Visitors(directory, site_visits(directory, given))
    async with aclosing(visitors):
        watched = _Watched(directory, visitors)
        look: asyncio.Task[None] | None = None
        due = 0.0

        def room() -> int:
            others = min(len(watched.transfers), MOST_TRANSFERS) + len(watched.pools(there))
            return max(1, console.height - _OTHER_LINES - others)

        def view(*, last: bool = False, numbered: bool = False) -> RenderableType:
            return watch_view(
                there, now=time.time(), width=console.width, directory=directory, only=only,
                rows=None if last else room(), numbered=numbered, transfers=watched.transfers,
                notes=[*watched.notes, *([] if last else hints)], last_lines=visitors.last_lines,
                pools=watched.pools(there),
            )  # fmt: skip

        async def ask() -> None:
            if not watched.controlled:
                await visitors.look()
            running = [job for job in there if job.condition is Condition.RUNNING]
            shown = watch_rows(running)[: room()]
            await visitors.read_logs([group[0].record for group in shown])

        there = watched.look()
        hints = [_HINT] * sys.stdin.isatty()
        try:
            with (
                _keys() as pressed,
                Live(view(), console=console, auto_refresh=False, transient=True) as live,
            ):
                while True:
                    there = watched.look()
                    live.update(view(), refresh=True)
                    if look is None and time.monotonic() >= due:
                        due = time.monotonic() + _LOOK_S
                        look = asyncio.create_task(ask())
                    key = b""
                    with suppress(TimeoutError):
                        key = await asyncio.wait_for(pressed.get(), _REFRESH_S)
                    if key in (b"q", b"l", b"c"):
                        break
                    only ^= {*Condition} - {Condition.FAILED} if key == b"f" else set()
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
        asked = key in (b"l", b"c")
        console.print(view(last=not asked, numbered=asked))
        return (key, watch_rows(there, room(), only)[: room()]) if asked else None


def jobs(
    directory: Workdir = Path(),
    *,
    every: Annotated[
        bool, typer.Option("--all", help="Also show attempts that later ones have replaced.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Show only failed jobs.")] = False,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Ask the sites about jobs that are there, with one request each, unless a"
            " Snakemake runs here: it does so anyway. The answers are not recorded.",
        ),
    ] = False,
    as_json: AsJson = False,
    site: Sites = None,
) -> None:
    """List the jobs that snakemake submitted from this directory: site, id, times, outcome.

    Shows the last attempt of each job, and all attempts that may still run, without segments that
    wait for others. To cancel those, use smk-mantik cancel; to follow them, smk-mantik watch.
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
        shared.print_json([job.as_json(now) for job in found])
    else:
        console = shared.make_console()
        console.print(jobs_table(found, now, console.width, brief=not failed))


async def _asked(directory: Path, given: Sequence[str]) -> Mapping[str, Sight]:
    visitors = Visitors(directory, site_visits(directory, given))
    async with aclosing(visitors):
        await visitors.look()
    for words in visitors.away.values():
        shared.warn(words)
    return visitors.sights


def jobs_table(found: Sequence[JobView], now: float, width: int, *, brief: bool = True) -> Table:
    """Return a table with one row per attempt, in the order of creation, for `width` columns.

    If they are few, the queue, the number of the attempt and the times are left out, and if
    `brief`, each row is one line.
    """
    titles = ["job", "site", "queue", "id at the site", "attempt", "waited", "ran", "outcome"]
    whole = titles[:-1]
    if width < _WIDE:
        titles = ["job", "site", "id at the site", "outcome"]
        whole = titles if brief else whole
    shown = shared.new_table(titles, ("attempt", "waited", "ran"), whole)
    shown.expand, shown.columns[-1].ratio = width < _WIDE, 1  # it takes what the others leave
    for job in found:
        record = job.record
        waited = job.waited(now)
        cells = {
            "job": shorten_text(record.name, width // 2, record.rule),
            "site": record.site,
            "queue": record.queue,
            "id at the site": site_ids(job.record),
            "attempt": str(job.number),
            "waited": humanize_duration(waited) if waited is not None else "",
            "ran": job.ran_words(now),
            "outcome": f"{record.part}: {job.words}" if record.part else job.words,
        }
        shared.add_row(shown, (cells[title] for title in titles))
    return shown
