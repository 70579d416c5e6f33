"""Ends of every kind at the centre's real servers: each is noticed, with the scheduler's reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.centre import USER, Centre, tsi
from tests.support.clusters import SlurmCluster, kill_all
from tests.support.command import smk_mantik
from tests.support.places import MakeProject
from tests.support.workflows import UNTRACKED, Place, Project, tells, until

SNAKEFILE = """
    O = {outside!r}
    BEGUN = f"echo $$ > {{O}}/{{{{rule}}}}.new; echo $SLURM_JOB_ID >> {{O}}/{{{{rule}}}}.jobs; " \\
        f"mv {{O}}/{{{{rule}}}}.new {{O}}/{{{{rule}}}}; "

    rule all:
        input: "memory.txt", "killed.txt", "cancelled.txt", "waiting.txt", "node.txt", "time.txt"

    rule memory:
        output: "memory.txt"
        resources: mem_mb=100
        shell: BEGUN + "x=$(head -c 300M /dev/zero | tr '\\\\0' x); sleep 600; touch {{output}}"

    rule time:
        output: "time.txt"
        resources: runtime=1
        shell: BEGUN + "sleep 600; touch {{output}}"

    rule killed:
        output: "killed.txt"
        shell: BEGUN + "sleep 600; touch {{output}}"

    rule cancelled:
        output: "cancelled.txt"
        shell: BEGUN + "sleep 600; touch {{output}}"

    rule waiting:
        output: "waiting.txt"
        resources: slurm_partition="closed"
        shell: BEGUN + "touch {{output}}"

    rule node:
        output: "node.txt"
        retries: 5
        resources: slurm_partition="fragile", mantik_retry_on="node_failure"
        shell: BEGUN + "until [ -e {{O}}/through ]; do sleep 0.2; done; touch {{output}}"
"""


@pytest.fixture
def project(at_centre: Project) -> Project:
    return at_centre


def numbers(path: Path) -> list[str]:
    """The scheduler's ids of the jobs that have begun to run a rule."""
    return path.read_text().split() if path.exists() else []


def test_each_is_reported_with_its_reason(project: Project, outside: Path, centre: Centre) -> None:
    slurm = SlurmCluster(centre.directory, centre.environment, USER)
    project.write("Snakefile", SNAKEFILE.format(outside=str(outside)))
    running = project.start("--keep-going")

    def begun(rule: str) -> Callable[[], bool]:
        return (outside / rule).exists

    def waits() -> list[str]:
        attempts = [each for each in project.attempts if each.rule == "waiting"]
        return centre.queued(job for each in attempts for job in each.site_jobs)

    until(begun("killed"), "a job that is killed")
    kill_all(int((outside / "killed").read_text()))
    until(begun("cancelled"), "a job that is cancelled")
    slurm.cancel(*numbers(outside / "cancelled.jobs"))
    slurm.cancel(until(waits, "a job that waits")[-1])
    until(begun("node"), "a job on a node that fails")
    slurm.fail_node(numbers(outside / "node.jobs")[-1])
    (outside / "through").touch()
    said = running.end().failed()

    reasons = {each.rule: each.reason for each in project.attempts if each.rule != "node"}
    assert reasons == {
        "memory": "out_of_memory",
        "time": "time_limit",
        "killed": "unknown",
        "cancelled": "cancelled",
        "waiting": "cancelled",
    }, said
    tells(
        said, "out of memory: slurmstepd", "exceeded memory limit", "mem_mb=", "signal 9",
        "reached its time limit", "runtime=MINUTES", "The job was cancelled at the site",
        "The node failed, not the job",
    )  # fmt: skip
    assert not project.exists("memory.txt")
    *failed, last = (each for each in project.attempts if each.rule == "node")
    assert {each.reason for each in failed} == {"node_failure"}, said
    assert last.outcome == "succeeded", said
    assert project.exists("node.txt")


STUCK = """
    rule all:
        input: "never.txt", "waits.txt", "drained.txt"

    rule never:
        output: "never.txt"
        resources: runtime="20h", qos="short"
        shell: "touch {output}"

    rule waits:
        output: "waits.txt"
        resources: slurm_partition="closed"
        shell: "touch {output}"

    rule drained:
        output: "drained.txt"
        resources: slurm_partition="drained"
        shell: "touch {output}"
"""

DOWN = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"


def test_why_a_job_cannot_start_is_reported(project: Project) -> None:
    """One that its limits never let start fails; one that waits for a partition is left waiting.

    So is one that waits its turn, for nodes that are drained: its whole reason is shown.
    """
    project.write("Snakefile", STUCK)

    def told() -> bool:
        return all(
            word in running.output
            for word in ("cannot start: PartitionDown", "it would wait for ever in the queue")
        )

    running = project.start("--keep-going")
    until(told, "both reasons")

    def explained() -> str:
        shown = smk_mantik(project, "jobs").ok().output
        return shown if DOWN in shown else ""

    shown = until(explained, "the third reason")
    said = running.interrupt().output

    never, waits = (next(t for t in project.attempts if t.rule == r) for r in ("never", "waits"))
    assert (never.reason, never.waits) == ("rejected", "QOSMaxWallDurationPerJobLimit"), said
    assert (waits.outcome, waits.waits) == ("cancelled", "PartitionDown"), said
    tells(shown, "cannot start: PartitionDown", f"waiting: {DOWN} (nodes that it needs are down")
    assert "cannot start: Nodes" not in said
    assert said.count("cannot start: QOSMaxWallDurationPerJobLimit") == 1
    assert said.count("cannot start: PartitionDown") == 1


@pytest.mark.software(tsi.SOFTWARE)
@pytest.mark.parametrize(
    ("resource", "told"),
    [
        ("qos='long'", "QoS 'long' requested; queue batch allows normal, short"),
        ("constraint='slow'", "constraint 'slow' requested; queue batch allows fast"),
    ],
)
def test_what_a_queue_does_not_list_is_refused_before(
    unicore_centre_place: Place, project_at: MakeProject, resource: str, told: str
) -> None:
    project = project_at(unicore_centre_place, dict(UNTRACKED))
    project.write(
        "Snakefile", f"rule one:\n    output: 'a'\n    resources: {resource}\n    shell: 'touch a'"
    )
    tells(project.run().failed(), told, "nothing submitted")
    assert project.attempts == []
