"""Jobs that run in allocations of their pool, in the sandbox and on a real Slurm."""

import json
import time
from typing import Any

import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.journal import read_workflow
from tests.support.command import smk_mantik
from tests.support.workflows import Project, Running, tells, until

POOL = """
Pools:
  small: {Queue: batch, Runtime: 10m, CPUsPerNode: 2, Idle: 5s}
"""
SNAKEFILE = r"""
    rule all:
        input: expand("out/{n}.txt", n=range(4))
    rule each:
        output: "out/{n}.txt"
        resources: mantik_pool="small", runtime=1
        shell:
            "echo $SLURM_JOB_ID >> allocations; echo {wildcards.n} >> ran; "
            "until [ -e go ]; do sleep 0.1; done; echo {wildcards.n} > {output}"
"""
MADE = ["0", "1", "2", "3"]


def prepare(project: Project, text: str = SNAKEFILE, pool: str = POOL) -> Project:
    project.config.write_text(project.place.config + pool)
    project.write("Snakefile", text)
    return project


def wait_until_two_run(project: Project, running: Running, jobs: int = len(MADE)) -> None:
    """And until the others wait at the site, in whichever order they were submitted."""
    until(lambda: len(project.lines("ran")) == 2, "jobs that run")
    until(lambda: running.output.count(": submitted to ") >= jobs, "jobs that wait")


def test_killed_while_jobs_run_and_wait(both: Project) -> None:
    """Two run side by side in an allocation, which outlives this machine; two wait there."""
    prepare(both)
    first = both.start()
    wait_until_two_run(both, first)
    first.kill()
    both.go()

    said = both.run("--nolock", "--rerun-incomplete").ok().output

    assert sorted(both.lines("ran")) == MADE, said
    assert [both.read(f"out/{n}.txt").strip() for n in MADE] == MADE
    assert len(set(both.lines("allocations"))) == 1
    assert "submitted to" not in said


def test_an_allocation_that_is_cancelled_frees_its_jobs(
    firecrest: Project, sandbox: Sandbox
) -> None:
    """What it ran is no failure of the jobs, which have no retries; what waited starts later."""
    prepare(firecrest)
    running = firecrest.start()
    wait_until_two_run(firecrest, running)
    begun = sorted(firecrest.lines("ran"))
    [allocation] = set(firecrest.lines("allocations"))
    sandbox.cancel_job("hpc2", int(allocation))
    running.says("allocation that ran it has ended")
    firecrest.go()

    running.end().ok()

    assert sorted(firecrest.lines("ran")) == sorted([*MADE, *begun])
    assert len(set(firecrest.lines("allocations"))) == 2
    assert running.output.count("Pool small at hpc2: an allocation was submitted") == 2
    tells(smk_mantik(firecrest, "jobs").output, "pool small")


def test_jobs_end_with_their_run(firecrest: Project) -> None:
    """Ctrl-C ends those that run, and those that wait never start."""
    prepare(firecrest)
    running = firecrest.start("--mantik-on-interrupt", "cancel")
    wait_until_two_run(firecrest, running)
    begun = sorted(firecrest.lines("ran"))

    running.interrupt()
    firecrest.go()

    assert {record.state.value for record in firecrest.attempts} == {"abandoned"}
    pools = firecrest.workspace / ".mantik/pools/small"
    until(lambda: not list(pools.glob("pool.*")), "the allocation's end")
    assert sorted(firecrest.lines("ran")) == begun


def test_two_allocations_share_what_waits(firecrest: Project) -> None:
    text = SNAKEFILE.replace("range(4)", "range(12)")
    prepare(firecrest, text, POOL.replace("CPUsPerNode: 2", "CPUsPerNode: 1, Count: 2"))
    running = firecrest.start()
    wait_until_two_run(firecrest, running, 12)
    firecrest.go()

    running.end().ok()

    assert sorted(firecrest.lines("ran")) == sorted(map(str, range(12)))
    assert len(set(firecrest.lines("allocations"))) == 2


