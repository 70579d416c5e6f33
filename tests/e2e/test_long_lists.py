"""Rules with so many files that no scheduler takes a script with all of their names."""

import pytest

from tests.support.places import REAL
from tests.support.workflows import Project

FOLDER = "/".join(["few files are enough as their names are so long" * 5] * 6)
FILES = 3000
"""Their names have 4.3 MB; Slurm takes scripts of 4 MiB."""


@pytest.mark.parametrize(
    "place", [pytest.param("firecrest", marks=pytest.mark.nightly), *REAL], indirect=True
)
def test_names_that_no_script_could_hold(both: Project) -> None:
    both.write(
        "Snakefile",
        f"""
        rule count:
            input: expand("data/{FOLDER}/{{n}}.txt", n=range({FILES}))
            output: "out.txt"
            resources: mem_mb=500  # bash holds each name several times
            script: "count.py"
        """,
    )
    both.write(
        "count.py",
        """
        lines = [line for path in snakemake.input for line in open(path)]
        with open(snakemake.output[0], "w") as out:
            out.write(f"{len(lines)}\\n")
        """,
    )
    for n in range(FILES):
        both.write(f"data/{FOLDER}/{n}.txt")
    both.run().ok()
    assert both.read("out.txt") == f"{FILES}\n"
