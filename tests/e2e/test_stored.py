"""Files that stay at the site where a job made them."""

import pytest

from tests.support.workflows import FILES_STAY, UNTRACKED, Project

PIPELINE = """
    localrules: report

    rule report:
        input: "results/score.txt", "data/raw.txt"
        output: "report.txt"
        log: "logs/report.txt"
        shell: "cat {input} > {output}; echo written > {log}"

    rule prepare:
        input: "data/raw.txt"
        output: "results/set.txt"
        log: "logs/prepare.txt"
        shell: "sed s/raw/set/ {input} > {output}; echo prepared > {log}; echo p >> ran.txt"

    rule train:
        input: "results/set.txt"
        output: "results/model.txt", directory("results/steps")
        shell:
            "cat {input} > {output[0]}; echo model >> {output[0]};"
            " mkdir -p {output[1]}/a; echo 1 > {output[1]}/a/1; echo 2 > {output[1]}/2;"
            " echo t >> ran.txt"

    rule score:
        input: rules.train.output
        output: "results/score.txt"
        shell: "cat {input[0]} {input[1]}/2 {input[1]}/a/1 > {output}; echo s >> ran.txt"
"""


@pytest.fixture
def pipeline(either: Project) -> Project:
    either.extra |= UNTRACKED
    either.write("Snakefile", PIPELINE)
    either.write("data/raw.txt", "raw\n")
    return either


def ran(project: Project) -> str:
    return "".join((project.workspace / "ran.txt").read_text().split())


def test_outputs_stay(pipeline: Project) -> None:
    pipeline.run(*FILES_STAY).ok()

    assert pipeline.read("report.txt") == "set\nmodel\n2\n1\nraw\n"
    assert pipeline.read("data/raw.txt") == "raw\n"
    assert pipeline.read("logs/prepare.txt") == "prepared\n"
    assert pipeline.read("logs/report.txt") == "written\n"
    assert not pipeline.exists("results")
    assert ran(pipeline) == "pts"
    stored = pipeline.workspace / "results"
    assert (stored / "model.txt").read_text() == "set\nmodel\n"

    again = pipeline.run(*FILES_STAY).ok()
    assert "Nothing to be done" in again.output
