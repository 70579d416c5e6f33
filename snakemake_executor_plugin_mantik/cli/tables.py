"""Print tables and progress bars in the same style for all commands."""

import sys
from collections.abc import Container, Iterable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from snakemake_executor_plugin_mantik.common.errors import printable

ONE_LINE = 10_000
"""Columns without a terminal, so that programs find each row in one line."""


def make_console() -> Console:
    """Return a console as wide as the terminal; without one, each row gets one line."""
    found = Console()
    return found if found.is_terminal else Console(width=ONE_LINE)


def new_table(titles: Iterable[str], right: Container[str] = ()) -> Table:
    """Return an empty table; `right` holds the titles of right-aligned columns."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        made.add_column(title, justify="right" if title in right else "left")
    return made


def add_row(to: Table, cells: Iterable[str]) -> None:
    """Add a row. Cells are text, not markup: names and outcomes come from users and sites."""
    to.add_row(*(Text(" ".join(printable(cell).split())) for cell in cells))


def make_progress() -> Progress:
    """Return a progress bar of bytes; without a terminal it shows nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, TimeRemainingColumn(), disable=not sys.stderr.isatty())
