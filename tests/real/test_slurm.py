"""What a real Slurm is asked for and what it refuses, through the centre's servers of both APIs."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.real.centre import USER, Centre
from tests.support.workflows import Project, tells, until

GATED = "gated"
"""The queue whose state these tests change."""


@pytest.fixture
def on_slurm(at_centre: Project) -> Project:
    return at_centre


@dataclass(frozen=True)
class Operator:
    """Whoever runs the centre's Slurm."""

    centre: Centre

    def run(self, *command: str) -> str:
        return subprocess.run(
            command, env={**os.environ, **self.centre.environment}, capture_output=True,
            text=True, check=True, timeout=600,
        ).stdout  # fmt: skip

    def set_gated(self, state: str) -> None:
        self.run("scontrol", "update", f"PartitionName={GATED}", f"State={state}")


@pytest.fixture
def operator(centre: Centre) -> Operator:
    return Operator(centre)


@pytest.fixture
def gated(operator: Operator) -> Iterator[Operator]:
    """The operator of the queue `GATED`, in which no other test has a job meanwhile."""
    with (operator.centre.directory / f"{GATED}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield operator
        operator.set_gated("UP")


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


class TestResources:
    def test_of_the_backend_config(self, on_slurm: Project, operator: Operator) -> None:
        kept = f"kept-{on_slurm.place.name}"
        operator.run(
            "scontrol", "create", "reservation", f"ReservationName={kept}", f"Users={USER}",
            "StartTime=now", "Duration=60", "Nodes=n1", "Flags=IGNORE_JOBS,OVERLAP", "CoreCnt=4",
        )  # fmt: skip
        asked = f"""  Queue: devel
  Runtime: 90m
  Nodes: 1
  CPUsPerNode: 3
  MemoryPerNode: 5G
  GPUsPerNode: 2
  QoS: short
  NodeConstraints: fast
  Reservation: {kept}"""
        on_slurm.config.write_text(on_slurm.place.config.replace("  Queue: batch", asked))
        on_slurm.write("Snakefile", SHOW.format(threads=1, resources="custom=1"))
        try:
            on_slurm.run().ok()
        finally:
            operator.run("scontrol", "delete", f"ReservationName={kept}")

        told = shown(on_slurm)
        wanted = {
            "Partition": "devel", "TimeLimit": "01:30:00", "NumNodes": "1", "CPUs/Task": "3",
            "NumTasks": "1", "NumCPUs": "3", "MinMemoryNode": "5G", "QOS": "short",
            "Features": "fast", "Reservation": kept, "Account": "sandbox", "Requeue": "0",
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
                input: "node.txt", "tasks.txt", "variables.txt"
            rule variables:
                output: "variables.txt"
                threads: 6
                resources: mantik_environment="three"
                shell: "srun bash -c 'echo $SLURM_PROCID $SLURM_CPUS_PER_TASK' > {output}"
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

        three = 'Environments: {three: {Variables: {SLURM_NTASKS_PER_NODE: "3"}}}'
        on_slurm.config.write_text(f"{on_slurm.place.config}\n{three}\n")
        on_slurm.run().ok()

        assert on_slurm.read("node.txt") == "0 3\n"
        assert sorted(on_slurm.read("variables.txt").splitlines()) == ["0 2", "1 2", "2 2"]
        assert sorted(on_slurm.read("tasks.txt").split()) == ["0", "1"]


REFUSED = """
rule refused_{number}:
    output: "{number}.txt"
    resources: {resources}
    shell: "touch {{output}}"
"""


class TestRefused:
    """Each refusal in the scheduler's own words."""

    def test_rejected(self, on_slurm: Project) -> None:
        refused: dict[str, str] = {}
        if on_slurm.place.name == "uni":  # other mistakes are refused before: it lists choices
            refused |= {"slurm_account='none'": "Invalid account"}
        else:  # it lists the accounts, so that an unknown one is refused before
            refused |= {
                "qos='none'": "Invalid qos specification",
                "constraint='none'": "Invalid feature specification",
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

    def test_drained_partition(self, on_slurm: Project, gated: Operator) -> None:
        on_slurm.write("Snakefile", SHOW.format(threads=1, resources=f"queue='{GATED}'"))
        gated.set_gated("DRAIN")
        tells(on_slurm.run().failed(), "partition not available")

    def test_partition_that_is_down_for_a_while(self, on_slurm: Project, gated: Operator) -> None:
        on_slurm.write("Snakefile", SHOW.format(threads=1, resources=f"queue='{GATED}'"))
        gated.set_gated("DOWN")
        running = on_slurm.start()
        until(
            lambda: "(PartitionDown)" in gated.run("squeue", f"--partition={GATED}", "--format=%R"),
            "the job to wait",
        )
        gated.set_gated("UP")
        running.end().ok()
        assert shown(on_slurm)["Partition"] == GATED
