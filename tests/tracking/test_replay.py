"""What a job logged into its own store comes into its run: all of it, once, however often told."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelOutput,
    Metric,
    Param,
    Run,
)
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, TEMPORARILY_UNAVAILABLE
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.engine.observer import JobExtras
from snakemake_executor_plugin_mantik.tracking import replay
from snakemake_executor_plugin_mantik.tracking.published import Published, Replay
from snakemake_executor_plugin_mantik.tracking.recorded import metric_files
from snakemake_executor_plugin_mantik.tracking.replay import publish_store
from snakemake_executor_plugin_mantik.tracking.store import RunIdentity, store_skeleton

SOURCE = "a" * 32
ATTEMPT = "11111111-2222-4333-8444-555555555555"


@pytest.fixture
def target(empty_store: Path, tmp_path: Path) -> MlflowClient:
    """A client of a new SQLite store, with an experiment."""
    shutil.copyfile(empty_store, tmp_path / "mlflow.db")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    client.create_experiment("digits", artifact_location=(tmp_path / "artifacts").as_uri())
    return client


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """What a job left."""
    root = tmp_path / "site" / "mlruns"
    begin(root, "digits: 'ü'")
    fill(root)
    return root


def begin(root: Path, experiment: str) -> None:
    """What a job starts with."""
    identity = RunIdentity(SOURCE, "7", experiment)
    files = store_skeleton(
        "/at/the/site", ATTEMPT, identity, name="train C=1", user="me", now=1000.0
    )
    JobExtras("", files).lay_out(root)


def fill(root: Path) -> None:
    """Log as a job does that sees the store; the paths in it are those of the site."""
    client = MlflowClient(tracking_uri=root.as_uri())
    moved = root / "7" / SOURCE / "meta.yaml"
    text = moved.read_text()
    here = text.replace("file:///at/the/site", root.parent.as_uri())
    moved.write_text(here)
    for step in range(5):
        client.log_metric(SOURCE, "loss/a", 1 / (step + 1), timestamp=step, step=step)
    client.log_metric(SOURCE, "bad", float("nan"), timestamp=1)
    client.log_metric(SOURCE, "endless", float("inf"), timestamp=1)
    client.log_batch(SOURCE, params=[Param("depth", "3"), Param("C", "1.0")])
    client.set_tag(SOURCE, "mlflow.note.content", "two\nlines")
    client.set_tag(SOURCE, "mlflow.source.name", "not this")
    model = client.create_logged_model(
        "7", name="net", source_run_id=SOURCE, params={"layers": "2"}, model_type="torch"
    )
    files = root / "7" / "models" / model.model_id / "artifacts"
    files.mkdir(exist_ok=True)
    (files / "MLmodel").write_text(f"model_id: {model.model_id}\nrun_id: {SOURCE}\nflavors: {{}}\n")
    (files / "weights").write_bytes(b"\0\1")
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(SOURCE, [LoggedModelOutput(model.model_id, 4)])
    data = Dataset("the digits", "d1", "local", "{}")
    client.log_inputs(SOURCE, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])
    client.log_batch(
        SOURCE,
        metrics=[
            Metric("score", 0.9, 9, 4, model_id=model.model_id, dataset_name="the digits",
                   dataset_digest="d1", run_id=SOURCE)
        ],
    )  # fmt: skip
    artifacts = root / "7" / SOURCE / "artifacts" / "plots"
    artifacts.mkdir()
    (artifacts / "ü #1.txt").write_text("plot")
    inner = client.create_run("7", run_name="inner", tags={"mlflow.parentRunId": SOURCE})
    client.log_metric(inner.info.run_id, "inner", 5, timestamp=5)
    client.set_terminated(inner.info.run_id, "FINISHED")
    open_run = client.create_run(
        "7", run_name="open", tags={"mlflow.parentRunId": inner.info.run_id}
    )
    client.log_metric(open_run.info.run_id, "open", 6, timestamp=5)
    moved.write_text(text)


@dataclass
class Replayed:
    """A replay into a run, and what it said."""

    client: MlflowClient
    store: Path
    run_id: str
    experiment_id: str
    said: list[str]

    def replay(self, client: Any = None, *, again: bool = False) -> None:
        known = Published(doubt=again)
        publish_store(
            replay_of(self, client or self.client, self.store, known, self.said.append), "FAILED"
        )

    def view(self) -> dict[str, Any]:
        """All that MLflow knows, ids of what the replay made left out."""
        found: dict[str, Any] = {}
        runs = self.client.search_runs([self.experiment_id])
        names = {run.info.run_id: run.info.run_name for run in runs}
        assert len(set(names.values())) == len(runs), names
        for run in runs:
            found[run.info.run_name] = self._run(run, names)
        models = self.client.search_logged_models([self.experiment_id])
        found["models"] = [
            (m.name, m.model_type, str(m.status), dict(m.params), names[m.source_run_id],
             sorted((x.key, x.value, x.step) for x in m.metrics or []))
            for m in models
        ]  # fmt: skip
        return found

    def _run(self, run: Run, names: dict[str, str]) -> dict[str, Any]:
        tags = {k: v for k, v in run.data.tags.items() if not k.startswith("mantik.source_")}
        if parent := tags.get("mlflow.parentRunId"):
            tags["mlflow.parentRunId"] = names[parent]
        return {
            "status": run.info.status,
            "params": run.data.params,
            "tags": tags,
            "metrics": {
                name: sorted(
                    (m.timestamp, m.step, str(m.value))
                    for m in self.client.get_metric_history(run.info.run_id, name)
                )
                for name in run.data.metrics
            },
            "inputs": [
                (d.dataset.name, d.dataset.digest, [(t.key, t.value) for t in d.tags])
                for d in run.inputs.dataset_inputs
            ],
            "outputs": len(run.outputs.model_outputs),
            "artifacts": [a.path for a in self.client.list_artifacts(run.info.run_id, "plots")],
        }


def replay_of(
    told: Replayed, client: Any, store: Path, known: Published, say: Callable[[str], None]
) -> Replay:
    """A publication of the job's store, or of a copy of it."""
    return Replay(
        client,
        store,
        known,
        say,
        ATTEMPT,
        told.run_id,
        told.experiment_id,
        SOURCE,
        "7",
        "train C=1",
    )


