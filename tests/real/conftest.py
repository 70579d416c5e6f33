"""Real servers and programs, and the table of what really ran."""

import os
import pwd
import shutil
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.sandbox.settings import SiteOption
from tests.real import apptainer, slurm
from tests.support.places import PATIENT
from tests.support.workflows import Place, Project, place_in

SOFTWARE = {
    "Slurm": ("dpkg-query", "--show", "slurm-wlm"),
    "Apptainer": (str(apptainer.PROGRAM), "--version"),
    "environment modules": ("dpkg-query", "--show", "environment-modules"),
    "Python venv": ("python3", "--version"),
}
"""What the marks `software` name, and the command that tells its version."""


def require(lacking: list[str], what: str) -> None:
    """Skip what cannot run for want of programs; where nothing may be skipped, fail."""
    if not lacking:
        return
    reason = f"{what} needs {', '.join(lacking)}: tests/real/install brings it, as root on Debian"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _programs() -> Iterator[None]:
    """Let the sites' jobs find apptainer: they have the search path of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", apptainer.search_path())
        yield


@pytest.fixture(scope="session")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """The worker's Slurm, and this process led to it."""
    require(slurm.lacking(), "Slurm")
    directory = tmp_path_factory.mktemp("slurm")
    with slurm.Slurm(directory) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def slurm_box(
    real_slurm: slurm.Slurm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sandbox]:
    """A sandbox on the worker's Slurm: `hpc1` is UNICORE, `hpc2` firecREST."""
    sites = [SiteOption("hpc1"), SiteOption("hpc2", "firecrest")]
    settings = replace(PATIENT, scheduler="slurm")
    with Sandbox(tmp_path_factory.mktemp("sandbox-slurm"), sites, settings) as box:
        yield box


@pytest.fixture
def project(slurm_box: Sandbox, tmp_path: Path) -> Iterator[Project]:
    """A project at the UNICORE site on Slurm."""
    made = Project(tmp_path / "project", place_in(slurm_box, "hpc1"))
    yield made
    made.close()


@pytest.fixture
def firecrest_place(slurm_box: Sandbox) -> Place:
    return place_in(slurm_box, "hpc2")


@pytest.fixture
def firecrest(firecrest_place: Place, tmp_path: Path) -> Iterator[Project]:
    """A project at the firecREST site on Slurm."""
    made = Project(tmp_path / "project", firecrest_place)
    yield made
    made.close()


@pytest.fixture(params=["project", "firecrest"])
def on_slurm(request: pytest.FixtureRequest) -> Project:
    """A project at the site of each API on Slurm."""
    made: Project = request.getfixturevalue(request.param)
    return made


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is a container image."""
    require(apptainer.lacking(), "Apptainer")
    return apptainer.make_root(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(scope="session")
def user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


# --- the table ---------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for mark in item.iter_markers("software"):
        report.user_properties.append(("software", mark.args[0]))
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
    terminalreporter.section("what really ran")
    for name, count in counts.items():
        told = ", ".join(f"{number} {outcome}" for outcome, number in count.items()) or "nothing"
        ran = count["passed"] or count["failed"]
        more = f"  {_version(SOFTWARE[name])}" if ran else f"  {reasons.get(name, '')}"
        terminalreporter.write_line(f"{name:<22}{told:<24}{more}".rstrip())


def _version(command: tuple[str, ...]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return " ".join(asked.stdout.split())
