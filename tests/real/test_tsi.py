"""Whole workflows at a real UNICORE/X with its TSI, in front of a real Slurm."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.centre.tsi import SOFTWARE
from tests.support.workflows import UNTRACKED, Place, Project

pytestmark = [pytest.mark.software(SOFTWARE), pytest.mark.timeout(900)]


@pytest.fixture
def project(unicore_centre_place: Place, tmp_path: Path) -> Iterator[Project]:
    """A project at the centre."""
    made = Project(tmp_path / "project", unicore_centre_place, dict(UNTRACKED))
    yield made
    made.close()


def test_workflow(project: Project) -> None:
    project.write("in.txt", "1\n")
    project.write(
        "Snakefile",
        """
        rule all:
            input: expand("out/{n}.txt", n=range(3))
        rule one:
            input: "in.txt"
            output: "out/{n}.txt"
            shell: "cat {input} > {output}; id -un >> {output}"
        """,
    )

    project.run().ok()

    assert project.read("out/2.txt") == "1\nmantik-user\n"