@pytest.fixture
def told(target: MlflowClient, store: Path) -> Replayed:
    experiment = target.get_experiment_by_name("digits")
    run = target.create_run(
        experiment.experiment_id, run_name="train C=1", tags={"mlflow.source.name": "churn"}
    )
    target.log_param(run.info.run_id, "C", "1")
    return Replayed(target, store, run.info.run_id, experiment.experiment_id, [])


def test_everything_comes_over(told: Replayed, monkeypatch: pytest.MonkeyPatch) -> None:
    # As many as are read at once, and more.
    monkeypatch.setattr(replay, "_METRICS_BYTES", 20)

    told.replay()

    found = told.view()
    assert set(found) == {"train C=1", "inner", "open", "models"}
    run = found["train C=1"]
    assert run["params"] == {"C": "1", "depth": "3"}
    assert any("C is already '1' in MLflow" in line for line in told.said)
    assert run["metrics"]["loss/a"] == [(s, s, str(1 / (s + 1))) for s in range(5)]
    assert run["metrics"]["bad"] == [(1, 0, "nan")]
    assert float(run["metrics"]["endless"][0][2]) > 1e300
    assert run["metrics"]["score"] == [(9, 4, "0.9")]
    assert run["tags"]["mlflow.note.content"] == "two\nlines"
    assert run["tags"]["mlflow.source.name"] == "churn"
    assert run["inputs"] == [("the digits", "d1", [("mlflow.data.context", "training")])]
    assert run["outputs"] == 1
    assert run["artifacts"] == ["plots/ü #1.txt"]
    assert run["status"] == "RUNNING"  # whoever ends it knows how
    assert found["inner"]["status"] == "FINISHED"
    assert found["inner"]["tags"]["mlflow.parentRunId"] == "train C=1"
    assert found["open"]["status"] == "FAILED"
    assert found["open"]["tags"]["mlflow.parentRunId"] == "inner"
    (model,) = found["models"]
    assert model[:2] == ("net", "torch")
    assert model[3] == {"layers": "2"}
    assert model[4] == "train C=1"
    assert model[5] == [("score", 0.9, 4)]


def test_a_models_description_names_the_model(told: Replayed) -> None:
    told.replay()

    (model,) = told.client.search_logged_models([told.experiment_id])
    place = Path(model.artifact_location.removeprefix("file://"))
    assert f"model_id: {model.model_id}" in (place / "MLmodel").read_text()
    assert f"run_id: {told.run_id}" in (place / "MLmodel").read_text()
    assert (place / "weights").read_bytes() == b"\0\1"


class Killed(Exception):  # noqa: N818 - reads as what it says
    """The worker was killed."""


OVERLOADED = MlflowException("overloaded", TEMPORARILY_UNAVAILABLE)


