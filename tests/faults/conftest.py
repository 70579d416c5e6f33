"""Prints at the end what the matrix has shown."""

from collections.abc import Iterator

import pytest

from tests.faults.reasons import NOT_TRIED

FOUND = ("jobs run", "lost", "doubled", "misreported")


def _cells(reporter: pytest.TerminalReporter) -> Iterator[tuple[int, ...]]:
    for outcome in ("passed", "failed"):
        for report in reporter.getreports(outcome):
            yield from (told for name, told in report.user_properties if name == "cell")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell the counts of all cells, and which make no sense."""
    cells = list(_cells(terminalreporter))
    if not cells:
        return
    sums = [sum(column) for column in zip(*cells, strict=True)]
    told = ", ".join(f"{number} {name}" for name, number in zip(FOUND, sums, strict=True))
    terminalreporter.section("the fault matrix")
    terminalreporter.line(f"{len(cells)} cells tried: {told}")
    for cell, reason in NOT_TRIED.items():
        terminalreporter.line(f"not tried: {cell}: {reason}")
