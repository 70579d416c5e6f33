"""`smk-mantik watch`: follow the jobs of a workflow in a table that stays up to date."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import RenderableType
from rich.live import Live

from snakemake_executor_plugin_mantik.cli import tables
from snakemake_executor_plugin_mantik.cli.options import Sites, Workdir
from snakemake_executor_plugin_mantik.cli.watch_table import (
    MOST_TRANSFERS,
    watch_order,
    watch_view,
)
from snakemake_executor_plugin_mantik.common.errors import json_text
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.engine.progress_file import read_transfers
from snakemake_executor_plugin_mantik.engine.transfer_meter import TransferView
from snakemake_executor_plugin_mantik.journal import JOURNAL_FILE, is_controlled, read_history
from snakemake_executor_plugin_mantik.watching.overview import (
    Condition,
    JobOverview,
    overview_jobs,
    present_tries,
    site_totals,
)
from snakemake_executor_plugin_mantik.watching.visitors import Visitors

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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    site: Sites = None,
) -> None:
    """Follow the jobs of a workflow in a table: what each does, since when, and why it waits.

    Works beside a running Snakemake, which asks the sites anyway. Without one, asks each site that
    has jobs itself, with one request each half minute. In both cases, reads the last line of one
    running job at each site in that time. Ends when no job is left to watch, or with Ctrl-C; the
    jobs go on.
    """
    console = tables.make_console()
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

    def look(self) -> list[JobOverview]:
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
        shown = {record.id for record in present_tries(self._records)}
        return [job for job in found if job.record.id in shown]

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

    def as_json(self, jobs: Sequence[JobOverview]) -> dict[str, Any]:
        """Return all of it as a value for JSON."""
        now = time.time()
        return {
            "controlled": self.controlled,
            "sites": {
                total.site: {c.value: number for c, number in total.jobs.items()}
                for total in site_totals(jobs)
            },
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
    async with Visitors(directory, given) as visitors:
        watched = _Watched(directory, visitors)
        if not watched.controlled:
            await visitors.look()
        jobs = watched.look()
        if as_json:
            typer.echo(json_text(watched.as_json(jobs)))
            return
        console = tables.make_console()
        view = watch_view(
            jobs, now=time.time(), width=console.width, directory=directory, notes=watched.notes,
            transfers=watched.transfers,
        )  # fmt: skip
        console.print(view)


async def _live(directory: Path, given: Sequence[str]) -> None:
    console = tables.make_console()
    async with Visitors(directory, given) as visitors:
        watched = _Watched(directory, visitors)
        look: asyncio.Task[None] | None = None
        due = 0.0

        def view(*, last: bool = False) -> RenderableType:
            transfers = watched.transfers
            others = _OTHER_LINES + min(len(transfers), MOST_TRANSFERS)
            return watch_view(
                jobs, now=time.time(), width=console.width, directory=directory,
                rows=None if last else console.height - others,
                notes=watched.notes, transfers=transfers, last_lines=visitors.last_lines,
            )  # fmt: skip

        async def ask() -> None:
            if not watched.controlled:
                await visitors.look()
            running = [job for job in jobs if job.condition is Condition.RUNNING]
            shown = watch_order(running)[: max(1, console.height - _OTHER_LINES)]
            await visitors.read_logs([job.record for job in shown])

        jobs = watched.look()
        try:
            with Live(view(), console=console, auto_refresh=False, transient=True) as live:
                while True:
                    jobs = watched.look()
                    live.update(view(), refresh=True)
                    if look is None and time.monotonic() >= due:
                        due = time.monotonic() + _LOOK_S
                        look = asyncio.create_task(ask())
                    await asyncio.sleep(_REFRESH_S)
                    if look is not None and look.done():
                        look.result()
                        look = None
                        jobs = watched.look()
                        if not watched.controlled and not any(job.condition.moving for job in jobs):
                            break
        finally:
            if look is not None:
                look.cancel()
                await asyncio.gather(look, return_exceptions=True)
        console.print(view(last=True))
