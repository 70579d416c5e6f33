"""An attempt that failed tells why, and the next one asks for more of what it lacked, if at all."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.batch import BatchState
from hpc_sandbox.scheduler import LocalJob
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from snakemake_executor_plugin_mantik.jobs.spec import ScriptLimits
from tests.support.places import PATIENT, MakeProject
from tests.support.workflows import SHORT, UNTRACKED, Project, place_in, tells, until

SNAKEFILE = """
    from snakemake_executor_plugin_mantik.retry import grows, last_failure

    def minutes(wildcards, rulename):
        return 1 if last_failure(rulename, wildcards) == "time_limit" else None

    rule all:
        input: "eats.txt", "sleeps.txt"

    rule eats:
        output: "eats.txt"
        resources:
            mem_mb=grows(200, on="out_of_memory", factor=4, at_most=700),
            runtime=grows(1, on="time_limit"),
        shell: 'python3 -c "x = bytearray(400 << 20); import time;'
            ' time.sleep(60 * ({resources.mem_mb} < 700))";'
            " echo {resources.mem_mb} {resources.runtime} > {output}"

    rule sleeps:
        output: "sleeps.txt"
        resources:
            mem_mb=grows(500, on="out_of_memory, node_failure"),
            runtime=minutes,
        shell: "echo . >> attempts.txt; [ $(wc -l < attempts.txt) = 2 ] || sleep 60;"
            " echo {resources.mem_mb} > {output}"
"""


def test_a_retry_asks_for_more_of_what_was_lacking_and_of_nothing_else(project: Project) -> None:
    text = project.config.read_text()
    project.config.write_text(text.replace("Resources:\n", "Resources:\n  Runtime: 4s\n"))
    # They are asked about soon after they fell silent.
    timing = replace(SHORT, marker_grace_s=1, script=ScriptLimits(heartbeat_s=1))
    project.place = project.place.timed(timing)
    project.write("Snakefile", SNAKEFILE)

    said = project.run("--retries", "2").ok().output

    assert project.read("eats.txt") == "700 1\n"
    assert project.read("sleeps.txt") == "500\n"
    found = {(r.rule, r.outcome.partition(":")[0], r.reason) for r in project.attempts}
    assert found == {
        ("eats", "failed", "out_of_memory"),
        ("eats", "succeeded", ""),
        ("sleeps", "failed", "time_limit"),
        ("sleeps", "succeeded", ""),
    }
    tells(said, "out of memory", "reached its time limit")


@pytest.mark.parametrize("api", ["unicore", pytest.param("firecrest", marks=pytest.mark.nightly)])
def test_children_are_told_to_end_before_their_parents(api: str, tmp_path: Path) -> None:
    """A command may be over, by itself it seems, before its job is told; it has its last words."""
    settings = replace(PATIENT, timing=replace(PATIENT.timing, signal_gap=0.02))
    with Sandbox(tmp_path / "sandbox", [SiteOption("hpc1", api)], settings) as box:
        project = Project(tmp_path / "project", place_in(box, "hpc1"), dict(UNTRACKED))
        # Patient with the scheduler's answer, which a busy machine delays.
        timing = replace(SHORT, marker_grace_s=60, script=ScriptLimits(heartbeat_s=1))
        project.place = project.place.timed(timing)
        project.write(
            "Snakefile",
            r"""
            rule all:
                input: "ends.txt", "speaks.txt"

            rule ends:
                output: "ends.txt"
                shell: "touch begun.ends; sleep 600; touch {output}"

            rule speaks:
                output: "speaks.txt"
                shell:
                    "trap 'trap \"\" TERM; sleep 1; touch late.txt; exit 1' TERM; "
                    "touch begun.speaks; while :; do sleep 0.1 || :; done"
            """,
        )
        running = project.start("--keep-going")
        until(lambda: len([*project.workspace.glob("begun.*")]) == 2, "the jobs")
        for run in box.record("hpc1")["runs"]:
            box.expire_job("hpc1", run["scheduler_id"])
        said = running.end().failed()
        found = {record.rule: record.reason for record in project.attempts}
        assert found == {"ends": "time_limit", "speaks": "time_limit"}, said
        assert (project.workspace / "late.txt").exists(), said
        project.close()


def test_only_named_reasons_are_worth_a_retry(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule all:
            input: "a.txt", "b.txt", "c.txt", "d.txt"

        rule d:
            output: "d.txt"
            shell: "echo d >> attempts.txt; exit 3"

        rule a:
            output: "a.txt"
            resources: mantik_retry_on="out_of_memory,node_failure"
            shell: "echo a >> attempts.txt; exit 3"

        rule b:
            output: "b.txt"
            shell: "echo b >> attempts.txt; exit 3"

        rule c:
            output: ensure("c.txt", non_empty=True)
            resources: mantik_retry_on="exit_code"
            shell: "echo c >> attempts.txt; touch {output}"
        """,
    )

    said = project.run(
        "--keep-going", "--retries", "1", "--set-resources", "b:mantik_retry_on=set_up,exit_code",
        "--default-resources", "mantik_retry_on=node_failure,preempted",
    ).failed()  # fmt: skip

    assert sorted((project.workspace / "attempts.txt").read_text().split()) == [*"abbcd"], said
    assert {r.rule: r.reason for r in project.attempts} == {
        "a": "exit_code",
        "b": "exit_code",
        "c": "outputs",
        "d": "exit_code",
    }
    assert {r.what_used.exit_code for r in project.attempts if r.rule in "ab"} == {3}
    tells(said, "a: not tried again, since it failed for exit_code, which mantik_retry_on does not")


