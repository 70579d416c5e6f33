"""Whole workflows on a real Slurm, through both APIs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.test_equal import test_rules_modules_values_and_environment as equal
from tests.real.slurm import Slurm
from tests.support.workflows import UNTRACKED, Place, Project, Running, tells, until
from tests.workflows.test_workflows import WORKFLOWS, compare

pytestmark = [pytest.mark.software("Slurm"), pytest.mark.timeout(600)]

CHOICE = ("flags-outputs", "resources", "retries", "script-python")
"""Workflows of tests/workflows that a real scheduler may see otherwise."""


def shown(project: Project, name: str = "shown.txt") -> dict[str, str]:
    """What a job has written of `scontrol show job`."""
    return dict(word.split("=", 1) for word in project.read(name).split() if "=" in word)


SHOW = """
    rule show:
        output: "shown.txt"
        threads: {threads}
        resources: {resources}
        shell: "scontrol show job $SLURM_JOB_ID > {{output}}"
"""


class TestSame:
    def test_values_and_environment(self, on_slurm: Project) -> None:
        on_slurm.extra.update(UNTRACKED)
        equal(on_slurm)

    @pytest.mark.parametrize("name", [name for name in WORKFLOWS if name in CHOICE])
    def test_workflow(
        self, name: str, project: Project, firecrest_place: Place, tmp_path: Path
    ) -> None:
        compare(name, [project.place, firecrest_place], tmp_path)


class TestResources:
    def test_of_the_backend_config(self, on_slurm: Project, real_slurm: Slurm) -> None:
        real_slurm.run(
            "scontrol", "create", "reservation", "ReservationName=kept", "Users=root",
            "StartTime=now", "Duration=60", f"Nodes={real_slurm.nodes[0]}",
            "Flags=IGNORE_JOBS,OVERLAP", "CoreCnt=4",
        )  # fmt: skip
        asked = """  Queue: devel
  Runtime: 90m
  Nodes: 1
  CPUsPerNode: 3
  MemoryPerNode: 5G
  GPUsPerNode: 2
  QoS: short
  NodeConstraints: fast
  Reservation: kept"""
        on_slurm.config.write_text(on_slurm.place.config.replace("  Queue: batch", asked))
        on_slurm.write("Snakefile", SHOW.format(threads=1, resources="custom=1"))
        try:
            on_slurm.run().ok()
        finally:
            real_slurm.run("scontrol", "delete", "ReservationName=kept")

        told = shown(on_slurm)
        wanted = {
            "Partition": "devel", "TimeLimit": "01:30:00", "NumNodes": "1", "CPUs/Task": "3",
            "NumTasks": "1", "NumCPUs": "3", "MinMemoryNode": "5G", "QOS": "short",
            "Features": "fast", "Reservation": "kept", "Account": "sandbox", "Requeue": "0",
            "TresPerNode": "gres:gpu:2",
        }  # fmt: skip
        assert {key: told.get(key) for key in wanted} == wanted
        assert "gres/gpu=2" in told["TRES"]

    def test_of_a_rule(self, on_slurm: Project) -> None:
        resources = (
            "runtime=7, tasks=2, mem_mb_per_cpu=300, gpu=1, slurm_account='other', qos='short', "
            "slurm_partition='devel', constraint='fast'"
        )
        on_slurm.write("Snakefile", SHOW.format(threads=2, resources=resources))

        on_slurm.run().ok()

        told = shown(on_slurm)
        wanted = {
            "Partition": "devel", "TimeLimit": "00:07:00", "NumTasks": "2", "CPUs/Task": "2",
            "NumCPUs": "4", "QOS": "short", "Account": "other", "Features": "fast",
        }  # fmt: skip
        assert {key: told.get(key) for key in wanted} == wanted
        assert "gres/gpu=1" in told["TRES"]

    def test_srun_starts_a_command_once_per_node(self, on_slurm: Project) -> None:
        on_slurm.write(
            "Snakefile",
            """
            rule all:
                input: "node.txt", "tasks.txt"
            rule node:
                output: "node.txt"
                threads: 3
                shell: "srun bash -c 'echo $SLURM_PROCID $SLURM_CPUS_PER_TASK' > {output}"
            rule tasks:
                output: "tasks.txt"
                resources: tasks=2, mpi="srun"
                shell:
                    "{resources.mpi} -n {resources.tasks} bash -c 'echo $SLURM_PROCID' > {output}"
            """,
        )

        on_slurm.run().ok()

        assert on_slurm.read("node.txt") == "0 3\n"
        assert sorted(on_slurm.read("tasks.txt").split()) == ["0", "1"]


ONE = """
    rule one:
        output: "out.txt"
        resources: {resources}
        shell: "echo $SLURM_JOB_ID > {mark}.new; mv {mark}.new {mark}; {command}; touch {{output}}"
