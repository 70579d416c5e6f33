"""What is told of a job and its workflow, whoever dies in between: each thing once, and true."""

import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, PERMISSION_DENIED
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.journal import AttemptRecord
from snakemake_executor_plugin_mantik.runs.store import RunStore
from snakemake_executor_plugin_mantik.tracking import process, publishing
from snakemake_executor_plugin_mantik.tracking.cursor import Log, LoggedRun, open_log
from snakemake_executor_plugin_mantik.tracking.process import Worker
from snakemake_executor_plugin_mantik.tracking.publishing import RETRY_OF
from snakemake_executor_plugin_mantik.tracking.run import (
    ARTIFACT_FOLDER,
    PARENT_RUN_TAG,
    TAG_LENGTH,
    WAITING_REASON,
    WORKFLOW,
)
from snakemake_executor_plugin_mantik.tracking.store import attempt_directory
from tests.support.ports import free_port
from tests.tracking.conftest import TrackingServer
from tests.tracking.test_replay import OVERLOADED, each_death, killed_at_each_act
from tests.tracking.written import Written

FAILED, TRIED_AGAIN = "first", "second"


class Directory(Written):
    """A workflow's directory with what is to be told of two attempts of a job."""

    def __init__(self, path: Path, empty_store: Path) -> None:
        path.mkdir()
        shutil.copyfile(empty_store, path / "runs.db")
        super().__init__(path, f"sqlite:///{path}/runs.db", "digits")
        self.client = MlflowClient(tracking_uri=self.uri)
        artifacts = (path / "artifacts").as_uri()
        self.experiment_id = self.client.create_experiment("digits", artifacts)
        (path / "config.yaml").write_text("Resources: {}\n")
        self.records: dict[str, AttemptRecord] = {}
        self.note()

    def note(self) -> None:
        """What the controller writes down."""
        files = self.directory / attempt_directory(self.key) / ARTIFACT_FOLDER
        files.mkdir(parents=True)
        (files / "Snakefile").write_text("rule all:\n")
        workflow = {"tags": {WORKFLOW: self.key}, "params": {"depth": "3"}}
        self.journal.tracked.describe(self.key, self.data("churn", **workflow))
        for name, before in ((FAILED, ""), (TRIED_AGAIN, FAILED)):
            record = self.records[name] = self.plan(name, job="train")
            own: dict[str, Any] = {"params": {"alpha": "1"}, "parent": self.key}
            if before:  # it is a group
                tags, params = {"mantik.rule": "test"}, {"beta": "2"}
                own["members"] = {"1": {"name": "member", "tags": tags, "params": params}}
                own["retry_of"] = self.records[before].id
            self.track(record, config="config.yaml", **own)
            self.journal.submitting(record.id, "batch")
            self.journal.submitted(record.id, f"job of {name}")
            self.journal.started(record.id, 1990.0)
            how, code = ("finished", 0) if before else ("failed", 4)
            self.end(record, how, exit_code=code, ran=10.0, ended=2000.0)
        self.journal.end_run("finished", {"jobs": [], "edges": [], "rule_edges": []})

    def runs(self) -> dict[str, Run]:
        found = self.client.search_runs([self.experiment_id])
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
        (point,) = self.client.get_metric_history(second.info.run_id, "mantik/running_seconds")
        assert point.value == 10
        assert whole.data.metrics["mantik/jobs_finished"] == 1
        names = {a.path for a in self.client.list_artifacts(whole.info.run_id, ARTIFACT_FOLDER)}
        assert names == {
            "mantik/Snakefile", "mantik/pipeline.html", "mantik/timeline.html",
        }  # fmt: skip
        assert self.left == 0
        assert self.said == []


@pytest.fixture
def directory(tmp_path: Path, empty_store: Path) -> Iterator[Directory]:
    made = Directory(tmp_path / "w", empty_store)
    yield made
    made.journal.close()


