"""A real Slurm behind a slow sbatch, which makes three of its jobs of each: one of them runs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.real.mariadb import found
from tests.real.slurm import Slurm
from tests.support.places import PATIENT
from tests.support.workflows import UNTRACKED, Project, place_in

pytestmark = pytest.mark.software("Slurm")

SBATCH = """#!/bin/bash
# A server that waits for it in vain asks again, and hears of the last one only.
script=$(mktemp) && cat > "$script"
echo x >> {log}
for _ in 1 2; do {sbatch} "$@" < "$script" > /dev/null && echo started >> {log}; done
sleep 0.3
{sbatch} "$@" < "$script" && echo started >> {log}
code=$?
rm -f "$script"
exit $code
"""
SNAKEFILE = r"""
    rule all:
        input: expand("out/{n}.txt", n=range(6))

    rule one:
        output: "out/{n}.txt"
        shell: "echo {wildcards.n} >> ran.txt; sleep 3; echo {wildcards.n} > {output}"
"""


@pytest.fixture(params=["hpc1", pytest.param("hpc2", marks=pytest.mark.nightly)])
def behind_slow(
    request: pytest.FixtureRequest, real_slurm: Slurm, tmp_path: Path
) -> Iterator[Project]:
    """A project at a site whose sbatch is slow; hpc1 is UNICORE, hpc2 firecREST."""
    del real_slurm
    programs = tmp_path / "bin"
    programs.mkdir()
    sbatch = programs / "sbatch"
    sbatch.write_text(SBATCH.format(sbatch=found("sbatch"), log=tmp_path / "log"))
    sbatch.chmod(0o755)
    sites = [SiteOption("hpc1"), SiteOption("hpc2", "firecrest")]
    settings = replace(PATIENT, scheduler="slurm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(programs), prepend=":")
        with Sandbox(tmp_path / "sandbox", sites, settings) as box:
            project = Project(tmp_path / "project", place_in(box, request.param))
            project.extra.update(UNTRACKED)
            yield project
            project.close()


def test_each_job_runs_once(behind_slow: Project) -> None:
    project = behind_slow
    project.write("Snakefile", SNAKEFILE)
    said = project.run().ok().output
    log = (project.directory.parent / "log").read_text().split()
    assert log.count("started") == 18, log
    assert sorted((project.workspace / "ran.txt").read_text().split()) == list("012345"), said
    assert [project.read(f"out/{n}.txt") for n in range(6)] == [f"{n}\n" for n in range(6)]
