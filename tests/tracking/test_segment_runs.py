"""Several segments of a job are one run: what the controller notes, and what is published."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.engine.observer import JobExtras, Successor
from snakemake_executor_plugin_mantik.jobs.pools import Allocation
from snakemake_executor_plugin_mantik.journal import GOES_ON, AttemptRecord, TrackedAttempt
from snakemake_executor_plugin_mantik.tracking.cursor import open_log
from snakemake_executor_plugin_mantik.tracking.run import (
    TAG_LENGTH,
    TrackedRun,
    TrackedWorkflow,
    TrackingTarget,
)
from snakemake_executor_plugin_mantik.tracking.segments import (
    end_figures,
    segments_tag,
    workflow_figures,
)
from snakemake_executor_plugin_mantik.tracking.store import store_directory
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker
from snakemake_executor_plugin_mantik.tracking.worker_client import WorkerClient
from tests.support.controller import request
from tests.tracking.test_replay import each_death, killed_at_each_act
from tests.tracking.written import Written

WORKFLOW = TrackedWorkflow("Snakefile")


class Controller(Written):
    """A controller of a job with segments, without a worker."""

    subject = TrackedRun()

    def __init__(self, directory: Path, uri: str = "", experiment: str = "") -> None:
        super().__init__(directory, uri, experiment)
        self.target = TrackingTarget(uri, experiment=experiment)
        self.tracker = self.start()

    def start(self, workflow: TrackedWorkflow = WORKFLOW) -> Tracker:
        made = Tracker(
            self.directory, self.journal, self.target, {"hpc1": "text"}, mask=str,
            notify=self.said.append, workflow=workflow,
        )  # fmt: skip
        made._worker.release()
        made.start(tracked=True)
        return made

    def segment(
        self, number: int = 0, follows: str = "", *, job: str = "job", sent: bool = True
    ) -> AttemptRecord:
        made = self.journal.new_attempt(
            site="hpc1", job=job, rule="train", name="train", fingerprint="f", segment=number,
            segments=10, follows=follows,
        )  # fmt: skip
        if sent:
            self.journal.submitting(made.id, "batch")
            self.journal.submitted(made.id, str(number))
        [made] = self.journal.attempts([made.id])
        return made

    def segments(self, number: int) -> list[AttemptRecord]:
        """A segment, and those that wait for the end of the one before."""
        found: list[AttemptRecord] = []
        for each in range(number):
            found.append(self.segment(each, found[-1].id if found else ""))
            self.prepare(found[-1], waits=each > 0)
        return found

    def prepare(self, record: AttemptRecord, *, waits: bool = False) -> JobExtras:
        job = replace(request(0), job=record.job, name=record.name, subject=self.subject)
        added = asyncio.run(self.tracker.prepare(job, record, "/scratch", waits=waits))
        assert added is not None, self.said
        return added

    def row(self, record: AttemptRecord) -> TrackedAttempt:
        found = self.journal.tracked.get(record.id)
        assert found is not None
        return found

    def goes_on(self, record: AttemptRecord, ran: float = 60.0, **values: Any) -> None:
        self.ended(record, "next segment", ran=ran, cpu=ran / 2, **values)

    def ended(self, record: AttemptRecord, successor: Successor = "", **values: Any) -> None:
        how = values.pop("how", "killed")
        self.end(record, how, words="words", successor=successor, **values)

    def ends(self, *records: AttemptRecord) -> list[str]:
        """The status that the end of each attempt gives its run; - of one that only waited."""
        rows = [self.row(record) for record in records]
        return ["-" if row.behind else row.status for row in rows]

    def used(self, record: AttemptRecord) -> dict[str, float]:
        """The metrics that come with the end of an attempt."""
        with open_log(self.directory) as log:
            run, end = log.run(record.id), log.end(record.id)
            assert run is not None
            assert end is not None
            attempts = log.attempts(run.head)
            before = [each.id for each in attempts].index(run.id)
            return end_figures(log, attempts[: before + 1], end)[0]

    def figures(self) -> dict[str, float]:
        [key] = {row["workflow"] for row in self.journal.db.execute("SELECT * FROM tracked")}
        with open_log(self.directory) as log:
            return workflow_figures(log.jobs(key))


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(WorkerClient, "wake", lambda _: None)
    made = Controller(tmp_path)
    yield made
    made.journal.close()


def test_the_idle_core_hours_of_pools_are_figures() -> None:
    had = Allocation("a", "hpc1", "small", "7", 48, 0.0, seconds=3600, used=36 * 3600)
    found = workflow_figures([], [had, replace(had, tag="b", used=0)])
    assert found["mantik/pool_core_hours_used"] == 36.0
    assert found["mantik/pool_core_hours_idle"] == 60.0
    assert "mantik/pool_core_hours_idle" not in workflow_figures([])


def test_they_share_the_id_and_wait_unseen(controller: Controller) -> None:
    first = controller.segment()
    given = controller.prepare(first)
    second = controller.segment(1, first.id)
    ahead = controller.prepare(second, waits=True)
    assert ahead.variables["MLFLOW_RUN_ID"] == given.variables["MLFLOW_RUN_ID"]
    assert ahead.directory != given.directory
    assert controller.left == 2, "the workflow and the first"
    assert controller.figures()["mantik/jobs_queued"] == 1

    controller.goes_on(first)
    assert controller.prepare(second) == ahead
    assert controller.left == 3
    controller.ended(second, how="finished", exit_code=0, ran=30.0, cpu=1.0, waited=70.0, ended=1e9)
    assert controller.ends(first, second) == [GOES_ON, "FINISHED"]
    metrics = controller.used(second)
    assert (metrics["mantik/running_seconds"], metrics["mantik/cpu_seconds"]) == (90, 31)
    figures = controller.figures()
    assert (figures["mantik/jobs_finished"], figures["mantik/cpu_seconds"]) == (1, 31)


def test_time_in_the_queue_begins_with_the_end_of_the_one_before(controller: Controller) -> None:
    first, second = controller.segments(2)
    controller.goes_on(first, waited=5.0, ended=1000.0)
    controller.prepare(second)
    controller.ended(second, waited=900.0, ran=100.0, ended=1110.0)
    assert controller.used(second)["mantik/queued_seconds"] == 15


def test_what_is_not_needed_ends_no_run(controller: Controller) -> None:
    first, second, third = controller.segments(3)
    controller.ended(third)
    controller.goes_on(first)
    controller.prepare(second)
    # Its place is taken by another attempt, which is the same segment.
    controller.ended(second, "same segment")
    assert controller.used(second) == {}
    other = controller.segment(1, first.id)
    controller.prepare(other)
    assert controller.row(other).number == 1
    controller.ended(other, how="failed", ran=2.0)
    assert controller.ends(first, second, third, other) == [GOES_ON, GOES_ON, "-", "FAILED"]
    assert controller.used(other)["mantik/running_seconds"] == 62
    # The next attempt of the job follows the same segment, in a run of its own.
    again = controller.segment(1, first.id)
    controller.prepare(again)
    data = controller.row(again).data
    assert "head" not in data
    assert (data["retry_of"], data["tags"]["mantik.attempt"]) == (other.id, "2")


def test_a_job_that_does_not_go_on_after_all(controller: Controller) -> None:
    [first] = controller.segments(1)
    controller.goes_on(first)
    forced = controller.segment()
    controller.prepare(forced)
    assert controller.ends(first) == ["KILLED"]
    controller.goes_on(forced)
    controller.journal.end_run("failed", {})
    assert controller.ends(forced) == ["FAILED"]


def test_a_controller_that_died_between_two_segments(controller: Controller) -> None:
    first, second, third = controller.segments(3)
    controller.goes_on(first)

    controller.start(TrackedWorkflow("other.smk"))
    assert controller.ends(first) == [GOES_ON], "the next segment may run there"
    for each in (second, third):
        controller.journal.abandoned(each.id, "cancelled")
    controller.start(TrackedWorkflow("other.smk"))
    assert controller.ends(first, second, third) == ["KILLED", "-", "-"]


def test_segments_that_ended_while_nobody_tracked_them(controller: Controller) -> None:
    first, second, third = controller.segments(3)
    controller.goes_on(first)
    controller.goes_on(second)
    controller.prepare(third)
    controller.ended(third, how="finished", exit_code=0)
    assert controller.ends(first, second, third) == [GOES_ON, GOES_ON, "FINISHED"]
    with open_log(controller.directory) as log:
        assert [each.id for each in log.attempts(first.id)] == [first.id, second.id, third.id]


def test_a_list_that_is_too_long_for_a_tag_has_its_end() -> None:
    entry = {"attempt": "t" * 36, "job": "7", "nodes": "n", "started": 1.0, "ended": 2.0,
             "ran": 1.0, "end": "x" * 200}  # fmt: skip
    tag = segments_tag([entry | {"segment": number} for number in range(1, 101)])
    assert len(tag) <= TAG_LENGTH
    listed = [each["segment"] for each in json.loads(tag)]
    assert listed[-1] == 100
    assert listed == list(range(listed[0], 101))


class Directory(Controller):
    """Two segments that have ended, each with a store, while nothing was published."""

    def __init__(self, path: Path, empty_store: Path) -> None:
        path.mkdir()
        shutil.copyfile(empty_store, path / "runs.db")
        self.client = MlflowClient(tracking_uri=f"sqlite:///{path}/runs.db")
        self.id = self.client.create_experiment("digits", (path / "a").as_uri())
        super().__init__(path, f"sqlite:///{path}/runs.db", "digits")
        self.write()
        self.journal.end_run("finished", {})

    def write(self) -> None:
        first = self.segment()
        second = self.segment(1, first.id)
        for record in (first, second):
            self.log(record.segment, record, self.prepare(record, waits=record is second))
        self.goes_on(first, ended=1000.9)
        self.prepare(second)
        # The site's clock was known to the second only.
        self.ended(second, how="finished", exit_code=0, ran=60.0, cpu=30.0, ended=1000.2)
        self.attempts = [first.id, second.id]

    def log(self, number: int, record: AttemptRecord, extras: JobExtras) -> None:
        """Three steps, of which the next segment does the last one again."""
        store = self.directory / store_directory(record.id)
        extras.lay_out(store)
        run = store / extras.variables["MLFLOW_EXPERIMENT_ID"] / extras.variables["MLFLOW_RUN_ID"]
        now = 1000 * number
        steps = range(2 * number, 2 * number + 3)
        lines = {
            "loss": [f"{now + step} {number}.5 {step}" for step in steps],
            "accuracy": [f"{now} 0.{number} 0"],
            "system/load": [f"{now + n} {n} {n}" for n in range(2)],
        }
        for key, values in lines.items():
            path = run / "metrics" / key
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in values))
        (run / "artifacts" / f"file-{number}").write_text("x")

    def run(self) -> Run:
        found = self.client.search_runs([self.id], "tags.`mantik.rule` = 'train'")
        assert len(found) == 1
        return found[0]

    def history(self, key: str) -> list[tuple[int, float]]:
        found = self.client.get_metric_history(self.run().info.run_id, key)
        return sorted((m.step, m.value) for m in found)

    def check(self) -> None:
        run = self.run()
        assert run.info.status == "FINISHED"
        assert self.history("loss") == list(enumerate([0.5, 0.5, 0.5, 1.5, 1.5]))
        assert self.history("accuracy") == [(0, 0.0), (0, 0.1)]
        assert run.data.metrics["accuracy"] == 0.1
        assert self.history("system/load") == [(n, n % 2) for n in range(4)]
        used = self.client.get_metric_history(run.info.run_id, "mantik/cpu_seconds")
        assert [(metric.step, metric.value) for metric in used] == [(0, 30), (1, 60)]
        names = {a.path for a in self.client.list_artifacts(run.info.run_id)}
        assert names == {"file-0", "file-1", "mantik"}
        listed = json.loads(run.data.tags["mantik.segments"])
        assert [each["attempt"] for each in listed] == self.attempts
        assert self.left == 0
        assert self.said == []


@each_death
def test_each_step_is_published_once_whoever_dies(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(WorkerClient, "wake", lambda _: None)
    assert killed_at_each_act(lambda path: Directory(path, empty_store), tmp_path, step) > 12


@pytest.mark.parametrize("published", [False, True])
def test_an_end_is_published_once_although_the_job_does_not_go_on(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    monkeypatch.setattr(WorkerClient, "wake", lambda _: None)
    monkeypatch.setattr(Directory, "write", lambda _: None)
    each = Directory(tmp_path / "w", empty_store)
    each.tracker = each.start()
    [first] = each.segments(1)
    each.goes_on(first, ended=1000.0)
    if published:
        each.publish(each.client)
    each.journal.tracked.begin_anew(each.segment())
    each.publish(each.client)
    run = each.run()
    assert (run.info.status, run.info.end_time) == ("KILLED", 1_000_000)
    assert each.history("mantik/running_seconds") == [(0, 60)]
    assert "began anew" in run.data.tags["mantik.reason"]
    each.journal.close()
