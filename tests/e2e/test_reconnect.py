"""Without Snakemake: what a run that was killed left at the sites is seen, cancelled, removed."""

import shutil
from contextlib import closing

import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.journal import Journal
from tests.support.command import smk_mantik
from tests.support.workflows import Project, Running, tells, until

SNAKEFILE = r"""
    rule all:
        input: "out/a.txt", "out/b.txt", "quick.txt"

    rule slow:
        output: "out/{name}.txt"
        shell:
            "trap 'echo term {wildcards.name} >> ended.txt; exit 1' TERM; "
            "echo {wildcards.name} >> ran.txt; "
            "until [ -e go ]; do sleep 0.1 || :; done; echo {wildcards.name} > {output}"

    rule quick:
        output: "quick.txt"
        shell: "echo quick > {output}"
"""


def ended(project: Project) -> set[str]:
    """Which jobs were told to end. The scheduler tells all processes of a job, and its script the
    command's once more."""
    return set(project.lines("ended.txt"))


def running(project: Project) -> Running:
    """A `snakemake` both of whose slow jobs run."""
    project.write("Snakefile", SNAKEFILE)
    run = project.start("--nolock", "--rerun-incomplete")
    until(lambda: sorted(project.lines()) == ["a", "b"], "the jobs")
    until(lambda: all(f"slow name={n}: submitted to" in run.output for n in "ab"), "their ids")
    return run


def outcomes(project: Project) -> dict[str, str]:
    return {record.name: record.outcome for record in project.attempts}


def test_a_job_that_was_not_submitted_is_not_said_to_be_cancelled_at_a_site(
    project: Project,
) -> None:
    project.write("Snakefile", "rule quick:\n    output: 'a'\n    shell: 'echo > a'\n")
    project.run().ok()
    with closing(Journal(project.directory / ".snakemake/mantik")) as journal:
        (site,) = journal.sites()
        journal.new_attempt(
            site=site, job="j", rule="late", name="late", fingerprint="f", members={}
        )
    said = smk_mantik(project, "cancel", "--all").ok().output
    tells(said, "late: it was not submitted yet, and will not be.")
    assert "confirmed" not in said


def test_cancel(project: Project) -> None:
    run = running(project)
    refused = smk_mantik(project, "cancel", "--all")
    assert refused.code == 2
    tells(refused.output, "another Snakemake", "(process ", "press Ctrl-C there", "kill -INT")
    run.kill()

    shown = smk_mantik(project, "jobs").ok().output
    assert shown.count("running") >= 2
    for arguments, told in (
        ((), "no job is named; these may still run:"),
        (("slow name=c",), "nothing was cancelled: no job at a site is named slow name=c"),
        (("slow", "--all"), "exclude each other"),
    ):
        wrong = smk_mantik(project, "cancel", *arguments)
        assert wrong.code == 2, wrong.output
        tells(wrong.output, told)
    assert ended(project) == set()

    one = smk_mantik(project, "cancel", "slow name=a").ok().output
    tells(one, "slow name=a: cancelled at hpc", "which has confirmed it")
    assert ended(project) == {"term a"}
    assert outcomes(project)["slow name=b"] == ""

    moved = project.config.rename(project.directory / "moved.yaml")
    lacking = smk_mantik(project, "cancel", "slow")
    assert lacking.code == 2
    tells(lacking.output, "no longer exists", "--site hpc1=FILE")
    strange = smk_mantik(project, "cancel", "slow", "--site", str(moved))
    tells(strange.output, "no job was submitted to a site named moved")
    assert ended(project) == {"term a"}
    said = smk_mantik(project, "cancel", "--all", "--site", f"hpc1={moved}").ok().output
    tells(said, "slow name=b: cancelled")
    assert ended(project) == {"term a", "term b"}
    moved.rename(project.config)
    # The quick one may have got its turn.
    assert ": cancelled" not in smk_mantik(project, "cancel", "--all").ok().output

    project.go()
    project.run("--nolock", "--rerun-incomplete").ok()
    assert sorted(project.lines()) == ["a", "a", "b", "b"]


