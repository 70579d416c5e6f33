"""`storage.mantik(…)` in a Snakefile: outputs that stay at a site, and datasets that lie there."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.support.command import smk_mantik
from tests.support.ports import free_port
from tests.support.workflows import UNTRACKED, Project, tells, until

STAYS = """
    rule all:
        input: "report.txt", storage.mantik("results/set.txt")

    rule prepare:
        input: "data/raw.txt"
        output: storage.mantik("results/set.txt"), "results/size.txt"
        log: "logs/prepare.txt"
        shell:
            "echo p >> ran.txt; cat {input} > {output[0]}; wc -c < {output[0]} > {output[1]};"
            " echo {output} > {log}; [ -e later ] || touch -d 2020-01-01 {output[0]}"

    rule train:
        input: storage.mantik("results/set.txt")
        output:
            storage.mantik(temp("results/model.txt")),
            storage.mantik(directory("results/steps")),
        params: name=lambda wildcards, input: f"--in={input[0]}"
        script: "train.py"

    rule score:
        input: storage.mantik(["results/model.txt", "results/steps"]), bytes="results/size.txt"
        output: "report.txt"
        shell: "echo s >> ran.txt; cat {input[0]} {input[1]}/1 {input.bytes} > {output}"
"""
TRAIN = """
import os
assert snakemake.input[0] == "results/set.txt", snakemake.input[0]
assert snakemake.params.name == "--in=results/set.txt", snakemake.params.name
open("ran.txt", "a").write("t\\n")
open(snakemake.output[0], "w").write(open(snakemake.input[0]).read() + "model\\n")
os.makedirs(snakemake.output[1], exist_ok=True)
open(snakemake.output[1] + "/1", "w").write("1\\n")
"""


@pytest.fixture
def workflow(both: Project) -> Project:
    both.extra |= UNTRACKED
    return both


def test_named_outputs_stay(workflow: Project) -> None:
    workflow.write("Snakefile", STAYS)
    workflow.write("train.py", TRAIN)
    workflow.write("data/raw.txt", "raw\n")

    workflow.run().ok()

    assert workflow.read("report.txt") == "raw\nmodel\n1\n4\n"
    assert workflow.read("results/size.txt") == "4\n"
    assert workflow.read("logs/prepare.txt") == "results/set.txt results/size.txt\n"
    assert not workflow.exists("results/set.txt")
    assert (workflow.workspace / "results/set.txt").read_text() == "raw\n"
    assert not (workflow.workspace / "results/model.txt").exists()  # temp()
    assert "".join(workflow.lines()) == "pts"

    target = ["get", "--all-targets", "--", "train"]
    tells(smk_mantik(workflow, *target).output, "do not exist: results/model.txt")  # temp()
    assert workflow.read("results/steps/1") == "1\n"
    assert not workflow.exists("results/set.txt")
    smk_mantik(workflow, "get", "--all").ok()
    assert workflow.read("results/set.txt") == "raw\n"
    (workflow.workspace / "results/set.txt").unlink()
    (workflow.workspace / "later").touch()
    workflow.run("--forcerun", "score", "--mantik-presubmit", "0").ok()
    assert "".join(workflow.lines()) == "ptspts"


READS = """
    rule all:
        input: "report.txt"

    rule count:
        input:
            table=storage.mantik("{SITE}:{DATA}/tables/one.csv"),
            trees=storage.mantik("{SITE}:{DATA}/trees"),
        output: "count.txt"
        params: lambda wildcards, input: f"--table {{input.table}}"
        shell: "echo {{params}} > {{output}}; cat {{input.table}} {{input.trees}}/a >> {{output}}"

    rule sample:
        input: storage.mantik("{SITE}:{DATA}/tables/{{name}}.csv")
        output: "{{name}}.out"
        shell: "cp {{input}} {{output}}"

    rule report:
        input: "count.txt", "one.out", "two.out"
        output: "report.txt"
        shell: "echo r >> ran.txt; cat {{input}} > {{output}}"
