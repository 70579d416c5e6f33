"""What a user sees when a job fails: the exit code, the end of its output, and what to do."""

import re

from tests.support.command import smk_mantik
from tests.support.workflows import Project, one_rule_each, tells, until

SNAKEFILE = r"""
    rule all:
        input:
            "good.txt", "after.txt", "pipe.txt", "unset.txt", "killed.txt", "logged.txt",
            "nothing1.txt", "nothing2.txt"

    rule good:
        output: "good.txt"
        shell: "touch {output}"

    rule bad:
        output: "bad.txt"
        log: "logs/bad.log"
        shell:
            "echo early > {output}; echo for the log > {log}; "
            "seq 100 | sed 's/^/line /'; echo the reason >&2; exit 7"

    rule after:
        input: "bad.txt"
        output: "after.txt"
        shell: "cp {input} {output}"

    rule pipe:
        output: "pipe.txt"
        shell: "false | touch {output}"

    rule unset:
        output: "unset.txt"
        shell: "touch {output}; echo $SURELY_UNSET"

    rule nothing:
        output: "nothing{n}.txt"
        shell: "echo I forgot it"

    rule killed:
        output: "killed.txt"
        shell: "touch {output}; kill -9 $$"

    rule logged:
        output: "logged.txt"
        log: "logs/a.log", "logs/empty.log"
        shell: "echo what was wrong > {log[0]}; touch {log[1]}; exit 3"
"""


def test_failing_jobs_are_told_and_the_others_go_on(both: Project) -> None:
    both.write("Snakefile", SNAKEFILE)

    said = both.run("--keep-going").failed()

    name = both.place.name
    assert both.exists("good.txt"), said
    assert re.search(rf"The command ended with exit code 7 \({name}, [^)]+\)", said), said
    assert "line 100\n" in said
    assert "line 82\n" in said
    assert "line 1\n" not in said
    assert "the reason\n" in said
    assert "Correct the command or its inputs and start again." in said
    (log,) = re.findall(r"All of its output: (\.snakemake/mantik/logs/bad\.\w+\.log)\.", said)
    assert both.read(log).count("line ") == 100
    assert both.read("logs/bad.log") == "for the log\n"
    assert "exit code 1 " in said
    assert "unbound variable" in said
    assert "SURELY_UNSET" in said
    assert "the command ended with 0 but did not make nothing1.txt" in said
    assert "Correct the paths that it writes to, relative to the working directory." in said
    assert "exit code 137" in said
    for missing in ("bad.txt", "after.txt", "pipe.txt", "unset.txt", "killed.txt"):
        assert not both.exists(missing), f"{missing}: {said}"
    assert "Its log file logs/a.log ended with:\n    what was wrong\n" in said
    assert "Its log file logs/empty.log" not in said
    _, _, end = said.partition("7 jobs failed:\n")
    tells(
        end,
        "  bad: The command ended with exit code 7.\n    smk-mantik logs bad\n",
        "  nothing (2 jobs): the command ended with 0 but did not make nothing",
        "    smk-mantik logs nothing n=",
        "smk-mantik jobs --failed lists them all.\n",
    )
    assert end.count("did not make") == 1
    assert len([record for record in both.attempts if record.rule != "after"]) == 8
    assert all(record.state.final for record in both.attempts)