class Mortal:
    """A client that dies before its nth act, which is to say after the one before that.

    Where the server is overloaded it acts, and the answer is lost.
    """

    ACTS = ("create_", "delete_", "log_", "set_", "finalize_", "update_")

    def __init__(
        self, client: MlflowClient, deaths: int, error: Exception | type[Exception] = Killed
    ) -> None:
        self._client = client
        self._left = deaths
        self._error = error

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._client, name)
        if not name.startswith(self.ACTS):
            return real

        def act(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left:
                return real(*arguments, **named)
            if self._error is OVERLOADED:
                real(*arguments, **named)
            raise self._error

        return act


ENDS = (
    Killed(),
    OVERLOADED,
    # Nobody has to log it again by hand who renews his token.
    MlflowException("not for you", PERMISSION_DENIED),
)
"""What may break off a replay, in turn."""
each_death = pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.nightly)])
"""How many acts lie between two deaths that are tried."""


def killed_at_each_act(make: Callable[[Path], Any], tmp_path: Path, step: int) -> int:
    """Break off what publishes at one act after the other, dead or without an answer.

    How many acts there are, about.
    """
    died, alive = 0, False
    while not alive:
        each = make(tmp_path / str(died))
        try:
            each.publish(Mortal(each.client, died + 1, ENDS[died % 2]))
            alive = True
        except (Killed, MlflowException):
            died += step
            each.publish(each.client)
        each.check()
        each.journal.close()
    return died


@each_death
def test_killed_anywhere_and_repeated(told: Replayed, tmp_path: Path, step: int) -> None:
    whole = tmp_path / "whole.db"
    shutil.copyfile(tmp_path / "mlflow.db", whole)
    told.replay()
    expected = told.view()
    died = 0
    while True:
        copy = tmp_path / f"{died}.db"
        shutil.copyfile(whole, copy)
        client = MlflowClient(tracking_uri=f"sqlite:///{copy}")
        again = Replayed(client, told.store, told.run_id, told.experiment_id, [])
        try:
            again.replay(Mortal(client, died + 1, ENDS[died % len(ENDS)]))
        except (Killed, MlflowException):
            died += step
        else:
            break
        again.replay(again=True)
        assert again.view() == expected, died
    assert died > 12


def test_more_than_one_request_takes_and_what_is_refused(told: Replayed) -> None:
    # Written as by a client with other limits.
    run = told.store / "7" / SOURCE
    for number in range(150):
        (run / "params" / f"p{number}").write_text(str(number))
        (run / "tags" / f"t{number}").write_text(str(number))
    long = "k" * 252
    (run / "params" / long).write_text("1")
    (run / "metrics" / "long").write_text("".join(f"{n} 0.5 {n}\n" for n in range(1500)))

    told.replay()

    data = told.client.get_run(told.run_id).data
    assert {n: v for n, v in data.params.items() if n[0] == "p"} == {
        f"p{n}": str(n) for n in range(150)
    }
    assert {f"t{n}" for n in range(150)} < data.tags.keys()
    history = told.client.get_metric_history(told.run_id, "long")
    assert sorted(m.step for m in history) == list(range(1500))
    (line,) = (line for line in told.said if long in line)
    assert "left out" in line


def test_runs_that_are_each_others_parents(told: Replayed) -> None:
    runs = {
        text.partition("run_name: ")[2].partition("\n")[0]: meta.parent
        for meta in told.store.glob("7/*/meta.yaml")
        if "run_name" in (text := meta.read_text())
    }
    (runs["inner"] / "tags" / "mlflow.parentRunId").write_text(runs["open"].name)

    told.replay()

    found = told.client.search_runs([told.experiment_id])
    assert {run.info.run_name for run in found} == {"train C=1", "inner", "open"}


def test_a_link_among_the_metrics_leads_nowhere(told: Replayed, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("1 2 3\n")
    link = told.store / "7" / SOURCE / "metrics" / "link"
    link.symlink_to(tmp_path / "elsewhere")

    assert link not in list(metric_files(told.store))


def test_a_job_that_logged_nothing(told: Replayed) -> None:
    shutil.rmtree(told.store)
    begin(told.store, "digits")
    before = told.view()

    told.replay()

    assert told.view() == before
    assert told.said == []


@pytest.mark.parametrize("damage", ["meta", "experiment", "metric", "half", "run", "all"])
def test_a_damaged_store(told: Replayed, damage: str) -> None:
    run = told.store / "7" / SOURCE
    if damage == "meta":
        (run / "meta.yaml").write_text("{ not: yaml: at all")
    elif damage == "experiment":
        (run.parent / "meta.yaml").write_bytes(b"\xff\0")
    elif damage == "half":
        with (run / "metrics" / "loss" / "a").open("a") as file:
            file.write("1795271643516 0.")
    elif damage == "metric":
        (run / "metrics" / "broken").write_text("one two three four five six seven\n")
    elif damage == "run":
        shutil.rmtree(run)
    else:
        shutil.rmtree(told.store)
        told.store.mkdir()

    told.replay()

    assert told.said
    metrics = told.view()["train C=1"]["metrics"]
    lost = damage in ("run", "all")
    assert len(metrics.get("loss/a", [])) == (0 if lost else 5)
