"""What is told of a job and its workflow, whoever dies in between: each thing once, and true."""

import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, PERMISSION_DENIED
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik import views
from snakemake_executor_plugin_mantik.tracking.ledger import Ledger
from snakemake_executor_plugin_mantik.tracking.outbox import EventKind, Lane, Outbox
from snakemake_executor_plugin_mantik.tracking.run import TAG_LENGTH, WAITING_REASON
from snakemake_executor_plugin_mantik.tracking.store import DIRECTORY, try_directory
from snakemake_executor_plugin_mantik.tracking.worker.process import OUTBOX
from snakemake_executor_plugin_mantik.tracking.worker.publishing import RETRY_OF, Publisher
from snakemake_executor_plugin_mantik.tracking.workflow import (
    ARTIFACT_FOLDER,
    PARENT_RUN_TAG,
    WORKFLOW,
)
from tests.tracking.test_replay import OVERLOADED, Killed, Mortal, each_death, empty

__all__ = ["empty"]

FAILED, TRIED_AGAIN, WHOLE = "first", "second", "whole"
DATA: dict[str, Any] = {"experiment_id": "", "experiment": "Default", "config": "config.yaml"}
END = {"time": 2000.0, "words": "", "exit_code": 0, "log": "", "metrics": {"mantik/n": 1.0}}


class Directory:
    """A workflow's directory with what is to be told of two tries of a job; and where it is told.

    Each teller is a worker of its own: what it knows dies with it.
    """

    def __init__(self, path: Path, empty: Path) -> None:
        self.path = path
        (path / DIRECTORY).mkdir(parents=True)
        shutil.copyfile(empty, path / "runs.db")
        self.uri = f"sqlite:///{path}/runs.db"
        self.client = MlflowClient(tracking_uri=self.uri)
        artifacts = (path / "artifacts").as_uri()
        self.experiment = self.client.create_experiment("digits", artifacts)
        self.said: list[str] = []
        (path / "config.yaml").write_text("Resources: {}\n")
        self.outbox = Outbox(path / DIRECTORY / OUTBOX)
        self.note()

    def note(self) -> None:
        """What the controller writes down."""
        data = {**DATA, "experiment": "digits"}
        files = self.path / try_directory(WHOLE) / ARTIFACT_FOLDER
        files.mkdir(parents=True)
        (files / "Snakefile").write_text("rule all:\n")
        tags = {WORKFLOW: WHOLE}
        self.outbox.add_run(
            WHOLE, self.uri,
            {**data, "name": "churn", "workflow": True, "tags": tags, "params": {"depth": "3"}},
        )  # fmt: skip
        ledger = Ledger(self.outbox)
        ledger.begin(WHOLE, "identity")
        for name, before in ((FAILED, ""), (TRIED_AGAIN, FAILED)):
            ledger.add(name, WHOLE, job="train", rule="train", name=name, site="hpc1")
            own = {
                "name": name, "tags": {"mantik.try": name}, "params": {"alpha": "1"},
                "parent": WHOLE, "retry_of": before,
            }  # fmt: skip
            if before:  # it is a group
                tags, params = {"mantik.rule": "test"}, {"beta": "2"}
                own["members"] = {"1": {"name": "member", "tags": tags, "params": params}}
            self.outbox.add_run(name, self.uri, data | own)
            self.outbox.add(name, EventKind.SUBMITTED, {"job": f"job of {name}", "queue": "batch"})
            self.outbox.add(name, EventKind.STARTED, {})
            status = "FINISHED" if before else "FAILED"
            ledger.ended(name, status, ran=10.0, note="x")
            self.outbox.add(name, EventKind.END, END | {"status": status})
        self.outbox.add(WHOLE, EventKind.END, {"status": "FINISHED", "time": 2000.0, "words": ""})

    def notify(self, client: Any) -> None:
        """All of it, by one worker."""
        teller = Publisher(self.outbox, self.path, lambda _: None, self.said.append, {})
        teller._clients[self.uri] = client
        for lane in Lane:
            for each in self.outbox.open_tries(lane):
                teller.notify(each, lane)

    def runs(self) -> dict[str, Run]:
        found = self.client.search_runs([self.experiment])
        assert len(found) == 4, [run.info.run_name for run in found]
        return {run.info.run_name: run for run in found}

    def check(self) -> None:
        """MLflow knows all of it, each thing once."""
        runs = self.runs()
        states = {name: run.info.status for name, run in runs.items()}
        assert states == {
            "churn": "FINISHED", FAILED: "FAILED", TRIED_AGAIN: "FINISHED", "member": "FINISHED",
        }  # fmt: skip
        assert runs["member"].data.params == {"beta": "2"}
        parent = runs["member"].data.tags[PARENT_RUN_TAG]
        assert parent == runs[TRIED_AGAIN].info.run_id
        whole, first, second = (runs[name] for name in ("churn", FAILED, TRIED_AGAIN))
        assert {run.data.tags[PARENT_RUN_TAG] for run in (first, second)} == {whole.info.run_id}
        assert second.data.tags[RETRY_OF] == first.info.run_id
        assert RETRY_OF not in first.data.tags
        assert second.data.tags["mantik.job_id"] == f"job of {TRIED_AGAIN}"
        assert (second.data.params, whole.data.params) == ({"alpha": "1"}, {"depth": "3"})
        assert second.info.end_time == 2_000_000
        (point,) = self.client.get_metric_history(second.info.run_id, "mantik/n")
        assert point.value == 1
        assert whole.data.metrics["mantik/jobs_finished"] == 1
        names = {a.path for a in self.client.list_artifacts(whole.info.run_id, ARTIFACT_FOLDER)}
        assert names == {
            "mantik/Snakefile", "mantik/pipeline.html", "mantik/timeline.html",
        }  # fmt: skip
        assert self.outbox.pending() == 0
        assert self.said == []


