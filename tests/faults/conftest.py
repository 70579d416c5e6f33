"""Prints at the end what the matrix has shown."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.faults.reasons import NOT_TRIED

FOUND = ("jobs run", "lost", "doubled", "misreported")
WALKED = ("jobs run", "runs ended from here", "faults met")


def _properties(reporter: pytest.TerminalReporter, kind: str) -> Iterator[Any]:
    for outcome in ("passed", "failed"):
        for report in reporter.getreports(outcome):
            yield from (told for name, told in report.user_properties if name == kind)


def _summed(rows: list[tuple[int, ...]], names: Sequence[str]) -> str:
    sums = [sum(column) for column in zip(*rows, strict=True)]
    return ", ".join(f"{number} {name}" for name, number in zip(names, sums, strict=True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell the counts of all cells, which make no sense, and the counts of the random walks."""
    if walks := list(_properties(terminalreporter, "walk")):
        terminalreporter.section("random walks of real processes")
        terminalreporter.line(f"{len(walks)} without a wrong: {_summed(walks, WALKED)}")
    if schedules := list(_properties(terminalreporter, "schedules")):
        happened: Counter[str] = sum(map(Counter, schedules), Counter())
        terminalreporter.section("random schedules")
        terminalreporter.line(", ".join(f"{n} {kind}" for kind, n in sorted(happened.items())))
    cells = list(_properties(terminalreporter, "cell"))
    if not cells:
        return
    terminalreporter.section("the fault matrix")
    terminalreporter.line(f"{len(cells)} cells tried: {_summed(cells, FOUND)}")
    for cell, reason in NOT_TRIED.items():
        terminalreporter.line(f"not tried: {cell}: {reason}")
