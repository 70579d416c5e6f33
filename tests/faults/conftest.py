"""Print how many pairs of misfortunes the schedules of a test run have met."""

from itertools import combinations

import pytest

from tests.support.schedules import KINDS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    met = {
        pair
        for reports in terminalreporter.stats.values()
        for report in reports
        for key, kinds in getattr(report, "user_properties", ())
        if key == "misfortunes"
        for pair in combinations(kinds, 2)
    }
    lacking = [pair for pair in combinations(sorted(KINDS), 2) if pair not in met]
    if met:
        some = ", ".join(map(" and ".join, lacking[:9])) + (", …" if lacking[9:] else "")
        never = f"; never together: {some}" if lacking else ""
        terminalreporter.line(
            f"{len(met)} of {len(met) + len(lacking)} pairs of misfortunes{never}"
        )