@pytest.fixture
def directory(tmp_path: Path, empty: Path) -> Iterator[Directory]:
    made = Directory(tmp_path / "w", empty)
    yield made
    made.outbox.close()


@each_death
def test_killed_anywhere(tmp_path: Path, empty: Path, step: int) -> None:
    died, alive = 0, False
    while not alive:
        each = Directory(tmp_path / str(died), empty)
        # Dead before the act, or after it; or the server does not answer.
        try:
            each.notify(Mortal(each.client, died + 1, ENDS[died % len(ENDS)]))
            alive = True
        except (Killed, MlflowException):
            died += step
            each.notify(each.client)
        each.check()
        each.outbox.close()
    assert died > 15


ENDS = (Killed(), OVERLOADED)


class Slow:
    """MLflow's client, whose first run takes long enough for another one to be made twice."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client
        self.begun, self.again = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def create_run(self, *args: Any, **kwargs: Any) -> Run:
        if kwargs["run_name"] == FAILED:
            if self.begun.is_set():
                self.again.set()
            self.begun.set()
            self.again.wait(0.3)
        return self.client.create_run(*args, **kwargs)


def test_a_run_is_made_once_by_those_who_make_several(directory: Directory) -> None:
    making: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
    client = Slow(directory.client)

    def make(name: str) -> None:
        outbox = Outbox(directory.path / DIRECTORY / OUTBOX)
        teller = Publisher(
            outbox, directory.path, lambda _: None, directory.said.append, {}, making=making
        )
        teller._clients[directory.uri] = client
        teller.make(name)
        outbox.close()

    # Its tag names the run of the try before, which is made for that.
    again = threading.Thread(target=make, args=(TRIED_AGAIN,))
    again.start()
    assert client.begun.wait(600)
    make(FAILED)
    again.join(600)

    runs = directory.runs()
    assert set(runs) == {"churn", FAILED, TRIED_AGAIN, "member"}
    assert runs[TRIED_AGAIN].data.tags[RETRY_OF] == runs[FAILED].info.run_id


def test_no_long_tag_and_no_picture_holds_up_the_rest(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("no room for a box")

    monkeypatch.setattr(views, "render_files", broken)
    directory.outbox.add_run(
        "long", directory.uri,
        {**DATA, "experiment": "digits", "name": "n" * 999, "tags": {}, "params": {}},
    )  # fmt: skip
    directory.outbox.add("long", EventKind.SUBMITTED, {"job": "1", "queue": "q" * 9999})
    directory.outbox.add("long", EventKind.END, END | {"status": "FAILED", "words": "w" * 9999})

    directory.notify(directory.client)

    assert directory.outbox.pending() == 0
    assert "no room for a box" in capfd.readouterr().err
    (run,) = directory.client.search_runs([directory.experiment], "attributes.status = 'FAILED'"
                                          " AND tags.`mantik.queue` LIKE 'qq%'")  # fmt: skip
    assert run.data.tags["mantik.reason"] == "w" * TAG_LENGTH


def test_a_run_that_somebody_else_has_made(directory: Directory) -> None:
    client = directory.client
    made = [client.create_run(directory.experiment, run_name=n).info.run_id for n in ("a", "b")]
    client.delete_run(made[1])
    for name, run_id in zip(("taken", "deleted"), made, strict=True):
        data = {**DATA, "experiment": "digits", "name": name, "tags": {"x": "1"}, "params": {}}
        directory.outbox.add_run(name, directory.uri, data | {"run_id": run_id})
        directory.outbox.add(name, EventKind.END, END | {"status": "FINISHED"})

    directory.notify(client)

    names = {run.info.run_name for run in client.search_runs([directory.experiment])}
    assert names == {"churn", FAILED, TRIED_AGAIN, "a", "deleted", "member"}
    taken = client.get_run(made[0])
    assert (taken.info.status, taken.data.tags["x"]) == ("FINISHED", "1")


def test_a_run_that_is_deleted_meanwhile_holds_up_no_other(directory: Directory) -> None:
    teller = Publisher(directory.outbox, directory.path, lambda _: None, directory.said.append, {})
    teller.make(FAILED)
    run = directory.outbox.run(FAILED)
    assert run is not None
    directory.client.delete_run(run.run_id)

    for lane in Lane:
        for each in directory.outbox.open_tries(lane):
            teller.notify(each, lane)

    assert directory.outbox.pending() == 0
    assert any("refused" in line for line in directory.said), directory.said
    found = directory.client.search_runs([directory.experiment], "attributes.status = 'FINISHED'")
    assert {each.info.run_name for each in found} == {"churn", TRIED_AGAIN, "member"}
    assert not os.path.exists(directory.path / try_directory(FAILED))


class Refusing:
    """A client that may log no artifacts."""

    def __init__(self, client: MlflowClient, error: Exception) -> None:
        self._client = client
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def log_artifacts(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize("refused", [True, False])
def test_how_a_job_ended_is_told_without_its_files(directory: Directory, refused: bool) -> None:
    code = INVALID_PARAMETER_VALUE if refused else PERMISSION_DENIED
    error = MlflowException("no room for artifacts", code)
    teller = Publisher(directory.outbox, directory.path, lambda _: None, directory.said.append, {})
    teller._clients[directory.uri] = Refusing(directory.client, error)
    teller.make(FAILED)
    teller.notify(FAILED, Lane.STATES)

    with nullcontext() if refused else pytest.raises(MlflowException):
        teller.notify(FAILED, Lane.ENDING)

    (run,) = directory.client.search_runs(
        [directory.experiment], f"attributes.run_name = '{FAILED}'"
    )
    assert run.info.status == "FAILED"
    # It is told again, unless that is no use.
    assert (FAILED in directory.outbox.open_tries(Lane.ENDING)) is not refused
    assert len(directory.said) == refused


@pytest.mark.parametrize("asked_at_once", [False, True])
def test_why_a_job_cannot_start_is_a_tag_while_it_cannot(
    directory: Directory, asked_at_once: bool
) -> None:
    """Also where nobody told MLflow of it before it was over."""
    directory.outbox.add_run(
        "stuck", directory.uri,
        {**DATA, "experiment": "digits", "name": "stuck", "tags": {}, "params": {}},
    )  # fmt: skip

    def tags() -> dict[str, str]:
        directory.notify(directory.client)
        (run,) = directory.client.search_runs([directory.experiment], "run_name = 'stuck'")
        return dict(run.data.tags)

    for why in ("PartitionDown", "ReqNodeNotAvail"):
        directory.outbox.add("stuck", EventKind.WAITING, {"why": why})
        if not asked_at_once:
            assert tags()[WAITING_REASON] == why
    directory.outbox.add("stuck", EventKind.WAITING, {"why": ""})
    assert WAITING_REASON not in tags()
    assert directory.outbox.pending() == 0
    assert directory.said == []
