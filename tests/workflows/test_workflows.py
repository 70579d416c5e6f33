"""What a Snakefile can say gives the same at a site as here: each workflow beside this file.

A workflow is a directory with a `Snakefile` and what it reads. Optional are `options`, words for
the `snakemake` command, one a line, where an empty line begins another run; `environment`, lines
NAME=VALUE for variables; and `needs`, programs that it calls, one a line; `snakemake` among them
stands for the Python environment of the tests, here and at the sites. It runs with Snakemake's
local executor and through a site of each API; exit code and all files are compared after each run.
"""

import os
import shutil
import sys
from contextlib import closing
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.workflows import UNTRACKED, Place, Project, tree, with_snakemake

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
    """Copy a workflow to where it is to run."""
    shutil.copytree(
        HERE / name,
        directory,
        symlinks=True,
        dirs_exist_ok=True,
        ignore=lambda folder, names: [n for n in names if n in ABOUT and folder.endswith(name)],
    )


@pytest.mark.parametrize("name", WORKFLOWS)
def test_same_as_locally(name: str, project: Project, firecrest_place: Place) -> None:
    needs = set(lines(name, "needs"))
    places = [project.place, firecrest_place]
    extra = UNTRACKED
    if SNAKEMAKE in needs:
        needs.remove(SNAKEMAKE)
        places = [with_snakemake(place) for place in places]
        extra = {**UNTRACKED, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    path = extra.get("PATH")
    lacking = [program for program in sorted(needs) if shutil.which(program, path=path) is None]
    if lacking:
        pytest.skip(f"there is no {', '.join(lacking)} on this machine")
    names = ("twin", "project", "other")
    twin, project, other = (
        Project(project.directory.with_name(each), place, dict(extra))
        for each, place in zip(names, (places[0], *places), strict=True)
    )
    for each in (twin, project, other):
        lay_out(name, each.directory)
        each.extra |= dict(line.split("=", 1) for line in lines(name, "environment"))
    groups = groupby(lines(name, "options"), key=bool)
    with closing(twin), closing(project), closing(other):
        for options in [list(words) for given, words in groups if given] or [[]]:
            # At the same time: a run at a site is mostly waiting.
            started = [(remote, remote.start(*options)) for remote in (project, other)]
            before = tree(twin.directory)
            expected = twin.run(*options, local=True)
            files = tree(twin.directory)
            assert files != before, f"nothing was made, nothing is compared: {expected.output}"
            for remote, running in started:
                ran = running.end()
                told = f"{expected.output}\n---- at the site:\n{ran.output}"
                assert ran.code == expected.code, told
                assert tree(remote.directory) == files, told
                assert "Traceback" not in ran.output, told