"""


@dataclass(frozen=True)
class Started:
    """A workflow whose one job's command runs; `job` is Slurm's number of it."""

    running: Running
    job: int


def start(project: Project, command: str, resources: str) -> Started:
    """Start a workflow with one job and wait until its command runs."""
    mark = project.directory.parent / "started"
    project.extra.update(UNTRACKED)
    project.write("Snakefile", ONE.format(resources=resources, command=command, mark=mark))
    running = project.start()
    until(mark.exists, "the job's start")
    return Started(running, int(mark.read_text()))


def end_of(server: Slurm, job: int) -> str:
    """The state that a job ended in: its workflow may be told before Slurm has cleared it away."""
    until(
        lambda: server.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), "the end of the job"
    )
    return server.job(job)["JobState"]


REFUSED = """
rule refused_{number}:
    output: "{number}.txt"
    resources: {resources}
    shell: "touch {{output}}"
"""


@contextmanager
def partition(real_slurm: Slurm, state: str) -> Iterator[None]:
    """A partition `devel` in another state."""
    real_slurm.run("scontrol", "update", "PartitionName=devel", f"State={state}")
    try:
        yield
    finally:
        real_slurm.run("scontrol", "update", "PartitionName=devel", "State=UP")


class TestEnds:
    """Each end in its true state, with its reason."""

    def test_time_limit(self, project: Project, firecrest: Project, real_slurm: Slurm) -> None:
        # At the same time: a minute is the least that Slurm can be asked for.
        firecrest = Project(firecrest.directory.parent / "fire" / "project", firecrest.place)
        started = [start(each, "sleep 200", "runtime=1") for each in (project, firecrest)]
        until(
            lambda: all(each.running.process.poll() is not None for each in started),
            "the ends of both", 400,
        )  # fmt: skip

        for each in started:
            tells(each.running.end().failed(), "reached its time limit", "runtime=MINUTES")
            assert end_of(real_slurm, each.job) == "TIMEOUT"

    def test_cancelled_from_outside(self, on_slurm: Project, real_slurm: Slurm) -> None:
        started = start(on_slurm, "sleep 100", "runtime=5")
        real_slurm.run("scancel", str(started.job))

        said = started.running.end().failed()

        tells(said, "cancelled", "Somebody cancelled it at the site")
        assert end_of(real_slurm, started.job) == "CANCELLED"

    def test_out_of_memory(self, on_slurm: Project, real_slurm: Slurm) -> None:
        hog = "python3 -c 'import time; x = bytearray(500 << 20); time.sleep(60)'"
        started = start(on_slurm, hog, "mem_mb=100")

        said = started.running.end().failed()

        tells(said, "out of memory: slurmstepd", "exceeded memory limit", "mem_mb=")
        # It kills one process after the other: its batch script may see the command die, and end.
        assert end_of(real_slurm, started.job) in ("FAILED", "OUT_OF_MEMORY", "COMPLETED")
        assert not (on_slurm.directory / "out.txt").exists()

    def test_node_down(self, on_slurm: Project, real_slurm: Slurm) -> None:
        started = start(on_slurm, "sleep 100", "runtime=5")
        node = f"nodename={real_slurm.nodes[0]}"
        real_slurm.run("scontrol", "update", node, "state=down", "reason=test")
        try:
            said = started.running.end().failed()
        finally:
            # It may have come back by itself, and refuses then.
            real_slurm.run("scontrol", "update", node, "state=resume", check=False)

        tells(said, "node failure", "The node failed, not the job")
        assert end_of(real_slurm, started.job) == "NODE_FAIL"

    def test_rejected(self, on_slurm: Project) -> None:
        refused = {
            "qos='none'": "Invalid qos specification",
            "constraint='none'": "Invalid feature specification",
            "slurm_account='none'": "Invalid account",
        }
        if on_slurm.place.name == "hpc2":  # UNICORE tells its ranges before
            refused |= {
                "mem_mb=900000": "node configuration is not available",
                "runtime=3000": "time limit is invalid",
            }
        rules = [
            REFUSED.format(number=number, resources=resources)
            for number, resources in enumerate(refused)
        ]
        every = ", ".join(f"'{number}.txt'" for number in range(len(rules)))
        on_slurm.write("Snakefile", f"rule all:\n    input: {every}\n" + "".join(rules))

        tells(on_slurm.run("--keep-going").failed(), *refused.values())

    def test_drained_partition(self, on_slurm: Project, real_slurm: Slurm) -> None:
        on_slurm.write("Snakefile", SHOW.format(threads=1, resources="queue='devel'"))
        with partition(real_slurm, "DRAIN"):
            tells(on_slurm.run().failed(), "partition not available")

    def test_partition_that_is_down_for_a_while(self, on_slurm: Project, real_slurm: Slurm) -> None:
        on_slurm.write("Snakefile", SHOW.format(threads=1, resources="queue='devel'"))
        with partition(real_slurm, "DOWN"):
            running = on_slurm.start()
            until(
                lambda: "(PartitionDown)" in real_slurm.run("squeue", "--format=%R"),
                "the job to wait",
            )
        running.end().ok()
        assert shown(on_slurm)["Partition"] == "devel"
