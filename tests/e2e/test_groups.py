"""Groups: one job for several; what a comparison with a local run cannot show."""

import csv

import pytest

from tests.support.workflows import UNTRACKED, Project, tells, until

GROUP = r"""
    rule all:
        input: "sum.txt"

    rule slow:
        output: "out/{n}.txt"
        group: "g"
        shell:
            "trap 'trap \"\" TERM; sleep 1; echo end {wildcards.n} >> ran.txt; exit 1' TERM; "
            "echo {wildcards.n} >> ran.txt; "
            "until [ -e go ]; do sleep 0.1 || :; done; echo {wildcards.n} > {output}"

    rule sum:
        input: expand("out/{n}.txt", n=range(2))
        output: "sum.txt"
        group: "g"
        shell: "echo sum >> ran.txt; cat {input} > {output}"
"""
FLAGS = ("--nolock", "--rerun-incomplete")


@pytest.fixture(autouse=True)
def _untracked(project: Project) -> None:
    project.extra.update(UNTRACKED)


def test_jobs_that_became_a_group_do_not_meet_it(project: Project) -> None:
    alone = ("--groups", "slow=x", "--group-components", "x=1", *FLAGS)
    project.write("Snakefile", GROUP)
    first = project.start(*alone)
    until(lambda: len(project.lines()) == 2, "jobs that run")
    first.kill()
    second = project.start(*FLAGS)
    until(lambda: len(project.lines()) >= 6, "the members of the group")
    project.go()

    said = second.end().ok().output

    # The jobs were over before any member of the group was run.
    order = [line.split()[0] for line in project.lines()]
    assert order[2:4] == ["end", "end"], said
    assert sorted(order[4:]) == ["0", "1", "sum"], said
    assert project.read("sum.txt") == "0\n1\n"


FAILING = r"""
    rule all:
        input: "bad.txt", "after.txt", "good.txt", "independent.txt"

    rule good:
        output: "good.txt"
        log: "good.log"
        group: "g"
        shell: "echo fine > {log}; echo good > {output}"

    rule bad:
        input: "good.txt"
        output: "bad.txt"
        log: "bad {rule}.log".replace("{rule}", "it's")
        group: "g"
        shell: "echo woe > {log:q}; exit 41"

    rule after:
        input: "bad.txt"
        output: "after.txt"
        group: "g"
        shell: "echo never > never.txt; cp {input} {output}"

    rule independent:
        input: "good.txt"
        output: "independent.txt"
        threads: 3
        group: "g"
        shell: "sleep 1; echo > ran.txt; cp {input} {output}"
"""


def test_who_failed_is_told(project: Project) -> None:
    project.write("Snakefile", FAILING)
    said = project.run().failed()
    tells(
        said,
        "Error in group g: bad ended with exit code 41 (hpc1, ",
        "mantik: bad: failed with exit code 41",
        "of 4 members ",
        "Its log file bad it's.log ended with:\n    woe",
    )
    assert "Error in rule" not in said
    assert "good.log ended with" not in said
    assert project.exists("good.log")
    assert not project.exists("good.txt"), "as with Snakemake's executors for clusters"
    assert not (project.workspace / "never.txt").exists()
    assert not list((project.directory / ".snakemake/mantik/groups").iterdir())


RESOURCES = r"""
    rule all:
        input: "asked.txt", "alone.txt", "bench.txt"

    rule one:
        output: "1"
        group: "g"
        threads: 2
        resources: mem_mb=100, runtime=10
        shell: "touch {output}"

    rule two:
        output: "2"
        group: "g"
        resources: mem_mb_per_cpu=200, runtime=7
        shell: "touch {output}"

    rule show:
        input: "1", "2"
        output: "asked.txt"
        group: "g"
        resources: runtime=5
        shell:
            "echo $SLURM_CPUS_PER_TASK $SLURM_MEM_PER_NODE $OMP_NUM_THREADS"
            " > {output}"

    rule alone:
        output: "alone.txt"
        group: "h"
        resources: tasks=2
        shell: "echo $SLURM_NTASKS > {output}"

    rule a:
        output: "a.txt"
        benchmark: repeat("bench/a.tsv", 2)
        group: "m"
        shell: "sleep 1.2; echo {bench_iteration} > {output}"

    rule b:
        input: "a.txt"
        output: "bench.txt"
        benchmark: "bench/ü b.tsv"
        group: "m"
        shell: "cp {input} {output}"
"""


