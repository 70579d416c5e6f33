"""Workflows at sites that behave as real ones do on a bad day."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SandboxSettings, SiteOption
from snakemake_executor_plugin_mantik.jobs.spec import ScriptLimits
from tests.support.places import PATIENT
from tests.support.sandbox import held_workers
from tests.support.workflows import SHORT, UNTRACKED, Project, place_in, tells, until

FOR_EVER = 36_000.0
SOON = replace(SHORT, unknown_wait_s=3, script=ScriptLimits(heartbeat_s=1))


@contextmanager
def project_at(
    directory: Path, api: str, settings: SandboxSettings = PATIENT
) -> Iterator[tuple[Sandbox, Project]]:
    """A project at a sandbox of its own, which is asked about silent jobs soon."""
    with Sandbox(directory / "sandbox", [SiteOption("hpc1", api)], settings) as box:
        project = Project(directory / "project", place_in(box, "hpc1").timed(SOON), dict(UNTRACKED))
        yield box, project
        project.close()


def test_jobs_that_a_tsi_lost_are_submitted_again(tmp_path: Path) -> None:
    """UNICORE accepts jobs while its TSI is away, and fails them."""
    with project_at(tmp_path, "unicore") as (box, project):
        project.write(
            "Snakefile",
            """
            rule all:
                input: expand("{n}.txt", n=range(6))

            rule each:
                output: "{n}.txt"
                shell: "echo {wildcards.n} >> ran.txt; touch {output}"
            """,
        )

        with held_workers(box):
            running = project.start()
            until(lambda: _jobs(box, "STAGINGIN"), "a job's files are to be brought")
            box.tsi("hpc1").up = False
        until(lambda: _jobs(box, "FAILED"), "UNICORE has failed a job that it could not start")
        box.tsi("hpc1").up = True
        running.end().ok()
        ran = (project.workspace / "ran.txt").read_text().split()
        assert sorted(map(int, ran)) == list(range(6))


@pytest.mark.parametrize("api", ["unicore", "firecrest"])
def test_what_slurm_says_of_an_end_is_told_before_the_status(api: str, tmp_path: Path) -> None:
    """A status that never tells the end, and a memory kill that Slurm calls FAILED."""
    timing = replace(PATIENT.timing, death_lag=FOR_EVER)
    settings = replace(PATIENT, timing=timing, memory_state="FAILED")
    with project_at(tmp_path, api, settings) as (box, project):
        project.write(
            "Snakefile",
            """
            rule all:
                input: "eats.txt", "killed.txt"

            rule eats:
                output: "eats.txt"
                resources: mem_mb=200
                shell: 'python3 -c "x = bytearray(400 << 20); import time; time.sleep(600)"'

            rule killed:
                output: "killed.txt"
                shell: "touch there.txt; sleep 600"
            """,
        )
        running = project.start("--keep-going")
        until((project.workspace / "there.txt").exists, "a job runs")
        until(lambda: _in_state(box, "FAILED"), "Slurm has ended the other for its memory")
        (number,) = _in_state(box, "RUNNING")
        box.fail_node("hpc1", number)
        said = running.end().failed()
        assert {r.rule: r.reason for r in project.tries} == {
            "eats": "out_of_memory",
            "killed": "node_failure",
        }
        tells(said, "out of memory")


def _jobs(box: Sandbox, status: str) -> int:
    """How many of UNICORE's jobs have a status."""
    return sum(job["status"] == status for job in box.record("hpc1")["jobs"])


def _in_state(box: Sandbox, state: str) -> list[int]:
    """Slurm's ids of the jobs in a state."""
    return [run["scheduler_id"] for run in box.record("hpc1")["runs"] if run["state"] == state]