def test_a_mistake_that_follows_from_a_file_is_told_when_the_file_is_there(
    project: Project,
) -> None:
    project.write(
        "Snakefile",
        """
        rule b:
            input: "a.txt"
            output: "b.txt"
            resources: mantik_retry_on=lambda wildcards, input: open(input[0]).read().strip()
            shell: "touch {output}"

        rule a:
            output: "a.txt"
            shell: "echo oom > {output}"
        """,
    )
    said = project.run("--retries", "2").failed()
    tells(said, "for the reason 'oom'", "not tried again")
    assert [r.rule for r in project.attempts] == ["a"]


def test_what_was_learned_outlives_the_controller(project: Project) -> None:
    """Snakemake counts attempts from 1 again in each run; the journal knows better."""
    project.write(
        "Snakefile",
        """
        from snakemake_executor_plugin_mantik.retry import grows

        rule a:
            output: "{name}.txt"
            resources: mem_mb=grows(100, on="exit_code", at_most=300)
            shell: "echo {resources.mem_mb} >> asked.txt; [ -e good ]; touch {output}"
        """,
    )
    for _ in range(2):
        project.run("x.txt").failed()
    project.write("good")
    project.run("x.txt", "y.txt").ok()
    project.run("x.txt", "--force").ok()
    asked = (project.workspace / "asked.txt").read_text().split()
    assert asked[:2] == ["100", "200"]
    assert sorted(asked[2:4]) == ["100", "300"]
    assert asked[4] == "100", "it had succeeded"


NODES = """
    rule all:
        input: "lost.txt", "found.txt"

    rule lost:
        output: "lost.txt"
        resources: exclude="n[7-9]"
        shell: "until [ -e go ]; do sleep 0.1; done; touch {output}"

    rule found:
        output: "found.txt"
        shell: "touch {output}; [ -e go ] || exit 3"
"""


@pytest.mark.parametrize("name", ["hpc1", "hpc2"])
def test_a_node_that_failed_a_job_gets_none_of_those_that_follow(
    sandbox: Sandbox, project_at: MakeProject, name: str
) -> None:
    """Also in the next run, if this one is killed; a command that fails excludes no node."""
    project = project_at(place_in(sandbox, name), dict(UNTRACKED))
    project.write("Snakefile", NODES)
    queue, node = sandbox.local_scheduler(name), os.uname().nodename

    def last(rule: str) -> LocalJob:
        return [job for job in queue.jobs.values() if job.request.name.startswith(rule)][-1]

    def excluded() -> list[str]:
        scripts = [last(rule).copy.read_text() for rule in ("lost", "found")]
        return [" ".join(re.findall("#SBATCH --exclude=(.*)", script)) for script in scripts]

    running = project.start("--keep-going", "--retries", "1", "--nolock")
    running.says("lost: runs at")
    until(lambda: running.output.count("found: failed at") == 2, "a command to fail twice")
    assert excluded() == ["n[7-9]", ""]
    said = f"lost: its node {node} at {name} failed."
    assert said not in running.output
    sandbox.fail_node(name, last("lost").id)
    running.says(said)
    until(lambda: last("lost").state is BatchState.RUNNING, "the next attempt")
    assert excluded() == [f"n[7-9],{node}", ""]
    running.kill()
    project.go()
    told = project.run("--nolock", "--rerun-incomplete").ok().output
    assert excluded() == [f"n[7-9],{node}", node]
    assert running.output.count(said) == told.count(said) == 1
