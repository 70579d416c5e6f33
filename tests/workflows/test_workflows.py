"""What a Snakefile can say gives the same at a site as here: each workflow beside this file.

A workflow is a directory with a `Snakefile` and what it reads. Optional are `options`, words for
the `snakemake` command, one a line, where an empty line begins another run; `environment`, lines
NAME=VALUE for variables; and `needs`, programs that it calls, one a line; `snakemake` among them
stands for the Python environment of the tests, here and at the sites. It runs with Snakemake's
local executor and through a site; exit code and all files are compared after each run. Where no
job needs Snakemake, the site is one behind firecREST, and in another test it is that of a real server:
of each API by turns; else it is one behind UNICORE.
"""

import os
import shutil
import sys
from contextlib import ExitStack, closing
from itertools import cycle, groupby
from pathlib import Path

import pytest

from tests.real import apptainer
from tests.real.centre import firecrest, tsi
from tests.support.command import smk_mantik
from tests.support.needs import require
from tests.support.workflows import FILES_STAY, UNTRACKED, Place, Project, tree, with_snakemake

HERE = Path(__file__).parent
WORKFLOWS = sorted(path.parent.name for path in HERE.glob("*/Snakefile"))
ABOUT = ("options", "environment", "needs")
"""Files that say something about a workflow and do not belong to it."""
SNAKEMAKE = "snakemake"


def lines(name: str, about: str) -> list[str]:
    """The lines of a file about a workflow; none if there is no such file."""
    path = HERE / name / about
    return path.read_text().splitlines() if path.exists() else []


def lay_out(name: str, directory: Path) -> None:
    shutil.copytree(
        HERE / name,
        directory,
        symlinks=True,
        dirs_exist_ok=True,
        ignore=lambda folder, names: [n for n in names if n in ABOUT and folder.endswith(name)],
    )


BROUGHT = {"apptainer", "mksquashfs", "rsync"}
"""Programs that tests/real/install brings."""
THIN = [name for name in WORKFLOWS if BROUGHT.issuperset(lines(name, "needs"))]
"""Those whose jobs need no Snakemake at a site, and nothing that a machine may lack."""
CONTAINERS = [name for name in THIN if "apptainer" in lines(name, "needs")]
"""Those of them that run in containers: Apptainer is ours alone, not the users' of a centre."""
HEAVY = ("many-files", "script-python", "train-evaluate")
"""Those of them that take so long that they run at a real server alone."""
ABOUT_STORAGE = {
    *("flags-inputs", "params", "resources", "scatter-gather", "script-bash", "shell-text"),
    *("wildcards", "group-diamond", "group-touch", "helpers", "names", "paths-up", "flags-outputs"),
    *("flags-defaults", "pathvars", "storage-fs", "failing", "workdir"),
}
"""Those of them that write the paths of their files into files, which differ in a storage; and those
that Snakemake refuses with a default storage, or that have another one, keep what failed jobs have
made, or change the directory."""
IN_CI = {
    *("changes", "checkpoint", "flags-outputs", "group-diamond", "many-files", "mpi", "names"),
    "resources",
}
"""What CI runs at a real server; there `make nightly` runs all of them."""
BY_NIGHT = {
    *("all-temp", "checkpoint-full", "checkpoint-nested", "notebook", "configs", "failing", "flags-defaults", "flags-ensure-fails"),
    *("flags-inputs", "flags-touch", "from-queue", "full-flags", "full-modules", "group-failing", "handlers", "handover"),
    *("helpers", "mpi", "node-local", "paramspace", "pathvars", "profile", "report", "retries"),
    *("rules-made", "sample-sheet", "scatter-gather", "wildcards", "workdir"),
}
"""What `make nightly` alone runs at the sandbox: Snakemake alone does what they vary, or another test
shows what is particular to a site."""
STAY = [name for name in THIN if name not in {*HEAVY, *CONTAINERS, *ABOUT_STORAGE}]
STAY_IN_CI = {"group-pipe", "retries", "shadow"}
"""Those of them in which files stay that a run reads, changes or removes, or that a retry makes."""