def test_clean(firecrest: Project) -> None:
    running(firecrest).kill()
    stays = smk_mantik(firecrest, "clean", "--yes")
    assert stays.code == 1, stays.output
    tells(
        stays.output, str(firecrest.workspace), "needed: slow name=a (it may still run", "Kept:",
        "attempts, logs and archives: ", "files of the workflow: ",
    )  # fmt: skip
    assert sorted(firecrest.lines()) == ["a", "b"]
    unasked = smk_mantik(firecrest, "clean", "--force")
    assert unasked.code == 2
    tells(unasked.output, "there is no terminal to ask: Remove all of this?", "--yes")

    removed = smk_mantik(firecrest, "clean", "--force", "--yes").ok().output
    tells(removed, ": removed.")
    assert list(firecrest.workspace.iterdir()) == []
    # The quick one may have got its turn.
    assert {outcomes(firecrest)[f"slow name={name}"] for name in "ab"} == {"cancelled"}

    firecrest.go()
    firecrest.run("--nolock", "--rerun-incomplete").ok()
    assert firecrest.read("out/a.txt") == "a\n"
    cleaned = smk_mantik(firecrest, "clean", "--yes").ok().output
    assert "needed" not in cleaned
    assert list(firecrest.workspace.iterdir()) == []
    assert firecrest.read("out/a.txt") == "a\n"


def test_a_download_that_was_killed_leaves_nothing(project: Project, faulty: Sandbox) -> None:
    rule = """
        rule {}:
            output: "out/small.txt", "out/big.bin"
            shell: "echo {} > {{output[0]}}; head -c 9000000 /dev/urandom > {{output[1]}}"
    """

    def parts() -> set[int]:
        found = project.directory.rglob("*.mantik-part")
        return {path.stat().st_size for path in found}

    def kill_in_download(name: str) -> None:
        project.write("Snakefile", rule.format(name, name))
        faulty.faults.add(Fault("cut", "GET", "big", bytes=1_000_000))
        faulty.faults.add(Fault("refuse", "GET", "big", count=None))
        run = project.start("--nolock")
        until(lambda: max(parts(), default=0) >= 500_000, "a part")
        run.kill()
        faulty.faults.clear()

    kill_in_download("one")
    shutil.rmtree(project.directory / ".snakemake")  # and its journal
    kill_in_download("one")
    project.write("Snakefile", rule.format("one", "another"))
    project.run("--nolock").ok()
    assert project.read("out/small.txt") == "another\n"
    assert not parts(), "a job was given up whose command has changed"

    kill_in_download("two")
    project.write("Snakefile", rule.format("three", "three"))
    project.run("--nolock").ok()
    assert parts(), "the outputs of the rule that was renamed may still be fetched"
    smk_mantik(project, "clean", "--yes", "--force").ok()
    assert not parts()
    assert project.read("out/small.txt") == "three\n"


def test_sites_that_do_not_answer(project: Project, faulty: Sandbox) -> None:
    running(project).kill()
    faulty.faults.add(Fault("refuse", path="hpc1", status=503, count=None))
    for command in (("cancel", "--all"), ("clean", "--yes", "--force")):
        said = smk_mantik(project, *command)
        assert said.code == 1, said.output
        tells(said.output, "site hpc1", "503")
        assert ": removed." not in said.output
        assert ": cancelled" not in said.output
    faulty.faults.clear()

    # It answers, but takes no order to end a job; the job itself is told of one later only.
    faulty.faults.add(Fault("refuse", "POST", "abort", status=503, count=None))
    said = smk_mantik(project, "cancel", "slow name=a", "--wait", "2")
    assert said.code == 1, said.output
    tells(
        said.output, "slow name=a: its job", "did not confirm that it was cancelled and may still"
    )
    faulty.faults.clear()
    smk_mantik(project, "cancel", "--all").ok()
    assert ended(project) == {"term a", "term b"}


@pytest.mark.parametrize("command", ["cancel", "clean", "jobs"])
def test_where_nothing_was_sent(project: Project, command: str) -> None:
    said = smk_mantik(project, command)
    assert said.code == 2
    tells(said.output, "no job has been submitted from here yet")
    said = smk_mantik(project, command, "-d", "nowhere")
    assert said.code == 2
    tells(said.output, "'nowhere' does not exist")