def test_what_a_pool_did_is_shown(firecrest: Project) -> None:
    prepare(firecrest)
    running = firecrest.start()
    wait_until_two_run(firecrest, running)

    def pools() -> dict[str, Any]:
        [pool] = json.loads(smk_mantik(firecrest, "watch", "--json").ok().output)["pools"]
        return dict(pool)

    wanted = {"running": 1, "queued": 0, "jobs_running": 2, "jobs_waiting": 2}
    until(lambda: wanted.items() <= pools().items(), "a look at the allocation and its jobs")
    line = "hpc2, pool small: 1 allocation running, 0 queued; 2 jobs running, 2 waiting; "
    tells(smk_mantik(firecrest, "watch").ok().output, line)
    firecrest.go()
    running.end().ok()

    jobs = json.loads(smk_mantik(firecrest, "jobs", "--json").ok().output)
    assert {job["pool"] for job in jobs} == {"small"}
    [allocation] = {job["allocation"] for job in jobs}
    assert [allocation] == list(set(firecrest.lines("allocations")))
    tells(smk_mantik(firecrest, "jobs").ok().output, f"pool small: {allocation}")
    tells(smk_mantik(firecrest, "logs", f"pool small: {allocation}").output, "names 4 jobs")

    # The next run learns how long it stayed, and tidies up.
    directory = firecrest.workspace / ".mantik/pools/small"
    until(lambda: not list(directory.glob("pool.*")), "the end of the allocation")
    [used] = directory.glob("used.*")
    firecrest.run("--forcerun", "each").ok()
    assert not used.exists()
    first, *later = read_workflow(firecrest.directory / STATE).allocations  # one for late jobs
    assert [f"{first.seconds}", f"{first.used}"] == used.name.split(".")[-2:]
    assert first.seconds > 5
    assert first.ended is not None
    assert any(each.started is not None for each in later)
    report = smk_mantik(firecrest, "report", "--all", "--json").ok().output
    [pool] = json.loads(report)["pools"]
    assert pool["used"] * 3600 == pytest.approx(sum(each.used for each in (first, *later)))
    smk_mantik(firecrest, "report").ok()
    assert "Idle in the pool small at hpc2" in firecrest.read("mantik-report.html")


def test_an_allocation_of_several_nodes(both: Project) -> None:
    """Each node has CPUs for one job, and its own agent."""
    prepare(both, SNAKEFILE, POOL.replace("CPUsPerNode: 2", "CPUsPerNode: 1, Nodes: 2"))
    running = both.start()
    wait_until_two_run(both, running)
    both.go()

    running.end().ok()

    assert sorted(both.lines("ran")) == MADE
    assert len(set(both.lines("allocations"))) == 1


def test_max_jobs_does_not_count_jobs_of_a_pool(firecrest: Project) -> None:
    prepare(firecrest, SNAKEFILE.replace("until [ -e go ]; do sleep 0.1; done;", ""))
    text = firecrest.config.read_text()
    firecrest.config.write_text(text.replace("Site:\n", "Site:\n  MaxJobs: 1\n"))
    said = firecrest.run().ok().output
    assert sorted(firecrest.lines("ran")) == MADE
    assert "MaxJobs" not in said


def test_a_job_that_fails_fails_alone(firecrest: Project) -> None:
    prepare(firecrest, SNAKEFILE.replace("until [", "[ {wildcards.n} != 2 ] || exit 7; until ["))
    running = firecrest.start("--keep-going")
    until(lambda: len(firecrest.lines("ran")) >= 2, "jobs that run")
    firecrest.go()

    said = running.end().failed()

    assert sorted(firecrest.lines("ran")) == MADE
    tells(said, "each n=2", "exit code 7")
    assert [n for n in MADE if firecrest.exists(f"out/{n}.txt")] == ["0", "1", "3"]


