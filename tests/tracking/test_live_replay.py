"""What a job has logged so far, carried over piece by piece, whoever dies: all of it, once."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.tracking.published import Published
from snakemake_executor_plugin_mantik.tracking.replay import (
    COPY_LATER,
    COPY_TREE,
    publish_store,
)
from tests.tracking.test_replay import (  # noqa: F401 - fixtures, too
    ATTEMPT,
    ENDS,
    OVERLOADED,
    SOURCE,
    Killed,
    Mortal,
    Replayed,
    each_death,
    replay_of,
    store,
    target,
    told,
)


class Job:
    """A job that logs, and a worker that tells of it: what it knows dies with it."""

    def __init__(self, replayed: Replayed, directory: Path) -> None:
        self.replayed = replayed
        self.copy = directory / "copy"
        self.tree = self.copy / COPY_TREE
        self.ended = directory / "ended" / "mlruns"
        self.known = Published(doubt=False)
        self.said: list[str] = []

    def logs(self, stage: int) -> None:
        """What the copy holds at a stage; 3: the job is over, and its whole store is here."""
        whole = self.replayed.store
        plot = f"7/{SOURCE}/artifacts/plots/ü #1.txt"
        if stage == 3:
            shutil.copytree(whole, self.ended)
            os.utime(self.ended / plot)  # it is the same, though
            return
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(whole, self.tree)
        (self.copy / COPY_LATER).write_text("")
        run = self.tree / "7" / SOURCE
        if stage == 1:
            (self.tree / plot).write_text("plat")
            (weights,) = self.tree.glob("7/models/*/artifacts/weights")
            weights.unlink()  # large
            (self.copy / COPY_LATER).write_text(f"7/x\0{weights.relative_to(self.tree)}")
            (run / "params" / "depth").write_text("")  # just being written
            (run / "tags" / "long").write_text("x" * 5000)  # and this is the half of it
            lines = (run / "metrics" / "loss" / "a").read_bytes().splitlines(keepends=True)
            (run / "metrics" / "loss" / "a").write_bytes(b"".join(lines[:3]) + lines[3][:7])
            for meta in self.tree.glob("7/*/meta.yaml"):
                if "run_name: open" in meta.read_text():
                    meta.write_text("")
                # A run is described before its tags are written.
                if "run_name: inner" in meta.read_text():
                    (meta.parent / "tags" / "mlflow.parentRunId").unlink()

    def notify(self, stage: int, client: Any = None) -> None:
        """What the worker does then."""
        client = client or self.replayed.client
        left, status = (self.tree, "") if stage < 3 else (self.ended, "FAILED")
        known, say = self.known, self.said.append
        publish_store(replay_of(self.replayed, client, left, known, say), status)

    def goes_on(self, error: Exception, stage: int) -> None:
        """What was broken off is repeated: by another worker, if that one was killed."""
        if isinstance(error, Killed):
            self.known = Published(doubt=True)
        elif stage == 3:
            self.known.doubt = True


@pytest.fixture
def job(told: Replayed, tmp_path: Path) -> Job:  # noqa: F811
    return Job(told, tmp_path)


def acts(client: Mock) -> list[str]:
    """What a client that is watched has changed at MLflow."""
    return [name for name, _, _ in client.method_calls if name.startswith(Mortal.ACTS)]


def test_what_is_there_is_told_and_nothing_twice(job: Job, tmp_path: Path) -> None:
    client = Mock(wraps=job.replayed.client)
    job.logs(1)
    job.notify(1, client)

    found = job.replayed.view()
    run = found["train C=1"]
    # Half a line, an empty parameter and half a description are left to the next time.
    assert [point[0] for point in run["metrics"]["loss/a"]] == [0, 1, 2]
    assert run["params"] == {"C": "1"}
    assert "long" not in run["tags"]
    assert run["artifacts"] == ["plots/ü #1.txt"]
    assert set(found) == {"train C=1", "inner", "models"}
    assert found["inner"]["status"] == "FINISHED"
    # A model that is not here in whole is left, too.
    assert found["models"] == []
    before = acts(client)
    job.notify(1, client)
    assert acts(client) == before
    job.logs(2)
    job.notify(2, client)
    found = job.replayed.view()
    assert [model[0] for model in found["models"]] == ["net"]
    assert found["inner"]["tags"]["mlflow.parentRunId"] == "train C=1"
    (description,) = job.tree.glob("7/models/*/artifacts/MLmodel")
    assert f"run_id: {SOURCE}" in description.read_text(), "it is the job's own"
    job.logs(3)
    job.notify(3, client)

    said = [line for line in job.said if "the parameter C is already '1'" not in line]
    assert said == []

    # loss/a, bad, endless, inner and open once each, score also for its model, which came later.
    points = sum(len(named.get("metrics", ())) for _, _, named in client.method_calls)
    assert points == 5 + 1 + 1 + 1 + 1 + 2
    assert acts(client).count("log_artifacts") == 2
    assert acts(client).count("log_model_artifacts") == 1
    (plot,) = (tmp_path / "artifacts").rglob("ü #1.txt")
    assert plot.read_text() == "plot"
    # Who has told all of it himself need not ask what is known.
    looked = {name for name, _, _ in client.method_calls}
    assert not {"get_metric_history", "search_runs", "search_logged_models"} & looked


def test_a_run_whose_making_was_not_answered_is_not_made_twice(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.logs(1)
    with monkeypatch.context() as lossy:
        made = job.replayed.client.create_run

        def lost(*arguments: Any, **named: Any) -> None:
            made(*arguments, **named)
            raise OVERLOADED

        lossy.setattr(job.replayed.client, "create_run", lost)
        with pytest.raises(MlflowException):
            job.notify(1)

    job.notify(1)

    assert set(job.replayed.view()) == {"train C=1", "inner", "models"}


def test_of_metrics_that_the_job_has_begun_anew_no_middle_of_a_line_is_told(job: Job) -> None:
    job.logs(2)
    lines = job.tree / "7" / SOURCE / "metrics" / "loss" / "a"
    client = job.replayed.client
    run_id = job.replayed.run_id
    job.notify(2)
    before = client.get_metric_history(run_id, "loss/a")

    lines.write_bytes(b"1700000000123 0.25 42\n" * lines.stat().st_size)
    job.notify(2)

    assert before
    assert client.get_metric_history(run_id, "loss/a") == before


@each_death
def test_killed_anywhere_while_the_job_logs(
    job: Job,
    tmp_path: Path,
    empty_store: Path,
    step: int,
) -> None:
    fresh = tmp_path / "fresh.db"
    shutil.copyfile(tmp_path / "mlflow.db", fresh)
    logged = tmp_path / "logged" / "mlruns"
    shutil.copytree(job.replayed.store, logged)
    job.replayed.replay()
    expected = job.replayed.view()
    died = 0
    for stage in (1, 2, 3):
        for deaths in range(1, 30, 2 + step):
            directory = tmp_path / f"{stage}-{deaths}"
            directory.mkdir()
            shutil.copyfile(fresh, directory / "mlflow.db")
            client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")
            again = Job(
                Replayed(client, logged, job.replayed.run_id, job.replayed.experiment_id, []),
                directory,
            )
            alive = True
            for at in (1, 2, 3):
                again.logs(at)
                error = ENDS[died % len(ENDS)]
                try:
                    again.notify(at, Mortal(client, deaths, error) if at == stage else client)
                except (Killed, MlflowException) as broken:
                    alive = False
                    again.goes_on(broken, at)
                    again.notify(at)
            assert again.replayed.view() == expected, (stage, deaths)
            if alive:
                break
            died += 1
    assert died >= 12 // (2 + step)
