"""The mark of tests that run on real software, and the table of what really ran.

`make test` leaves out what is marked `software(NAME)`; `make test-real` runs nothing else. A test
that uses a fixture of `FIXTURES` is marked by that.
"""

import importlib.metadata
import shutil
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.real import apptainer
from tests.real.centre import firecrest, tsi
from tests.support import s3, unicorex
from tests.support.unicoreserver import version

FIXTURES = {
    "unicorex": unicorex.SOFTWARE,
    "narrow_unicorex": unicorex.SOFTWARE,
    "unicorex_to_stop": unicorex.SOFTWARE,
    "tsi_unicorex": tsi.SOFTWARE,
    "own_unicore": tsi.SOFTWARE,
    "real_firecrest": firecrest.SOFTWARE,
    "real_slurm": "Slurm",
    "tracking_server": "MLflow server",
}
"""Fixtures that stand for a real server."""


GROUPS = {
    **dict.fromkeys(("Slurm", "Apptainer", "environment modules", "Python venv"), "Slurm"),
    "MLflow": "MLflow",
    "S3": "S3",
}
"""What runs in one worker, because each worker would start a server of its own."""


IN_TURN = (("unicore_centre", "firecrest_centre"), ("tsi_bench", "firecrest_bench"))
"""Parameters of tests: the real servers of the two APIs. CI runs a test at one of them, as its name
decides; `make nightly` at both."""


def _waits_for_night(item: pytest.Item) -> bool:
    """Whether a test runs in CI at the real server of the other API."""
    found = getattr(item, "callspec", None)
    if found is None or item.path.is_relative_to(Path(__file__).parent):
        return False
    for servers in IN_TURN:
        for server in servers:
            if server in found.params.values():
                name = item.nodeid.replace(server, "")
                return servers.index(server) != zlib.crc32(name.encode()) % len(servers)
    return False


def _says(*command: str) -> Callable[[], str]:
    """Asks a program for its version."""

    def ask() -> str:
        if shutil.which(command[0]) is None:
            return ""
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        return " ".join(asked.stdout.split("\n- ")[0].split())

    return ask


SOFTWARE: dict[str, Callable[[], str]] = {
    unicorex.SOFTWARE: version,
    tsi.SOFTWARE: version,
    firecrest.SOFTWARE: firecrest.version,
    s3.SOFTWARE: _says(str(s3.RCLONE), "version"),
    "MLflow": lambda: f"mlflow {importlib.metadata.version('mlflow')}",
    "MLflow server": lambda: f"mlflow {importlib.metadata.version('mlflow')}",
    "MLflow in a file": lambda: f"mlflow {importlib.metadata.version('mlflow')}",
    "Snakemake at a site": lambda: f"snakemake {importlib.metadata.version('snakemake')}",
    "Slurm": _says("dpkg-query", "--show", "slurm-wlm"),
    "Apptainer": _says(str(apptainer.PROGRAM), "--version"),
    "environment modules": _says("dpkg-query", "--show", "environment-modules"),
    "Python venv": _says("python3", "--version"),
}
"""What the marks name, and what tells its version."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what uses a real server, and keep together what shares one."""
    for fixture in getattr(item, "fixturenames", ()):
        if (name := FIXTURES.get(fixture)) is not None:
            item.add_marker(pytest.mark.software(name))
    if _waits_for_night(item):
        item.add_marker(pytest.mark.nightly)
    for mark in item.iter_markers("software"):
        if (group := GROUPS.get(mark.args[0])) is not None:
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    names = {mark.args[0] for mark in item.iter_markers("software")}
    report.user_properties.extend(("software", name) for name in sorted(names))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: dict[str, Counter[str]] = {name: Counter() for name in SOFTWARE}
    reasons: dict[str, str] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, name in getattr(report, "user_properties", ()):
                if key == "software":
                    counts[name][outcome] += 1
                    if outcome == "skipped":
                        reasons[name] = str(report.longrepr[2]).removeprefix("Skipped: ")
    if not any(counts.values()):
        return
    terminalreporter.section("what really ran")
    for name, count in counts.items():
        told = ", ".join(f"{number} {outcome}" for outcome, number in count.items()) or "nothing"
        ran = count["passed"] or count["failed"]
        more = f"  {SOFTWARE[name]()}" if ran else f"  {reasons.get(name, '')}"
        terminalreporter.write_line(f"{name:<22}{told:<24}{more}".rstrip())
