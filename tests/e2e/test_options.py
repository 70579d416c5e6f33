"""Options of the `snakemake` command do for jobs at a site what they do for local ones."""

from itertools import pairwise
from pathlib import Path

from tests.support.workflows import Project, tells, tree

SNAKEFILE = """
    rule all:
        input: "last.txt", "beside.txt", expand("many/{n}.txt", n=range(4))

    rule first:
        output: temp("first.txt")
        shell: "echo first > {output}"

    rule second:
        input: "first.txt"
        output: "second.txt"
        threads: 2
        resources: mem_mb=100
        shell: "cat {input} > {output}; echo {threads} {resources.mem_mb} >> {output}"

    rule last:
        input: "second.txt"
        output: "last.txt"
        shell: "cat {input} > {output}"

    rule beside:
        input: "in.txt"
        output: "beside.txt"
        shell: "cat {input} > {output}"

    rule many:
        output: "many/{n}.txt"
        resources: licence=1
        shell: "date +%s.%N > {output}; sleep 0.2; date +%s.%N >> {output}"
"""


def prepare(project: Project) -> None:
    project.write("Snakefile", SNAKEFILE)
    project.write("in.txt", "in\n")


def new(project: Project, seen: set[str]) -> list[str]:
    """The rules whose jobs were sent and are not among the `seen` ones, which they join."""
    found = [record for record in project.attempts if record.id not in seen]
    seen.update(record.id for record in found)
    return sorted(record.rule for record in found)


def test_what_of_a_workflow_runs(project: Project) -> None:
    prepare(project)
    seen: set[str] = set()

    project.run("--until", "second", "--notemp").ok()
    assert new(project, seen) == ["first", "second"]
    assert project.read("first.txt") == "first\n"

    project.run("--omit-from", "second", "many").ok()
    assert new(project, seen) == ["beside"]
    project.run("--batch", "all=1/1").ok()
    assert new(project, seen) == ["last", *["many"] * 4]

    (project.directory / "in.txt").write_text("new\n")
    tells(project.run("--dry-run").ok().output, "rule beside", "dry-run")
    project.run("--touch").ok()
    tells(project.run().ok().output, "Nothing to be done")
    assert new(project, seen) == []

    project.run("--forcerun", "beside", "--drop-metadata").ok()
    assert new(project, seen) == ["beside"]
    assert project.read("beside.txt") == "new\n"


def test_what_jobs_ask_for(project: Project) -> None:
    prepare(project)
    project.extra["MANTIK_TEST_SAYS"] = "said"
    project.write(
        "Snakefile",
        SNAKEFILE
        + """
    rule shown:
        output: "shown.txt"
        threads: 1
        shell:
            "echo {threads} {resources.mem_mb} $SLURM_CPUS_PER_TASK $SLURM_MEM_PER_NODE"
            " $PRE $MANTIK_TEST_SAYS {resources.attempts} > {output}; [ {resources.attempts} = 3 ]"
    """,
    )
    started = project.run(
        "shown.txt",
        *("--set-threads", "shown=3"),
        *("--set-resources", "shown:mem_mb=300", "shown:attempts=attempt"),
        *("--default-resources", "runtime=5"),
        *("--retries", "3"),
        *("--jobname", "of {rulename} {jobid}"),
        *("--precommand", "export PRE=before  # told to all"),
        *("--envvars", "MANTIK_TEST_SAYS"),
        *("--seconds-between-status-checks", "3"),
        *("--latency-wait", "1"),
        *("--shadow-prefix", "shadows", "--container-image", "image"),
        *("--apptainer-prefix", "images"),
        *("--preemptible-rules", "--preemptible-retries", "3"),
        *("--max-status-checks-per-second", "1"),
    ).ok()
    assert project.read("shown.txt") == "3 300 3 300 before said 3\n"
    assert [record.name for record in project.attempts] == ["of shown 0"] * 3
    for option in (
        *("--seconds-between-status-checks", "--max-status-checks-per-second"),
        *("--shadow-prefix", "--container-image", "--preemptible-rules", "--apptainer-prefix"),
    ):
        tells(started.output, f"{option} is not used by the mantik executor: ")
    assert started.output.count("is not used by") == 6

    failed = project.run("--forceall", "--precommand", "echo not loaded; false", "beside.txt")
    tells(failed.failed(), "not loaded", "exit code 1")


def times(project: Project) -> list[tuple[float, float]]:
    found = []
    for path in (project.directory / "many").iterdir():
        begun, ended = path.read_text().split()
        found.append((float(begun), float(ended)))
    return sorted(found)


def test_limits(project: Project) -> None:
    prepare(project)
    project.run("--until", "many", "--resources", "licence=1").ok()
    spans = times(project)
    assert all(one[1] <= two[0] for one, two in pairwise(spans)), spans

    said = project.run("--until", "second", "--cores", "1").ok().output
    tells(said, "--cores 1 limits the threads of jobs at sites, too", "second (2)")
    assert project.read("second.txt") == "first\n1 100\n"


def test_failures(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule all:
            input: "fine.txt", "after.txt"

        rule fails:
            output: "half.txt", directory("tree"), "never.txt"
            log: "fails.log"
            shell:
                "echo half > {output[0]}; mkdir {output[1]}; echo 1 > {output[1]}/1; "
                "echo log > {log}; [ -e go ] && touch {output[2]}"

        rule after:
            input: "never.txt"
            output: "after.txt"
            shell: "cp {input} {output}"

        rule fine:
            output: "fine.txt"
            shell: "sleep 1; touch {output}"
        """,
    )
    twin = project.twin()
    words = ("--keep-going", "--keep-incomplete", "--show-failed-logs")
    said = project.run(*words).failed()
    twin.run(*words, local=True).failed()
    assert tree(project.directory) == tree(twin.directory)
    assert project.read("tree/1") == "1\n"
    assert project.exists("fine.txt")
    tells(said, "fails.log")
    twin.close()


def test_what_cannot_be(project: Project, tmp_path: Path) -> None:
    prepare(project)
    (tmp_path / "script.sh").write_text("#!/bin/sh\n{exec_job}\n")
    said = project.run("--jobscript", str(tmp_path / "script.sh")).failed()
    tells(said, "--jobscript does not work with the mantik executor", "--precommand")
    assert "project file" not in said
    said = project.run("--preemptible-rules").failed()
    tells(said, "--preemptible-rules does not work without --preemptible-retries", "--retries")
    assert "project file" not in said
