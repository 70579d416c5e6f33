"""The pipeline goes on without this machine: jobs wait at the site for those that make their
inputs."""

from pathlib import Path

import pytest

from tests.support.workflows import Project, Running, tells, tree, until

SNAKEFILE = r"""
    rule all:
        input: "report.txt"

    def runs(name):
        return (f"echo {name} >> ran.txt; until [ -e go ] || [ ! -e held ]; do sleep 0.1; done; ")

    rule prepare:
        output: "data/set.txt", directory("data/parts")
        shell: runs("prepare") + "mkdir -p {output[1]}; echo 1 > {output[1]}/a; echo 2 > {output[0]}"

    rule constants:
        output: temp("constants.txt")
        shell: runs("constants") + "echo 3 > {output}"

    rule train:
        input: "data/set.txt", "data/parts", "constants.txt"
        output: "model/{n}.txt"
        shell: runs("train") + "cat {input[0]} {input[1]}/a {input[2]} > {output}; echo {wildcards.n} >> {output}"

    rule evaluate:
        input: "model/{n}.txt"
        output: "score/{n}.txt"
        log: "logs/evaluate-{n}.txt"
        shell: runs("evaluate") + "wc -l < {input} > {output}; echo evaluated > {log}"

    rule report:
        input: expand("score/{n}.txt", n=[1, 2]), "model/1.txt"
        output: "report.txt"
        script: "report.py"
"""
SCRIPT = """
    with open("ran.txt", "a") as ran:
        print("report", file=ran)
    with open(snakemake.output[0], "w") as report:
        for path in snakemake.input:
            report.write(open(path).read())
"""
RAN = ["constants", "evaluate", "evaluate", "prepare", "report", "train", "train"]


@pytest.fixture
def pipeline(project: Project) -> Project:
    project.write("Snakefile", SNAKEFILE)
    project.write("report.py", SCRIPT)
    return project


def hold(project: Project) -> None:
    """Let each job wait until `go`."""
    project.workspace.mkdir(parents=True, exist_ok=True)
    (project.workspace / "held").touch()


def go(project: Project) -> None:
    (project.workspace / "go").touch()


def ran(project: Project) -> list[str]:
    """What has begun to run at the site, as the jobs themselves noted it."""
    path = project.workspace / "ran.txt"
    return sorted(path.read_text().split()) if path.exists() else []


def submitted(project: Project) -> int:
    return sum(len(record.site_jobs) for record in project.tries)


def all_submitted(project: Project, run: Running, number: int) -> None:
    """Wait until so many jobs are at the site."""
    until(lambda: run.process.poll() is not None or submitted(project) >= number, "the jobs")
    assert run.process.poll() is None, run.output


def test_it_goes_on_after_its_controller_was_killed(pipeline: Project) -> None:
    hold(pipeline)
    run = pipeline.start()
    all_submitted(pipeline, run, 7)
    run.kill()
    go(pipeline)
    until(lambda: (pipeline.workspace / "report.txt").exists(), "the report at the site")
    again = pipeline.run("--rerun-incomplete", "--nolock").ok()
    assert ran(pipeline) == RAN
    assert submitted(pipeline) == 7, again.output
    there = tree(pipeline.directory)
    twin = pipeline.twin()
    (twin.directory / "ran.txt").unlink(missing_ok=True)
    for path in ("report.txt", "score/1.txt", "model/1.txt", "data/set.txt"):
        assert there[path] == (pipeline.workspace / path).read_bytes()


def test_it_runs_to_its_end_with_its_controller(pipeline: Project) -> None:
    run = pipeline.run().ok()
    assert ran(pipeline) == RAN, run.output
    assert submitted(pipeline) == 7
    assert not pipeline.exists("constants.txt")
    assert pipeline.read("logs/evaluate-1.txt") == "evaluated\n"
