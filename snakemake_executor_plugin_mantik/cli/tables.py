"""Tables as all commands print them."""

from collections.abc import Container, Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from snakemake_executor_plugin_mantik.common.errors import printable

_ONE_LINE = 10_000
"""Columns where nobody looks on but a program: each thing has a line of its own."""


def make_console() -> Console:
    """Where tables are printed: as wide as the terminal, or each thing in one line."""
    found = Console()
    return found if found.is_terminal else Console(width=_ONE_LINE)


def new_table(titles: Iterable[str], right: Container[str] = ()) -> Table:
    """An empty table.

    Args:
        titles: of its columns.
        right: those whose cells stand at their right.
    """
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        made.add_column(title, justify="right" if title in right else "left")
    return made


def add_row(to: Table, cells: Iterable[str]) -> None:
    """Add a line. Cells are text, not markup: names and outcomes are the user's and the site's."""
    to.add_row(*(Text(" ".join(printable(cell).split())) for cell in cells))
