"""Several segments of a job are one run: what the controller notes, and what a worker publishes."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.engine.observer import JobEnd, JobExtras, Successor
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.tracking.controller.tracker import Tracker
from snakemake_executor_plugin_mantik.tracking.controller.worker_client import WorkerClient
from snakemake_executor_plugin_mantik.tracking.ledger import GOES_ON, JobRow, Ledger
from snakemake_executor_plugin_mantik.tracking.outbox import EventKind, Lane, RunRecord
from snakemake_executor_plugin_mantik.tracking.run import TAG_LENGTH, TrackedRun, TrackingTarget
from snakemake_executor_plugin_mantik.tracking.segments import segments_tag, workflow_figures
from snakemake_executor_plugin_mantik.tracking.store import store_directory
from snakemake_executor_plugin_mantik.tracking.worker.process import Worker
from snakemake_executor_plugin_mantik.tracking.worker.publishing import Publisher
from snakemake_executor_plugin_mantik.tracking.workflow import TrackedWorkflow
from tests.support.controller import request
from tests.tracking.test_replay import OVERLOADED, Killed, Mortal, each_death, empty

__all__ = ["empty"]

FIRST = TryRecord("t0", "hpc1", 0, "job", "train", "train", "f", TryState.PLANNED, segments=10)
SECOND = replace(FIRST, id="t1", segment=1, follows="t0", site_jobs=("7",), queue="batch")
THIRD = replace(FIRST, id="t2", segment=2, follows="t1", site_jobs=("8",))


class Controller:
    """A controller of a job with segments, without a worker."""

    subject = TrackedRun()

    def __init__(self, workdir: Path, uri: str = "", experiment: str = "") -> None:
        self.workdir = workdir
        self.said: list[str] = []
        target = TrackingTarget(uri, experiment=experiment)
        self.tracker = Tracker(
            workdir, target, {"hpc1": "text"}, mask=str, notify=self.said.append,
            workflow=TrackedWorkflow("Snakefile"),
        )  # fmt: skip
        self.tracker._worker.release()
        self.tracker.start(tracked=True, open_tries=[FIRST.id, SECOND.id, THIRD.id])
        self.outbox = self.tracker._box
        self.ledger = Ledger(self.outbox)

    def row(self, try_id: str) -> JobRow:
        found = self.ledger.job(try_id)
        assert found is not None
        return found

    def run(self, try_id: str) -> RunRecord:
        found = self.outbox.run(try_id)
        assert found is not None
        return found

    def prepare(self, record: TryRecord, *, waits: bool = False) -> JobExtras:
        job = replace(request(0), job=record.job, name=record.name, subject=self.subject)

        async def act() -> JobExtras | None:
            return await self.tracker.prepare(job, record, "/scratch", waits=waits)

        added = asyncio.run(act())
        assert added is not None, self.said
        return added

    def goes_on(self, record: TryRecord, ran: float = 60.0, **values: Any) -> None:
        self.ended(record, "next segment", ran=ran, cpu=ran / 2, **values)

    def ended(self, record: TryRecord, successor: Successor = "", **values: Any) -> None:
        how = values.pop("how", "killed")

        async def act() -> None:
            self.tracker.ended(record, JobEnd(how, "words", successor=successor, **values))

        asyncio.run(act())

    def ends(self) -> dict[str, tuple[str, bool]]:
        """The status that the end of each try is to give the run, and whether it is published."""
        rows = self.outbox.db.execute("SELECT try, data, done FROM events WHERE kind = 'end'")
        return {
            row["try"]: (json.loads(row["data"]).get("status", ""), row["done"] is not None)
            for row in rows
            if row["try"].startswith("t")
        }


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(WorkerClient, "wake", lambda _: None)
    made = Controller(tmp_path)
    yield made
    made.outbox.close()


def test_they_share_the_id_and_wait_unseen(controller: Controller) -> None:
    given = controller.prepare(FIRST)
    ahead = controller.prepare(SECOND, waits=True)
    assert ahead.variables["MLFLOW_RUN_ID"] == given.variables["MLFLOW_RUN_ID"]
    assert ahead.directory != given.directory
    controller.tracker.submitted(SECOND, "7", "batch")
    assert not controller.outbox.events(SECOND.id)
    figures = workflow_figures(controller.ledger.jobs(controller.row("t0").workflow))
    assert figures["mantik/jobs_queued"] == 1

    # MLflow's id comes late.
    controller.outbox.made(FIRST.id, "uri", "run", "1", "Default")
    assert controller.run(SECOND.id).run_id == "run"

    controller.goes_on(FIRST)
    assert controller.prepare(SECOND) == ahead
    [event] = controller.outbox.events(SECOND.id)
    assert (event.kind, event.data) == (EventKind.SUBMITTED, {"job": "7", "queue": "batch"})
    controller.ended(SECOND, how="finished", exit_code=0, ran=30.0, cpu=1.0, waited=70.0, ended=1e9)
    assert controller.ends() == {"t0": ("", False), "t1": ("FINISHED", False)}
    end = controller.outbox.end_of("t1")
    assert end["metrics"]["mantik/running_seconds"] == 90
    assert end["metrics"]["mantik/cpu_seconds"] == 31
    figures = workflow_figures(controller.ledger.jobs(controller.row("t0").workflow))
    assert (figures["mantik/jobs_finished"], figures["mantik/cpu_seconds"]) == (1, 31)


def test_time_in_the_queue_begins_with_the_end_of_the_one_before(controller: Controller) -> None:
    controller.prepare(FIRST)
    controller.goes_on(FIRST, waited=5.0, ended=1000.0)
    controller.prepare(SECOND)
    controller.ended(SECOND, waited=900.0, ran=100.0, ended=1110.0)
    assert controller.outbox.end_of("t1")["metrics"]["mantik/queued_seconds"] == 15


def test_what_is_not_needed_ends_no_run(controller: Controller) -> None:
    controller.prepare(FIRST)
    controller.prepare(SECOND, waits=True)
    controller.prepare(THIRD, waits=True)
    controller.ended(THIRD)
    controller.goes_on(FIRST)
    controller.prepare(SECOND)
    # Its place is taken by another try, which is the same segment.
    controller.ended(SECOND, "same segment")
    assert "metrics" not in controller.outbox.end_of("t1")
    other = replace(SECOND, id="t3")
    controller.prepare(other)
    assert controller.row("t3").attempt == 1
    controller.ended(other, how="failed", ran=2.0)
    assert controller.ends() == {
        "t0": ("", False), "t1": ("", False), "t2": ("", True), "t3": ("FAILED", False),
    }  # fmt: skip
    assert controller.outbox.end_of("t3")["metrics"]["mantik/running_seconds"] == 62
    # The next try of the job follows the same segment, in a run of its own.
    again = replace(SECOND, id="t4")
    controller.prepare(again)
    run = controller.run("t4")
    assert (run.head, run.data["retry_of"], run.data["tags"]["mantik.attempt"]) == ("", "t3", "2")


def test_a_job_that_does_not_go_on_after_all(controller: Controller) -> None:
    controller.prepare(FIRST)
    controller.goes_on(FIRST)
    controller.prepare(replace(FIRST, id="t5"))  # it is forced
    assert controller.ends() == {"t0": ("KILLED", False)}
    controller.goes_on(replace(FIRST, id="t5"))
    controller.tracker.end("failed")
    assert controller.ends()["t5"] == ("FAILED", False)


def test_an_end_is_published_once_although_the_job_does_not_go_on(controller: Controller) -> None:
    outbox = controller.outbox
    for number, published in enumerate((False, True)):
        record = replace(FIRST, id=f"t{number}", job=f"job {number}")
        controller.prepare(record)
        controller.goes_on(record, ended=1000.0)
        [end] = [e for e in outbox.events(record.id) if e.kind is EventKind.END]
        outbox.begin(end)
        if published:
            outbox.done(end)
        controller.prepare(replace(record, id=f"t{number + 5}"))
        [again] = [e for e in outbox.events(record.id) if e.kind is EventKind.END]
        assert (again.data["status"], again.data["time"]) == ("KILLED", 1000.0)
        assert (again.attempts, "metrics" in again.data) == (1, not published)


def test_a_segment_that_is_submitted_again_leaves_no_files(controller: Controller) -> None:
    controller.prepare(FIRST)
    controller.goes_on(FIRST)
    controller.prepare(SECOND)
    controller.ended(SECOND, "same segment")
    folders: list[str] = []

    class Client:
        def log_artifacts(self, _: str, __: str, folder: str) -> None:
            folders.append(folder)

    publisher = Publisher(controller.outbox, controller.workdir, print, print, {})
    for each in (FIRST, SECOND):
        data = controller.outbox.end_of(each.id)
        publisher._files(cast("MlflowClient", Client()), controller.run(each.id), data)
    assert folders == ["mantik/segment-1"]


def test_a_controller_that_died_between_two_segments(controller: Controller) -> None:
    controller.prepare(FIRST)
    controller.prepare(SECOND, waits=True)
    controller.prepare(THIRD, waits=True)
    controller.goes_on(FIRST)

    def started(*open_tries: str) -> Controller:
        other = Controller(controller.workdir)
        other.tracker._workflow = TrackedWorkflow("other.smk")
        other.tracker.start(tracked=False, open_tries=open_tries)
        return other

    # The next segment may run there.
    assert started("t1", "t2").ends() == {"t0": ("", False)}
    assert started("other").ends() == {
        "t0": ("KILLED", False), "t1": ("", True), "t2": ("", True),
    }  # fmt: skip


def test_an_end_that_could_not_be_written(controller: Controller) -> None:
    controller.prepare(FIRST)
    controller.prepare(SECOND)
    assert controller.ends() == {"t0": ("", False)}


def test_ends_of_which_none_was_written(controller: Controller) -> None:
    """Two segments ended while another controller did not track."""
    controller.prepare(FIRST)
    controller.prepare(SECOND, waits=True)
    controller.prepare(THIRD, waits=True)
    controller.prepare(THIRD)
    controller.ended(THIRD, how="finished", exit_code=0)
    assert controller.ends() == {"t0": ("", False), "t1": ("", False), "t2": ("FINISHED", False)}
    ends = controller.outbox.db.execute("SELECT try FROM events WHERE kind = 'end' ORDER BY seq")
    assert [row["try"] for row in ends] == ["t0", "t1", "t2"]
    assert [controller.row(each).state for each in ("t0", "t1")] == [GOES_ON, GOES_ON]
    assert not controller.row("t1").behind


def test_a_list_that_is_too_long_for_a_tag_has_its_end() -> None:
    entry = {"try_id": "t" * 36, "job": "7", "nodes": "n", "started": 1.0, "ended": 2.0,
             "ran": 1.0, "end": "x" * 200}  # fmt: skip
    tag = segments_tag([entry | {"segment": number} for number in range(1, 101)])
    assert len(tag) <= TAG_LENGTH
    listed = [each["segment"] for each in json.loads(tag)]
    assert listed[-1] == 100
    assert listed == list(range(listed[0], 101))


SEGMENTS = (FIRST, SECOND)


class Directory:
    """Two segments that have ended, each with a store, while nothing was published."""

    def __init__(self, path: Path, empty: Path) -> None:
        path.mkdir()
        shutil.copyfile(empty, path / "runs.db")
        self.path, self.uri = path, f"sqlite:///{path}/runs.db"
        self.client = MlflowClient(tracking_uri=self.uri)
        self.experiment = self.client.create_experiment("digits", (path / "a").as_uri())
        controller = Controller(path, self.uri, "digits")
        self.outbox, self.said = controller.outbox, controller.said
        for record in SEGMENTS:
            extras = controller.prepare(record, waits=record is not FIRST)
            extras.lay_out(path / store_directory(record.id))
            self.log(record.segment, path / store_directory(record.id), extras)
        for record in SEGMENTS:
            controller.prepare(record)
            controller.tracker._note(record, EventKind.LIVE, {})
            if record is SECOND:
                controller.ended(record, how="finished", exit_code=0, ran=60.0, cpu=30.0)
            else:
                controller.goes_on(record)

    def log(self, segment: int, store: Path, extras: JobExtras) -> None:
        """Three steps, of which the next segment does the last one again."""
        run = store / extras.variables["MLFLOW_EXPERIMENT_ID"] / extras.variables["MLFLOW_RUN_ID"]
        now = 1000 * segment
        steps = range(2 * segment, 2 * segment + 3)
        lines = {
            "loss": [f"{now + step} {segment}.5 {step}" for step in steps],
            "accuracy": [f"{now} 0.{segment} 0"],
            "system/load": [f"{now + n} {n} {n}" for n in range(2)],
        }
        for key, values in lines.items():
            path = run / "metrics" / key
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in values))
        (run / "artifacts" / f"file-{segment}").write_text("x")

    def publish(self, client: Any, *lanes: Lane) -> None:
        """What one worker does; what it knows dies with it."""
        worker = Publisher(self.outbox, self.path, lambda _: None, self.said.append, {})
        worker._clients[self.uri] = client
        for lane in lanes or Lane:
            for each in reversed(self.outbox.open_tries(lane)):
                worker.notify(each, lane)

    def run(self) -> Run:
        found = self.client.search_runs([self.experiment], "tags.`mantik.rule` = 'train'")
        assert len(found) == 1
        return found[0]

    def history(self, key: str) -> list[tuple[int, float]]:
        found = self.client.get_metric_history(self.run().info.run_id, key)
        return sorted((m.step, m.value) for m in found)

    def check(self) -> None:
        run = self.run()
        assert run.info.status == "FINISHED"
        values = [0.5, 0.5, 0.5, 1.5, 1.5]
        assert self.history("loss") == list(enumerate(values))
        assert self.history("accuracy") == [(0, 0.0), (0, 0.1)]
        assert run.data.metrics["accuracy"] == 0.1
        assert self.history("system/load") == [(n, n % 2) for n in range(4)]
        assert self.history("mantik/cpu_seconds") == [(0, 30), (1, 60)]
        names = {a.path for a in self.client.list_artifacts(run.info.run_id)}
        assert names == {"file-0", "file-1", "mantik"}
        listed = json.loads(run.data.tags["mantik.segments"])
        assert [each["try"] for each in listed] == ["t0", "t1"]
        assert self.outbox.pending() == 0
        assert self.said == []


@each_death
def test_each_step_is_published_once_whoever_dies(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The newest segment is tried first: it waits for the others."""
    monkeypatch.setattr(WorkerClient, "wake", lambda _: None)
    died, alive = 0, False
    while not alive:
        each = Directory(tmp_path / str(died), empty)
        client, alive = Mortal(each.client, died + 1, (Killed(), OVERLOADED)[died % 2]), True
        for _ in range(3):  # the second segment is published after the first
            try:
                each.publish(client if alive else each.client)
            except (Killed, MlflowException):
                died, alive = died + step, False
        each.check()
        each.outbox.close()
    assert died > 12


class Bell(threading.Event):
    """Notes the waits of a lane, and ends its work at the third round."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker, self.rounds, self.waits = worker, 0, list[float | None]()

    def clear(self) -> None:
        self.rounds += 1
        if self.rounds == 3:
            self.worker.finish()
        super().clear()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return True


def test_a_worker_pauses_before_it_tries_an_early_segment_again(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerClient, "wake", lambda _: None)
    directory = Directory(tmp_path / "w", empty)
    directory.publish(directory.client, Lane.MAKING, Lane.STATES)
    directory.outbox.execute("DELETE FROM events WHERE try = 't0'", ())
    directory.outbox._insert(directory.outbox.db, "t0", EventKind.CREATE, {}, done=True)
    worker = Worker(directory.path, lambda _: None)
    bell = Bell(worker)
    worker._wake[Lane.ENDING] = bell
    worker._over[Lane.STATES].set()
    worker.work(Lane.ENDING)
    assert bell.waits == [1.0, 2.0, 4.0]
    assert directory.outbox.open_tries(Lane.ENDING) == ["t1"]
    worker.close()
    directory.outbox.close()