def test_what_a_group_asks_for_and_the_benchmark_files_of_members(project: Project) -> None:
    config = project.place.config.replace("  Queue: batch", "  Queue: batch\n  MemoryPerNode: 250M")
    project.config.write_text(config)
    project.write("Snakefile", RESOURCES)
    project.run("--default-resources", "db=1").ok()
    assert project.read("asked.txt").split()[:3] == ["3", "300", "1"]
    assert project.read("alone.txt") == "2\n"
    with (project.directory / "bench/a.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) == 2
    assert all(1.2 <= float(row["s"]) < 20 for row in rows)
    assert len(project.read("bench/ü b.tsv").splitlines()) == 2
    assert not list((project.directory / ".snakemake/mantik/benchmarks").iterdir())


def test_values_that_follow_from_files_of_the_group(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule a:
            output: "a.txt"
            group: "g"
            shell: "echo new > {output}"

        rule b:
            input: "a.txt"
            output: "b.txt"
            params: text=lambda wildcards, input: open(input[0]).read()
            group: "g"
            shell: "echo {params.text} > {output}"
        """,
    )
    project.write("a.txt", "old\n")
    said = project.run("b.txt", "--forceall").failed()
    tells(said, "still to be determined", "rule b, in group g", "take the rule out of the group")


def test_pipes_of_rules_that_run_here(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        localrules: pour

        rule pour:
            output: pipe("p")
            shell: "echo here > {output}"

        rule drink:
            input: "p"
            output: "out.txt"
            shell: "cat {input} > {output}"
        """,
    )
    project.run("out.txt", "--cores", "2").ok()
    assert project.read("out.txt") == "here\n"
    assert not project.exists(".snakemake/mantik/journal.sqlite")


CORNERS = r"""
    from snakemake_executor_plugin_mantik.retry import grows

    rule all:
        input: "../up/out.txt"

    rule a:
        input: "../up/in.txt"
        output:
            here=temp("only here.txt", group_jobs=True),
            passing=temp(directory("passing")),
            kept=temp("kept.txt"),
        group: "g"
        shell:
            "cp {input} {output.here:q}; mkdir {output.passing}; cp {input} {output.passing}/x; "
            "cp {input} {output.kept}"

    rule b:
        input: "only here.txt", "passing"
        output: "b.txt"
        resources: turn=grows(1, on="exit_code")
        group: "g"
        shell: "[ {resources.turn} = 2 ]; cat {input[0]:q} {input[1]}/x > {output}"

    rule c:
        input: "b.txt", "kept.txt"
        output: "../up/out.txt"
        shell: "cat {input} > {output}"
"""


def test_files_of_a_group_and_its_retries(project: Project) -> None:
    project.write("Snakefile", CORNERS)
    project.write("../up/in.txt", "in\n")
    said = project.run("--retries", "1").ok().output
    assert project.read("../up/out.txt") == "in\n" * 3
    tells(said, "b ended with exit code 1")
    groups = [record for record in project.attempts if record.rule == "a, b"]
    assert [record.reason for record in groups] == ["exit_code", ""]
    for place in (project.directory, project.workspace):
        left = {path.name for path in place.iterdir()} & {"only here.txt", "passing", "kept.txt"}
        assert not left, place


def test_options_for_groups(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule done:
            input: "late", "fails"
            output: "done"
            group: "g"
            shell: "cat {input} > {output}"

        rule fails:
            output: "fails"
            group: "g"
            shell: "if [ -e go ]; then touch {output}; else touch failed; exit 1; fi"

        rule early:
            output: temp("early")
            group: "g"
            shell:
                "until [ -e go ] || [ -e failed ]; do sleep 0.1; done; sleep 1; echo 1 > {output}"

        rule late:
            input: "early"
            output: "late"
            group: "g"
            shell: "cp {input} {output}"
        """,
    )
    said = project.run("--keep-going").failed()
    tells(said, "late: succeeded", "of 4 members 2 succeeded, 1 failed and 1 did not start")
