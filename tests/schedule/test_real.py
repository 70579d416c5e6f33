"""Real schedulers, processes, runs and a real kill: a due time comes to be one run."""

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.runs.schedule_store import ScheduleStore
from snakemake_executor_plugin_mantik.runs.scheduler import DUE, SCHEDULE, is_present
from snakemake_executor_plugin_mantik.runs.schedules import Firing, FiringState, Schedule
from snakemake_executor_plugin_mantik.runs.store import KEY
from tests.runs.conftest import Runs, empty_store, runs, store_uri
from tests.support.command import smk_mantik
from tests.support.workflows import until

__all__ = ["empty_store", "runs", "store_uri"]

# Half a dozen imports of MLflow, beside other tests.
WAIT_S = 600.0
pytestmark = pytest.mark.software("MLflow in a file")


class Scheduling:
    """Schedules beside runs."""

    def __init__(self, of: Runs, data: Path) -> None:
        self.runs, self.data = of, data / "mantik"
        of.project.extra["XDG_DATA_HOME"] = str(data)
        self.store = ScheduleStore(self.data)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik", "schedule", *words],
            cwd=self.runs.project.directory, env=self.runs.project.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        self.store.close()

    def schedule(self) -> Schedule:
        (found,) = self.store.all()
        return found

    def claim(self) -> Firing:
        """Have a due time come, without anybody waiting for it."""
        schedule = self.schedule()
        due = int(schedule.since) + 1
        assert self.store.claim(schedule, due, [(due, FiringState.FIRING, "")], time.time())
        return self.store.open()[-1]

    def made(self, firing: Firing) -> list[str]:
        """The runs that were made for a due time, as MLflow's file has them."""
        with closing(sqlite3.connect(self.runs.uri.removeprefix("sqlite:///"))) as db:
            rows = db.execute("SELECT run_uuid FROM tags WHERE key = ? AND value = ?",
                              (KEY, firing.key))  # fmt: skip
            return [row[0] for row in rows]


@pytest.fixture
def scheduling(runs: Runs, tmp_path: Path) -> Iterator[Scheduling]:
    made = Scheduling(runs, tmp_path / "data home")
    yield made
    made.close()


@pytest.mark.nightly
def test_a_due_time_is_one_run_whoever_looks_and_whatever_is_killed(scheduling: Scheduling) -> None:
    runs = scheduling.runs
    seed = runs.submit("-P", "alpha=2", "--name", "seed")
    smk_mantik(
        runs.project, "schedule", "add", "weekly", "--run", "seed", "--cron", "0 0 1 1 *",
        "--tz", "UTC",
    ).ok()  # fmt: skip
    assert scheduling.schedule().run == seed

    # Two schedulers at once, of which one is told to end while its submission goes on.
    first = scheduling.claim()
    loop, other = scheduling.start("run"), scheduling.start("run", "--once")
    assert loop.stdout is not None
    assert "Press Ctrl-C to stop" in loop.stdout.readline(), "it hears signals from here on"
    until(lambda: scheduling.store.history(first.schedule)[0].attempts, "a submission", WAIT_S)
    assert is_present(scheduling.data)
    loop.send_signal(signal.SIGTERM)
    said = loop.communicate(timeout=WAIT_S)[0]
    assert loop.returncode == 0, said
    said = other.communicate(timeout=WAIT_S)[0]
    assert other.returncode == 0, said
    until(lambda: not scheduling.store.open(), "the submission", WAIT_S)
    (fired,) = scheduling.store.history(scheduling.schedule().id)
    assert (fired.state, scheduling.made(first)) == (FiringState.FIRED, [fired.run])

    # Killed in the middle of it: when its run is made in MLflow already.
    second = scheduling.claim()
    firing = scheduling.start("fire", str(second.id))
    until(lambda: scheduling.made(second) or firing.poll() is not None, "the run", WAIT_S)
    firing.send_signal(signal.SIGKILL)
    said = firing.communicate(timeout=WAIT_S)[0]
    left = scheduling.store.firing(second.id)
    assert left is not None
    if left.state is FiringState.FIRING:  # else it was quicker than the kill
        assert left.begun, said
        again = scheduling.start("fire", str(second.id))
        said = again.communicate(timeout=WAIT_S)[0]
        assert "submitted as run" in said, said
    ended = scheduling.store.firing(second.id)
    assert ended is not None
    assert ended.state is FiringState.FIRED
    alive = [r for r in scheduling.made(second) if runs.directory(r).request_file.exists()]
    assert alive == [ended.run], "one due time, and not one run"

    run = runs.over(fired.run)
    assert run.info.status == "FINISHED", runs.log(fired.run)
    assert run.data.tags[SCHEDULE] == "weekly"
    due = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(fired.due))
    assert run.data.tags[DUE].startswith(due)
    assert run.info.run_name == f"weekly {due.replace('T', ' ')}"
    assert run.data.params["alpha"] == "2"