FULL = pytest.mark.software("Snakemake at a site")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n,
            marks=[
                *([FULL] if SNAKEMAKE in lines(n, "needs") else []),
                *([pytest.mark.nightly] if n in BY_NIGHT else []),
            ],
        )
        for n in WORKFLOWS
        if n not in HEAVY and n not in CONTAINERS
    ],
)
def test_same_as_locally(
    name: str, sandbox_place: Place, firecrest_place: Place, tmp_path: Path
) -> None:
    compare(name, [firecrest_place if name in THIN else sandbox_place], tmp_path)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            n, f"{api}_centre_place", id=n,
            marks=[
                pytest.mark.software(software), *([] if n in IN_CI else [pytest.mark.nightly]),
            ],
        )
        for n, (api, software) in zip(
            [n for n in THIN if n not in CONTAINERS],
            cycle([("unicore", tsi.SOFTWARE), ("firecrest", firecrest.SOFTWARE)]),
            strict=False,
        )
    ],
)
def test_same_at_real_servers(
    name: str, place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    require([program for program in lines(name, "needs") if shutil.which(program) is None], name)
    compare(name, [request.getfixturevalue(place)], tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in STAY_IN_CI else pytest.mark.nightly) for n in STAY]
)
def test_same_when_files_stay(
    name: str, sandbox_place: Place, firecrest_place: Place, tmp_path: Path
) -> None:
    place = firecrest_place if STAY.index(name) % 2 else sandbox_place
    compare(name, [place], tmp_path, stay=True)


@pytest.mark.software("Apptainer")
@pytest.mark.parametrize("name", CONTAINERS)
def test_same_in_containers(
    name: str, firecrest_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(apptainer.lacking(), "Apptainer")
    monkeypatch.setenv("PATH", apptainer.search_path())
    compare(name, [firecrest_place], tmp_path)


def compare(name: str, places: list[Place], directory: Path, *, stay: bool = False) -> None:
    """Run a workflow here and, at the same time, at each of `places`, and compare all of it.

    With `stay`, outputs stay at the sites, and are brought here before they are compared.
    """
    needs = set(lines(name, "needs"))
    extra = UNTRACKED
    if SNAKEMAKE in needs:
        needs.remove(SNAKEMAKE)
        places = [with_snakemake(place) for place in places]
        extra = {**UNTRACKED, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    path = extra.get("PATH")
    lacking = [program for program in sorted(needs) if shutil.which(program, path=path) is None]
    if lacking:
        pytest.skip(f"there is no {', '.join(lacking)} on this machine")
    twin, *remotes = (
        Project(directory / f"{number}" / "project", place, dict(extra))
        for number, place in enumerate([places[0], *places])
    )
    for each in (twin, *remotes):
        lay_out(name, each.directory)
        each.extra |= dict(line.split("=", 1) for line in lines(name, "environment"))
    groups = groupby(lines(name, "options"), key=bool)
    with ExitStack() as opened:
        for each in (twin, *remotes):
            opened.enter_context(closing(each))
        for options in [list(words) for given, words in groups if given] or [[]]:
            # At the same time: a run at a site is mostly waiting.
            more = FILES_STAY if stay else ()
            started = [(remote, remote.start(*more, *options)) for remote in remotes]
            before = tree(twin.directory)
            expected = twin.run(*options, local=True)
            files = tree(twin.directory)
            assert files != before, f"nothing was made, nothing is compared: {expected.output}"
            for remote, running in started:
                ran = running.end()
                told = f"{expected.output}\n---- at the site:\n{ran.output}"
                assert ran.code == expected.code, told
                if stay:
                    told += smk_mantik(remote, "get", "--all", "--force").ok().output
                assert tree(remote.directory) == files, told
                assert "Traceback" not in ran.output, told
