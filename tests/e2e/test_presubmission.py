"""The pipeline goes on without this machine: jobs wait at the site for those that make their
inputs."""

import re
from collections.abc import Callable
from contextlib import suppress

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.common.errors import JournalError
from snakemake_executor_plugin_mantik.journal import AttemptRecord
from tests.real.centre import USER, Centre
from tests.support.clusters import FRAGILE, SlurmCluster
from tests.support.command import smk_mantik
from tests.support.places import REAL
from tests.support.workflows import Project, Running, one_rule_each, tells, tree, until

SNAKEFILE = r"""
    def noted(name):
        return f"echo {name} >> ran.txt; until [ -e go ] || [ ! -e held ]; do sleep 0.1; done; "

    rule all:
        input: "report.txt"

    rule prepare:
        output: "data/set.txt", directory("data/parts")
        shell:
            noted("prepare") + "mkdir -p {output[1]}; echo 1 > {output[1]}/a; echo 2 > {output[0]}"

    rule constants:
        output: temp("constants.txt")
        shell: noted("constants") + "echo 3 > {output}"

    rule train:
        input: "data/set.txt", "data/parts", "constants.txt"
        output: "model/{n}.txt"
        shell: noted("train") + "cat {input[0]} {input[1]}/a {input[2]} > {output}"

    rule evaluate:
        input: "model/{n}.txt"
        output: "score/{n}.txt"
        log: "logs/evaluate-{n}.txt"
        shell: noted("evaluate") + "wc -l < {input} > {output}; echo evaluated > {log}"

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
    return written(project)


@pytest.fixture
def pipelines(both: Project) -> Project:
    """The pipeline at each site, with a real Slurm behind some."""
    return written(both)


def written(project: Project) -> Project:
    project.write("Snakefile", SNAKEFILE)
    project.write("report.py", SCRIPT)
    return project


def hold(project: Project) -> None:
    """Let each job wait until `go`."""
    project.write("held")


def submitted(project: Project) -> int:
    with suppress(JournalError):  # there is none yet
        return sum(len(record.site_jobs) for record in project.attempts)
    return 0


def all_submitted(project: Project, run: Running, number: int) -> None:
    until(lambda: run.process.poll() is not None or submitted(project) >= number, "the jobs")
    assert run.process.poll() is None, run.output


def at_site(project: Project, path: str) -> None:
    until((project.workspace / path).exists, path)


def go_on(project: Project, *arguments: str) -> str:
    """Run the workflow to its end after its controller has ended in any way."""
    return project.run("--rerun-incomplete", "--nolock", *arguments).ok().output


def edit(project: Project, old: str, new: str) -> None:
    text = project.read("Snakefile")
    assert old in text
    project.write("Snakefile", text.replace(old, new))


def is_as_local(project: Project) -> None:
    (project.directory / "held").unlink(missing_ok=True)
    twin = project.twin()
    twin.run("--forceall", "--nolock", local=True).ok()
    there = tree(twin.directory)
    del there["ran.txt"]
    assert tree(project.directory) == there


POOL = """
Pools:
  small: {Queue: batch, Runtime: 30m, CPUsPerNode: 2, Idle: 5s, Takes: 10m}
