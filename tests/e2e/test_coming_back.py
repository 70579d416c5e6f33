"""Killed, interrupted, started twice: every job runs once, and the next run takes it up."""

import json
import shlex
import shutil

from hpc_sandbox.server import Sandbox
from hpc_sandbox.unicore import UnicoreServer
from tests.support.command import smk_mantik
from tests.support.workflows import Project, Running, tells, until

SNAKEFILE = r"""
    NUMBERS = range(4)

    rule all:
        input: expand("out/{n}.txt", n=NUMBERS), "sum.txt"

    rule slow:
        output: "out/{n}.txt"
        shell:
            "echo {wildcards.n} >> ran.txt; "
            "until [ -e go ]; do sleep 0.1; done; echo {wildcards.n} > {output}"

    rule sum:
        input: expand("out/{n}.txt", n=NUMBERS)
        output: "sum.txt"
        shell: "echo sum >> ran.txt; cat {input} > {output}"
"""
PROFILE = """
    executor: mantik
    jobs: 8
    mantik-backend-config: [{config}]
    nolock: true
    rerun-incomplete: true
"""


def prepare(project: Project) -> None:
    project.write("Snakefile", SNAKEFILE)
    config = json.dumps(str(project.config))
    project.write("profiles/default/config.yaml", PROFILE.format(config=config))


def started(project: Project, run: Running) -> bool:
    """Whether all jobs are at the site, and those that it has room for are running."""
    told = [*(f"slow n={n}: submitted to" for n in range(4)), "sum: waits for"]
    return all(words in run.output for words in told) and len(project.lines()) >= 2


def test_killed_while_jobs_run(both: Project) -> None:
    prepare(both)
    first = both.start(plain=True)
    until(lambda: started(both, first), "jobs that run")
    first.kill()
    second = both.start(plain=True)
    second.says("reattached")
    both.go()

    said = second.end().ok().output

    assert sorted(both.lines()) == ["0", "1", "2", "3", "sum"], said
    assert said.count("reattached at ") == 5
    assert both.read("sum.txt") == "0\n1\n2\n3\n"


def test_an_error_of_one_job_on_this_machine_leaves_the_others_running(project: Project) -> None:
    project.write(
        "Snakefile",
        r"""
        def chosen(wildcards):
            checkpoints.split.get()
            with open("sample") as file:
                return f"parts/{file.read()}"

        rule all:
            input: "long.txt", "chosen.txt"

        rule long:
            output: "long.txt"
            shell: "echo long >> ran.txt; until [ -e go ]; do sleep 0.1; done; echo > {output}"

        checkpoint split:
            output: directory("parts")
            shell: "until [ -e ran.txt ]; do sleep 0.1; done; mkdir -p {output}; echo > {output}/a"

        rule choose:
            input: chosen
            output: "chosen.txt"
            shell: "cp {input} {output}"
        """,
    )
    first = project.run()
    assert first.code == 1
    tells(first.output, "The jobs at the sites go on", "smk-mantik cancel", "'sample'")

    project.go()
    project.write("sample", "a")
    tells(project.run().ok().output, "long: reattached")

    assert sorted(project.lines()) == ["long"]


def test_without_the_profile_the_error_says_what_to_type(project: Project) -> None:
    project.write("Snakefile", SNAKEFILE)
    first = project.start()
    until(lambda: started(project, first), "jobs that run")
    project.forked = False  # what is said at the very end is a real process's
    running = project.run()
    assert running.code != 0
    assert "To reattach them" not in running.output, "it would be refused"
    first.kill()

    assert "To reattach them" not in project.run("--summary").ok().output, "it is not refused"
    refused = project.run().failed()
    tells(refused, "LockException", "5 of its jobs may be at the sites. To reattach them type")
    line = next(line for line in refused.splitlines() if "    snakemake " in line)
    project.go()
    said = project.run(*shlex.split(line)[1:], plain=True).ok().output
    assert said.count("reattached at ") == 5
    assert sorted(project.lines()) == ["0", "1", "2", "3", "sum"]


def test_password_that_changes_pauses_the_run(project: Project, sandbox: Sandbox) -> None:
    site = sandbox.site("hpc1")
    assert isinstance(site, UnicoreServer)
    file = project.directory.parent / "password"
    file.write_text(old := site.access.password)
    project.extra |= {"MANTIK_HPC1_PASSWORD": "", "MANTIK_HPC1_PASSWORD_FILE": str(file)}
    prepare(project)
    running = project.start(plain=True)
    until(lambda: started(project, running), "jobs that run")
    try:
        site.access.password = "another"
        site.access.expire_sessions()
        running.says("has not accepted the credentials for")
        tells(
            running.output, "Check MANTIK_HPC1_USERNAME, MANTIK_HPC1_PASSWORD_FILE",
            "keyring set mantik:hpc1",
        )  # fmt: skip
        project.go()
        file.write_text("another")
        running.end().ok()
    finally:
        site.access.password = old
    assert sorted(project.lines()) == ["0", "1", "2", "3", "sum"]


def test_a_second_controller_is_refused_where_the_state_was_removed(project: Project) -> None:
    """Somebody tidies up under a running controller, and starts again."""
    prepare(project)
    first = project.start(plain=True)
    until(project.lines, "jobs that run")
    shutil.rmtree(project.directory / ".snakemake")

    said = project.run("--nolock", "--rerun-incomplete", plain=True).failed()

    tells(said, "another Snakemake with the mantik executor is running in this directory")
    project.go()
    first.end()
    assert sorted(project.lines()) == ["0", "1", "2", "3", "sum"], "each once"


def test_a_directory_that_was_made_again_is_told_of_its_earlier_copy(project: Project) -> None:
    rule = 'rule one:\n    output: "one.txt"\n    shell: "touch {output}"\n'
    project.write("Snakefile", rule)
    project.run().ok()
    project.directory.rename(f"{project.directory}.old")
    project.write("Snakefile", rule)

    said = project.run().failed()

    tells(said, ", in an earlier copy of this directory.", "type smk-mantik unlock here")
    smk_mantik(project, "unlock", "--yes").ok()
    project.run().ok()