"""


@pytest.fixture
def data(workflow: Project) -> Path:
    data = workflow.place.storage / f"data-{workflow.workspace.parents[3].name}"
    for name, text in {"tables/one.csv": "1\n", "tables/two.csv": "2\n", "trees/a": "a\n"}.items():
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    workflow.write("Snakefile", READS.format(SITE=workflow.place.name, DATA=data))
    return data


def test_datasets_are_read_where_they_lie(workflow: Project, data: Path) -> None:
    before = sorted(p for p in data.rglob("*"))

    first = workflow.run().ok().output

    assert workflow.read("report.txt") == f"--table {data}/tables/one.csv\n1\na\n1\n2\n"
    assert "was not looked up" not in first
    os.utime(data / "tables/two.csv", (time.time() + 60,) * 2)
    said = workflow.run("-n").ok().output
    tells(said, "rule sample:", "rule report:")
    assert "rule count:" not in said
    workflow.run("--delete-all-output").ok()
    assert sorted(data.rglob("*")) == before


def test_a_dataset_that_does_not_exist(workflow: Project, data: Path) -> None:
    (data / "tables/two.csv").unlink()

    tells(
        workflow.run().failed(), "do not exist", "tables/two.csv (rule sample)", "nothing submitted"
    )

    assert not (workflow.workspace / "ran.txt").exists()


@pytest.mark.parametrize("place", ["sandbox"], indirect=True)
def test_datasets_of_a_site_that_does_not_answer(workflow: Project, data: Path) -> None:
    assert data.exists()
    workflow.run().ok()
    config = workflow.config.read_text()
    nowhere = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{free_port()}", config)
    workflow.config.write_text(nowhere)

    said = workflow.run("-n").ok().output

    tells(said, f"Datasets at {workflow.place.name} were not looked up", "Nothing to be done")


MISTAKES = {
    "another site": (
        'rule a:\n    input: storage.mantik("nowhere:/p/data")\n    output: "x"\n    shell: "true"',
        "rule a reads nowhere:/p/data, but there is no site 'nowhere', only hpc1",
    ),
    "a dataset as an output": (
        'rule a:\n    output: storage.mantik("hpc1:/p/data")\n    shell: "true"',
        "rule a makes hpc1:/p/data, but datasets are read-only",
    ),
    "a local rule": (
        'localrules: a\nrule a:\n    input: storage.mantik("hpc1:/p/data"), "y"\n    output: "x"\n'
        '    shell: "true"\nrule b:\n    output: "y"\n    shell: "true"',
        "rule a runs on this machine and uses hpc1:/p/data, which stays at a site",
    ),
    "a nested Snakemake": (
        'rule a:\n    output: storage.mantik("x")\n    run: pass',
        "rule a has run: and needs a Snakemake at the site",
    ),
    "a flag": (
        'rule a:\n    output: storage.mantik(touch("x"))\n    shell: "true"',
        "rule a makes x, which cannot stay at a site",
    ),
    "MD5": (
        'rule a:\n    output: storage.mantik(ensure("x", md5="1"))\n    shell: "true"',
        "rule a ensures the MD5 or SHA-1 of x",
    ),
    "two names": (
        'rule b:\n    input: "x", "y"\n    output: "z"\n    shell: "true"\n'
        'rule a:\n    output: storage.mantik("x"), "y"\n    shell: "true"',
        "a file is named with and without storage.mantik: x",
    ),
    "a wildcard for the site": (
        'rule a:\n    input: storage.mantik("{site}:/p")\n    output: "{site}.x"\n'
        '    shell: "true"',
        "the name of a dataset's site cannot have wildcards",
    ),
    "another protocol": (
        'rule a:\n    output: storage.mantik("s3://bucket/x")\n    shell: "true"',
        "it is neither a path nor SITE:/absolute/path",
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("two names", "MD5") else pytest.mark.nightly)
        for kind in MISTAKES
    ],
)
def test_mistakes_are_found_before_anything_is_submitted(project: Project, kind: str) -> None:
    project.extra |= UNTRACKED
    snakefile, message = MISTAKES[kind]
    project.write("Snakefile", snakefile)

    project.write("x", "here\n")  # as smk-mantik get brings it

    tells(project.run("--forceall").failed(), message)

    assert not project.workspace.exists()


@pytest.mark.parametrize("late", ["z", "x"])  # a job is added; one gets another input
def test_after_a_checkpoint_a_file_is_named_in_another_way(project: Project, late: str) -> None:
    project.extra |= UNTRACKED
    project.write("x", "here\n")
    project.write(
        "Snakefile",
        f"""
        rule late:
            input: lambda _: [checkpoints.split.get(), "{late}"][1]
            output: "late.txt"
            shell: "touch {{output}}"

        checkpoint split:
            input: storage.mantik("x")
            output: "split.txt"
            shell: "touch {{output}}"

        rule z:
            input: "x"
            output: "z"
            shell: "cp {{input}} {{output}}"

        rule x:
            output: storage.mantik("x")
            shell: "touch {{output}}"
        """,
    )

    said = project.run("late").failed()
    rule = "z" if late == "z" else "late"
    tells(said, f"rule {rule}: a file is named with and without storage.mantik: x")
    assert "nothing submitted" not in said.lower(), "the checkpoint was"

    assert {record.rule for record in project.attempts} == {"split"}


def test_a_run_on_this_machine_alone(project: Project) -> None:
    project.extra |= UNTRACKED
    made = 'rule a:\n    output: storage.mantik("x")\n    shell: "touch {output}"\n'
    project.write("Snakefile", made)
    project.run().ok()
    read = 'rule b:\n    input: storage.mantik("x")\n    output: "y"\n    shell: "touch {output}"\n'
    project.write("Snakefile", f"localrules: b\n{read}{made}")

    tells(project.run().failed(), "rule b runs on this machine and uses x")


def test_a_dataset_that_changes_while_its_job_waits(workflow: Project, data: Path) -> None:
    workflow.write(
        "Snakefile",
        f"""
        rule read:
            input: storage.mantik("{workflow.place.name}:{data}/trees/a")
            output: "out.txt"
            shell:
                "cp {{input}} {{output}}; echo >> ran.txt;"
                " until [ -e go ]; do sleep 0.1; done"
        """,
    )
    running = workflow.start("--nolock", "--rerun-incomplete")
    until((workflow.workspace / "ran.txt").exists, "the job to run")
    running.kill()
    (data / "trees/a").write_text("changed\n")
    workflow.go()

    workflow.run("--nolock", "--rerun-incomplete").ok()

    assert workflow.read("out.txt") == "changed\n"