"""


def pool(project: Project) -> None:
    text = project.place.config.replace("Resources:\n", "Resources:\n  Runtime: 5m\n") + POOL
    project.config.write_text(text)


@pytest.mark.parametrize("pooled", [False, True], ids=["jobs", "pool"])
def test_it_goes_on_after_its_controller_was_killed(pipelines: Project, pooled: bool) -> None:
    if pooled:
        pool(pipelines)
    hold(pipelines)
    run = pipelines.start()
    all_submitted(pipelines, run, 7)
    run.says("train n=1: waits for")
    run.says("report: waits for evaluate n=1")
    run.kill()
    pipelines.go()
    at_site(pipelines, "report.txt")
    said = go_on(pipelines)
    assert sorted(pipelines.lines()) == RAN
    assert submitted(pipelines) == 7, said
    assert {record.queue for record in pipelines.attempts} == {"pool small" if pooled else "batch"}
    is_as_local(pipelines)


def test_a_job_outside_of_the_pool_waits_here_for_one_in_it(pipeline: Project) -> None:
    pool(pipeline)
    output = 'output: "score/{n}.txt"'
    edit(pipeline, output, f"resources: mantik_pool=False\n    {output}")
    hold(pipeline)
    run = pipeline.start()
    all_submitted(pipeline, run, 4)
    until(lambda: sorted(pipeline.lines()) == ["constants", "prepare"], "the first two")
    assert submitted(pipeline) == 4
    pipeline.go()
    run.end().ok()
    assert (sorted(pipeline.lines()), submitted(pipeline)) == (RAN, 7)
    assert "evaluate n=1: waits for" not in run.output


def test_a_script_waits_for_resources_that_follow_from_its_inputs(pipeline: Project) -> None:
    """Its default memory follows from their sizes: presubmitted, it would be another job."""
    hold(pipeline)
    run = pipeline.start("--default-resources", "runtime=5")
    all_submitted(pipeline, run, 6)
    pipeline.go()
    run.end().ok()
    assert (sorted(pipeline.lines()), submitted(pipeline)) == (RAN, 7)


@pytest.mark.nightly
def test_no_more_wait_than_allowed(pipeline: Project) -> None:
    hold(pipeline)
    options = ("--executor", "mantik", "--mantik-backend-config", str(pipeline.config))
    run = pipeline.start(*options, "--jobs", "3", plain=True)
    all_submitted(pipeline, run, 3)
    until(lambda: len(pipeline.lines()) == 2, "the first two")
    assert submitted(pipeline) == 3
    pipeline.go()
    run.end().ok()
    assert (sorted(pipeline.lines()), submitted(pipeline)) == (RAN, 7)


@pytest.mark.parametrize("pooled", [False, True], ids=["jobs", "pool"])
def test_a_failure_ends_what_waits_for_it(pipeline: Project, pooled: bool) -> None:
    if pooled:
        pool(pipeline)
    edit(pipeline, "wc -l <", "[ {wildcards.n} = 1 ]; wc -l <")
    said = pipeline.run("--keep-going").failed()
    tells(said, "rule evaluate", "exit code 1")
    assert sorted(pipeline.lines()) == [*RAN[:4], *RAN[5:]], "all but the report"
    assert not [r for r in pipeline.attempts if not r.state.final and r.rule == "report"]
    edit(pipeline, "[ {wildcards.n} = 1 ]; ", "")
    go_on(pipeline)
    assert pipeline.lines().count("report") == 1


BUSY_S = 800.0
"""How long a chain of jobs may take on a cluster that others keep busy, seconds."""


def end_from_outside(
    project: Project, rule: str, how: str, end: Callable[[AttemptRecord], None]
) -> None:
    """Let a job of a rule be ended while nobody looks, and see what the next runs make of it."""
    hold(project)
    run = project.start()
    all_submitted(project, run, 7)
    until(lambda: sorted(project.lines()) == ["constants", "prepare"], "the first two")
    run.kill()
    end(next(record for record in project.attempts if record.rule == rule))
    project.go()
    report = next(record for record in project.attempts if record.rule == "report")
    marker = f"{report.id}.[1-9]*"
    there = project.workspace / report.paths.attempts
    until(lambda: [*there.glob(marker)], "the end of all", BUSY_S)

    said = project.run("--rerun-incomplete", "--nolock").failed()

    tells(said, f"rule {rule}", "cancelled" if how == "cancelled" else "node")
    assert "report" not in project.lines()
    said = go_on(project)
    twice = [rule] if rule == "prepare" else []  # the other one had not begun
    assert sorted(project.lines()) == sorted([*RAN, *twice]), said


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        ("prepare", "node"),
        pytest.param("prepare", "cancelled", marks=pytest.mark.nightly),
        pytest.param("train", "cancelled", marks=pytest.mark.nightly),
    ],
)
def test_a_job_that_is_ended_from_outside(
    pipeline: Project, sandbox: Sandbox, rule: str, how: str
) -> None:
    def end(record: AttemptRecord) -> None:
        [job] = [job for job in sandbox.record("hpc1")["jobs"] if job["id"] in record.site_jobs]
        act = sandbox.cancel_job if how == "cancelled" else sandbox.fail_node
        act("hpc1", job["scheduler_ids"][0])

    end_from_outside(pipeline, rule, how, end)


@pytest.mark.parametrize("how", ["cancelled", "node"])
@pytest.mark.parametrize("place", REAL, indirect=True)
def test_a_job_that_slurm_ends(pipelines: Project, centre: Centre, how: str) -> None:
    def end(record: AttemptRecord) -> None:
        claim = (pipelines.workspace / record.paths.claim).read_text()
        [number] = re.findall(r"^scheduler_job=(\d+)$", claim, re.MULTILINE)
        cluster = SlurmCluster(centre.directory, centre.environment, USER)
        (cluster.cancel if how == "cancelled" else cluster.fail_node)(number)

    if how == "node":  # one that nobody else's jobs run on
        output = 'output: "data/set.txt", directory("data/parts")\n'
        edit(pipelines, output, f'{output}    resources: slurm_partition="{FRAGILE}"\n')
    end_from_outside(pipelines, "prepare", how, end)


def test_a_retry_gets_those_that_wait_for_it_again(pipelines: Project) -> None:
    edit(pipelines, "cat {input[0]}", "mkdir tried-{wildcards.n} || cat {input[0]}")
    edit(pipelines, "{input[2]} > {output}", "{input[2]} > {output}; [ -s {output} ]")
    hold(pipelines)
    run = pipelines.start("--retries", "1")
    all_submitted(pipelines, run, 7)
    pipelines.go()
    said = run.end().ok().output
    assert sorted(pipelines.lines()) == sorted([*RAN, "train", "train"]), said
    assert "report: waits for" in said
    assert "earlier run" not in said, "there was none"


def test_a_run_that_leaves_its_jobs_says_how_far_they_go(pipeline: Project) -> None:
    hold(pipeline)
    run = pipeline.start("--mantik-on-interrupt", "detach")
    all_submitted(pipeline, run, 7)
    said = run.interrupt().output
    tells(said, "5 jobs wait at their sites and start without this machine", "the last: report.")
    pipeline.go()
    at_site(pipeline, "report.txt")
    go_on(pipeline)
    assert (sorted(pipeline.lines()), submitted(pipeline)) == (RAN, 7)


def test_cancel_names_what_waits_for_a_cancelled_job(pipeline: Project) -> None:
    hold(pipeline)
    run = pipeline.start("--mantik-on-interrupt", "detach")
    all_submitted(pipeline, run, 7)
    run.interrupt()
    said = smk_mantik(pipeline, "cancel", "prepare").ok().output
    found = re.findall(r"^(\S+).*: waits for (.+) at .* It will not run\.$", said, re.M)
    assert dict(found) == {
        "train": "prepare",
        "evaluate": "train n=2",
        "report": "evaluate n=1, evaluate n=2, train n=1",
    }


LOCAL = one_rule_each(a="", b='input: "a"', c='input: "b"\nlocalrule: True', d='input: "c"')


def test_a_local_rule_waits_for_this_machine(project: Project) -> None:
    project.write("Snakefile", LOCAL)
    said = project.run().ok().output
    tells(said, "b: waits for a at", "d: submitted to")
    assert project.exists("d")


def test_without_a_scheduler_jobs_wait_here(project: Project) -> None:
    config = project.config.read_text()
    assert "Scheduler: slurm\n" in config
    project.config.write_text(config.replace("Scheduler: slurm\n", "Scheduler: none\n"))
    project.write("Snakefile", LOCAL.replace("localrule: True", ""))
    said = project.run("--mantik-presubmit", "-1").failed()
    tells(said, "--mantik-presubmit has to be 0 or more, found -1")
    said = project.run().ok().output
    assert said.count("jobs cannot wait for others there (Site: Scheduler is none)") == 1, said
    assert "waits for" not in said