def test_a_pool_takes_short_jobs_that_fit(firecrest: Project) -> None:
    text = """
        rule all:
            input: expand("{n}.txt", n=["short", "long", "own", "far", "out", "none"])
        rule each:
            output: "{n}.txt"
            shell: "touch {output}"
        use rule each as short with:
            output: "short.txt"
            resources: runtime=2
        use rule each as long with:
            output: "long.txt"
            resources: runtime=3
        use rule each as own with:
            output: "own.txt"
            resources: runtime=1, slurm_partition="batch"
        use rule each as far with:
            output: "far.txt"
            threads: 3
            resources: runtime=1
        use rule each as out with:
            output: "out.txt"
            resources: runtime=1, mantik_pool=False
        ruleorder: short > long > own > far > out > each
    """
    prepare(firecrest, text, POOL.replace("Idle", "Takes: 2m, Idle"))

    firecrest.run().ok()

    queues = {record.rule: record.queue for record in firecrest.attempts}
    others = dict.fromkeys(("long", "own", "far", "out", "each"), "batch")
    assert queues == {"short": "pool small", **others}


def test_what_no_pool_can_run_is_told_before_anything_is_sent(
    firecrest: Project, sandbox: Sandbox
) -> None:
    before = len(sandbox.record("hpc2")["runs"])
    for change, what in (
        (('"small"', '"smal"'), "there is no pool 'smal' (did you mean small?)"),
        (("runtime=1", "runtime=60"), "takes jobs of at most"),
        (
            ("runtime=1", "cpus_per_task=4, runtime=1"),
            "CPUs: 4 requested; a job of the pool can have 2",
        ),
        (("runtime=1", "runtime=1, gpu=1"), "GPUs: 1 requested; a job of the pool can have 0"),
        (("runtime=1", "runtime=1, nodes=2"), "Request one node, or leave"),
        (("runtime=1", "runtime=1, slurm_partition='batch'"), "cannot choose its queue"),
        (
            ("runtime=1", "runtime=1, mantik_continue=3, mantik_checkpoint='x'"),
            "Leave out mantik_pool, or set mantik_continue=0",
        ),
    ):
        prepare(firecrest, SNAKEFILE.replace(*change))
        tells(firecrest.run().failed(), "nothing submitted", what)
    prepare(firecrest, pool=POOL.replace("CPUsPerNode: 2", "CPUs: 2"))
    said = firecrest.run().failed()
    tells(said, "Pools.small.CPUsPerNode")
    assert "there is no pool" not in said, "what is wrong with it is said"
    assert len(sandbox.record("hpc2")["runs"]) == before


def test_an_allocation_that_no_queue_allows_is_told_before_anything_is_sent(
    project: Project,
) -> None:
    prepare(project, pool=POOL.replace("10m", "10000h"))
    tells(project.run().failed(), "nothing submitted", "queue batch allows at most")


def test_a_refused_allocation_fails_its_jobs(firecrest: Project, sandbox: Sandbox) -> None:
    """Once for all that wait; nothing of them is left that another allocation could run."""
    prepare(firecrest)
    refused = sandbox.faults.add(
        Fault("refuse", "POST", "/jobs$", status=400, message="Invalid account", count=None)
    )
    try:
        said = firecrest.run("--keep-going").failed()
    finally:
        sandbox.faults.clear()

    tells(said, "4 jobs failed", "The job ended: rejected", "Invalid account", "BUDGET_ACCOUNT")
    assert refused.happened < len(MADE)
    assert not list((firecrest.workspace / ".mantik/pools/small").iterdir())


@pytest.mark.nightly
def test_a_job_ends_at_its_own_walltime(firecrest: Project) -> None:
    prepare(firecrest, SNAKEFILE.replace("range(4)", "range(1)"))
    begun = time.monotonic()
    said = firecrest.run().failed()
    assert time.monotonic() - begun >= 60
    tells(said, "time limit")