def test_what_cannot_be_prepared_here_fails_its_own_job(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        localrules: clear

        onstart:
            open("out", "w").close()  # where rule a needs a directory

        rule all:
            input: "out/a.txt", "b.txt", "cleared"

        rule a:
            output: "out/a.txt"
            shell: "echo a > {output}"

        rule b:
            output: "b.txt"
            shell: "echo b > {output}"

        rule clear:
            input: "b.txt"
            output: "cleared"
            shell: "rm out; touch {output}"
        """,
    )
    ran = project.run("--keep-going")
    assert ran.code == 1
    tells(
        ran.output, "cannot be prepared on this machine (Not a directory: out/a.txt)", "b: done at"
    )
    assert project.read("b.txt") == "b\n"
    assert "Traceback" not in ran.output


def test_the_first_failure_ends_a_run_without_keep_going(project: Project) -> None:
    rules = one_rule_each(
        a='shell: "exit 3"',
        b='input: "c"',
        c='shell: "touch begun; until [ -e go ]; do sleep 0.1; done; touch {output}"',
    )
    project.write("Snakefile", rules)

    running = project.start()
    running.says("Error in rule a")
    until((project.workspace / "begun").exists, "the other one")
    project.go()
    said = running.end().failed()

    assert "exit code 3" in said
    assert project.exists("c"), said
    assert not project.exists("b")


def test_files_that_a_job_missed_and_that_are_here_are_told(project: Project) -> None:
    """The commonest mistake of newcomers: locally, undeclared files are simply there."""
    project.write("Snakefile", MISSES)
    project.write("big.csv", "x" * 3_000_000)
    project.write("small.csv")
    project.write("old/left.csv")
    outside = project.write("../outside.csv")
    project.config.write_text(f"{project.place.config}Exclude: [old/]\n")
    said = project.run("--keep-going").failed()
    tells(
        said,
        "big.csv is here (2.9 MiB) but was not uploaded: larger than"
        " 1.0 MiB. Declare what it needs as input of rule large.",
        "old/left.csv is here (2 B) but was not uploaded: in Exclude of the backend config."
        " Declare what it needs as input of rule other.",
        f"{outside.resolve()} is here (2 B) but was not uploaded: it is outside the working"
        " directory. Declare what it needs as input of rule far.",
    )
    assert "small.csv is here" not in said


MISSES = """
    rule all:
        input: "large.txt", "other.txt", "far.txt"

    rule large:
        output: "large.txt"
        shell: "cat small.csv big.csv > {output}"

    rule other:
        output: "other.txt"
        log: "other.log"
        shell: "wc old/left.csv > {output} 2> {log}"

    rule far:
        output: "far.txt"
        shell: "cp ../outside.csv {output}"
"""


def test_a_job_that_a_checkpoint_adds_is_asked_what_the_others_were(project: Project) -> None:
    """Each would wait in the queue before its mistake shows."""
    wrong = {
        "slip": ('resources: slurm_partitoin="x"', "there is no resource slurm_partitoin (did you"),
        "launcher": (
            'container: "docker://x"\nresources: mpi="srun"\nshell: "{resources.mpi} x > {output}"',
            "rule launcher starts srun in an image, which does not contain it",
        ),
        "parsed": ('conda: "bad.yaml"', "bad.yaml, which is not valid YAML"),
        "beyond": ("resources: runtime=43200", "30 days requested; queue batch allows at most"),
        "first": ('resources: mantik_site="other", nodes=999', "nodes: 999 requested; queue batch"),
        "entered": (
            'params: **mlproject.load("churn").entry_point("main")\nshell: "touch {output}"',
            "rule entered cannot run its entry point: ",
        ),
    }
    rules = one_rule_each(**{rule: text for rule, (text, _) in wrong.items()})
    project.write("bad.yaml", "dependencies: [\n")
    project.write("churn/MLproject", "entry_points: {main: {command: echo}}\n")
    project.config.write_text(f"{project.place.config}\nExclude: [churn/]\n")
    project.sites = [f"other={project.config}"]
    login = project.place.environment.items()
    project.extra = {name.replace("HPC1", "OTHER"): word for name, word in login}
    project.write(
        "Snakefile",
        f"""
from snakemake_executor_plugin_mantik import mlproject

rule late:
    input: lambda _: [checkpoints.split.get(), {list(wrong)!r}][1]

checkpoint split:
    output: "split.txt"
    shell: "touch {{output}}"

{rules}
""",
    )

    methods = ("--mantik-software-deployment", "conda", "apptainer")
    said = project.run("late", "--keep-going", *methods).failed()

    tells(said, *(words for _, words in wrong.values()))
    assert {record.rule for record in project.attempts} == {"split"}
    del wrong["beyond"], wrong["first"]  # no limit is known yet when the others are refused
    said = project.run(*wrong, *methods).failed()
    tells(said, *(words for _, words in wrong.values()), "Nothing submitted")


def test_a_failed_job_that_wrote_nothing_has_no_log_to_show(project: Project) -> None:
    project.write("Snakefile", 'rule one:\n    output: "one.txt"\n    shell: "exit 3"\n')
    project.run().failed()
    for words in (["logs", "one"], ["exec", "one", "--", "true"]):
        said = smk_mantik(project, *words).output
        tells(said, "exit code 3 (hpc1, ")
        assert ".)" not in said