@each_death
def test_killed_anywhere(tmp_path: Path, empty_store: Path, step: int) -> None:
    assert killed_at_each_act(lambda path: Directory(path, empty_store), tmp_path, step) > 15


def test_a_run_is_made_once_by_those_who_make_several(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes long enough to be made twice."""
    publisher, create = directory.publisher(), directory.client.create_run
    begun, again_begun = threading.Event(), threading.Event()

    def create_run(*args: Any, **kwargs: Any) -> Run:
        if kwargs["run_name"] == FAILED:
            if begun.is_set():
                again_begun.set()
            begun.set()
            again_begun.wait(0.3)
        return create(*args, **kwargs)

    monkeypatch.setattr(directory.client, "create_run", create_run)

    def make(name: str) -> None:
        publisher._here.__dict__[directory.uri] = directory.client
        publisher.make(directory.records[name].id)

    # Its tag names the run of the attempt before, which is made for that.
    again = threading.Thread(target=make, args=(TRIED_AGAIN,))
    again.start()
    assert begun.wait(600)
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

    monkeypatch.setattr(publishing, "render_files", broken)
    long = directory.job("n" * 999)
    directory.journal.submitting(long.id, "q" * 9999)
    directory.journal.submitted(long.id, "1")
    directory.end(long, "failed", words="w" * 9999)

    directory.publish(directory.client)

    assert directory.left == 0
    assert "no room for a box" in capfd.readouterr().err
    (run,) = directory.client.search_runs([directory.experiment_id], "attributes.status = 'FAILED'"
                                          " AND tags.`mantik.queue` LIKE 'qq%'")  # fmt: skip
    assert run.data.tags["mantik.reason"] == "w" * TAG_LENGTH


def test_a_run_that_somebody_else_has_made(directory: Directory) -> None:
    client = directory.client
    made = [client.create_run(directory.experiment_id, run_name=n).info.run_id for n in ("a", "b")]
    client.delete_run(made[1])
    for name, run_id in zip(("taken", "deleted"), made, strict=True):
        directory.end(directory.job(name, tags={"x": "1"}, run_id=run_id))

    directory.publish(client)

    names = {run.info.run_name for run in client.search_runs([directory.experiment_id])}
    assert names == {"churn", FAILED, TRIED_AGAIN, "a", "deleted", "member"}
    taken = client.get_run(made[0])
    assert (taken.info.status, taken.data.tags["x"]) == ("FINISHED", "1")


def test_a_run_that_is_deleted_meanwhile_holds_up_no_other(directory: Directory) -> None:
    failed = directory.records[FAILED].id
    directory.publisher().make(failed)
    directory.client.delete_run(directory.published(failed).run_id)

    directory.publish()

    assert directory.left == 0
    assert any("refused" in line for line in directory.said), directory.said
    found = directory.client.search_runs(
        [directory.experiment_id], "attributes.status = 'FINISHED'"
    )
    assert {each.info.run_name for each in found} == {"churn", TRIED_AGAIN, "member"}
    assert not os.path.exists(directory.directory / attempt_directory(failed))


@pytest.mark.parametrize("refused", [True, False])
def test_how_a_job_ended_is_told_without_its_files(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    code = INVALID_PARAMETER_VALUE if refused else PERMISSION_DENIED
    error = MlflowException("no room for artifacts", code)
    monkeypatch.setattr(directory.client, "log_artifacts", Mock(side_effect=error))
    failed = directory.records[FAILED].id
    publisher = directory.publisher(directory.client)
    publisher.make(directory.key)

    with nullcontext() if refused else pytest.raises(MlflowException):
        publisher.publish(failed)

    (run,) = directory.client.search_runs(
        [directory.experiment_id], f"attributes.run_name = '{FAILED}'"
    )
    assert run.info.status == "FAILED"
    # It is told again, unless that is no use.
    with open_log(directory.directory) as log:
        assert (failed in log.unpublished(publisher._cursor)) is not refused
    assert len(directory.said) == refused


@pytest.mark.parametrize("asked_at_once", [False, True])
def test_why_a_job_cannot_start_is_a_tag_while_it_cannot(
    directory: Directory, asked_at_once: bool
) -> None:
    """Also where nobody told MLflow of it before it was over."""
    stuck = directory.job("stuck")

    def tags() -> dict[str, str]:
        directory.publish(directory.client)
        (run,) = directory.client.search_runs([directory.experiment_id], "run_name = 'stuck'")
        return dict(run.data.tags)

    for why in ("PartitionDown", "ReqNodeNotAvail"):
        directory.journal.waiting(stuck.id, why)
        if not asked_at_once:
            assert tags()[WAITING_REASON] == why
    directory.journal.waiting(stuck.id, "")
    assert WAITING_REASON not in tags()
    assert directory.left == 0
    assert directory.said == []


def test_an_end_between_two_looks_at_the_log_is_published(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller writes it when its state has been read, and its events have not."""
    record = directory.track(directory.plan("late"))
    read = Log.run

    def run(log: Log, run_of: str) -> LoggedRun | None:
        found = read(log, run_of)
        if run_of == record.id:
            monkeypatch.undo()
            directory.end(record)
        return found

    monkeypatch.setattr(Log, "run", run)
    publisher = directory.publisher(directory.client)
    publisher.publish(record.id)
    publisher._cursor.close()
    directory.publish(directory.client)
    [late] = directory.client.search_runs([directory.experiment_id], "run_name = 'late'")
    assert (late.info.status, directory.left) == ("FINISHED", 0)


def test_a_tag_that_is_gone_already_holds_up_no_state(directory: Directory) -> None:
    """Removing it has no answer, or somebody else has removed it."""
    stuck = directory.job("stuck")
    directory.journal.waiting(stuck.id, "PartitionDown")
    client = Mock(wraps=directory.client)
    publisher = directory.publisher(client)
    publisher.publish(stuck.id)
    directory.journal.waiting(stuck.id, "")

    def delete_tag(*args: Any) -> None:
        directory.client.delete_tag(*args)
        raise OVERLOADED

    client.delete_tag = delete_tag
    with pytest.raises(MlflowException):
        publisher.publish(stuck.id)
    client.delete_tag = directory.client.delete_tag
    publisher.publish(stuck.id)
    directory.journal.waiting(stuck.id, "ReqNodeNotAvail")
    publisher.publish(stuck.id)
    run_id = publisher._cursor.run(stuck.id).run_id
    directory.client.delete_tag(run_id, WAITING_REASON)
    directory.end(stuck)
    publisher.publish(stuck.id)
    publisher._cursor.close()
    run = directory.client.get_run(run_id)
    assert (run.info.status, WAITING_REASON in run.data.tags) == ("FINISHED", False)
    assert directory.said == []


def test_a_group_that_was_settled_and_then_submitted_after_all(directory: Directory) -> None:
    journal = directory.journal
    directory.key = journal.tracked.begin("another")
    group = directory.job("group", members={"1": {"name": "one", "tags": {}, "params": {}}})
    journal.tracked.settle()

    def states() -> list[str]:
        directory.publish(directory.client)
        found = directory.client.search_runs([directory.experiment_id])
        return [run.info.status for run in found if run.info.run_name in {"group", "one"}]

    assert states() == ["KILLED", "KILLED"]
    journal.tracked.revive(group.id)
    assert states() == ["SCHEDULED", "SCHEDULED"]
    directory.end(group, words="it has finished")
    assert states() == ["FINISHED", "FINISHED"]
    run = directory.client.get_run(directory.published(group.id).run_id)
    assert run.data.tags["mantik.reason"] == "it has finished"


def test_the_files_of_a_job_that_was_settled_and_revived_stay(directory: Directory) -> None:
    directory.key = directory.journal.tracked.begin("another")
    job = directory.job("job")
    directory.journal.tracked.settle()
    directory.journal.tracked.revive(job.id)
    kept = directory.directory / attempt_directory(job.id)
    kept.mkdir()
    directory.publish(directory.client)
    assert kept.exists()
    directory.end(job)
    directory.publish(directory.client)
    assert not kept.exists()


def test_a_retry_that_joins_a_run_while_that_is_made(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, retry = directory.job("first one", one=True), directory.plan("first one")
    directory.end(first, "failed")
    publisher = directory.publisher(directory.client)
    make = publisher._make

    def slow(log: Log, run: LoggedRun) -> Any:
        made = make(log, run)
        directory.track(retry, head=first.id, one=True)
        return made

    monkeypatch.setattr(publisher, "_make", slow)
    publisher.publish(first.id)
    monkeypatch.undo()
    run_id = publisher._cursor.run(first.id).run_id
    assert directory.client.get_run(run_id).info.status == "FAILED"
    publisher.publish(retry.id)
    publisher._cursor.close()
    assert directory.client.get_run(run_id).info.status == "SCHEDULED"


def test_what_shares_a_run_is_found_without_reading_all_jobs(directory: Directory) -> None:
    asked: list[str] = []
    with open_log(directory.directory) as log:
        log.db.set_trace_callback(asked.append)
        assert log.sharing(directory.records[FAILED].id) == [directory.records[FAILED].id]
        log.db.set_trace_callback(None)
        plans = [
            row["detail"] for sql in asked for row in log.db.execute(f"EXPLAIN QUERY PLAN {sql}")
        ]
    assert plans
    assert not [plan for plan in plans if plan.startswith("SCAN")]


# Runs that went where nothing can be told any more: the others are told all the same.


def ended(written: Written, name: str, uri: str, experiment: str) -> str:
    """A run that has ended, and of which nothing is told."""
    record = written.job(name, uri=uri, experiment=experiment)
    written.end(record)
    return record.id


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    for name, value in process.SETTINGS.items():
        monkeypatch.setenv(name, value)
    made = Written(tmp_path, "")
    yield made
    made.journal.close()


def work(workdir: Path) -> list[Mapping[str, Any]]:
    answers: list[Mapping[str, Any]] = []
    made = Worker(workdir, answers.append)
    made.finish()
    made.work()
    made.close()
    return answers


def test_a_dead_server_and_a_deleted_experiment_hold_up_nothing(
    tmp_path: Path, written: Written, tracking_server: TrackingServer
) -> None:
    client = MlflowClient(tracking_uri=tracking_server.uri)
    deleted, alive = f"{tmp_path} deleted", f"{tmp_path} alive"
    client.delete_experiment(client.create_experiment(deleted))
    dead = f"http://127.0.0.1:{free_port()}"
    for number in range(3):
        ended(written, f"dead{number}", dead, alive)
        ended(written, f"deleted{number}", tracking_server.uri, deleted)
    living = {ended(written, f"alive{n}", tracking_server.uri, alive) for n in range(2)}

    answers = work(tmp_path)

    experiment = client.get_experiment_by_name(alive)
    assert experiment is not None, answers
    runs = client.search_runs([experiment.experiment_id])
    assert {(r.info.run_name, r.info.status) for r in runs} == {
        ("alive0", "FINISHED"), ("alive1", "FINISHED"),
    }  # fmt: skip
    assert written.left == 6
    # Each place is tried twice and no more.
    assert len([answer for answer in answers if "down" in answer]) == 4
    assert {answer["attempt"] for answer in answers if "attempt" in answer} == living


def test_a_password_in_the_uri_is_in_no_word_of_ours(
    tmp_path: Path,
    written: Written,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    host = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@{host}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    one = ended(written, "one", f"http://{host}", "e")

    answers = work(tmp_path)
    with pytest.raises(MantikError, match="MLflow") as raised:
        RunStore(f"http://{host}").search("")

    assert one in [name for answer in answers for name in answer["attempts"]]
    for told in (str(answers), str(raised.value), capfd.readouterr().err):
        assert host in told
        assert "hunter2" not in told
