"""Finished traces of a job's own store come to its run, once, however often they are sent."""

import json
import os
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from mlflow.entities import Trace
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.rest_utils import http_request

from snakemake_executor_plugin_mantik.tracking import traces
from tests.tracking.conftest import TrackingServer
from tests.tracking.test_replay import SOURCE, Killed, Mortal, Replayed, begin

JOB = """
import mlflow

@mlflow.trace
def ask(text):
    mlflow.update_current_trace(
        tags={"kind": "grün"}, metadata={"mlflow.trace.session": "s1", "mlflow.trace.user": "me"}
    )
    with mlflow.start_span("look", span_type="TOOL") as span:
        span.set_inputs({"text": text, "among": [1, 2.5, None, True, {"deep": []}], "far": 1 << 70})
        span.set_attribute("mlflow.chat.tokenUsage",
                           {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7})
        span.add_event(mlflow.entities.SpanEvent("seen", attributes={"n": 1}))
    return "ü"

@mlflow.trace
def fail():
    raise ValueError("no")

ask("before")
with mlflow.start_run():
    ask("within")
    with mlflow.start_run(nested=True, run_name="inner"):
        try:
            fail()
        except ValueError:
            pass
"""


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store into which a job has logged three traces."""
    directory = tmp_path_factory.mktemp("job")
    store = directory / "mlruns"
    begin(store, "digits")
    for meta in store.rglob("meta.yaml"):
        text = meta.read_text()
        at_site = text.partition("file://")[2].partition("/mlruns")[0]
        meta.write_text(text.replace(f"file://{at_site}", directory.as_uri()))
    variables = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_RUN_ID": SOURCE}
    variables |= {"MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_ALLOW_FILE_STORE": "true"}
    subprocess.run([sys.executable, "-c", JOB], check=True, env=os.environ | variables)
    return store


@pytest.fixture
def traced(logged: Path, tmp_path: Path) -> Path:
    """The same, with ids of traces that the server has not seen."""
    store = Path(shutil.copytree(logged, tmp_path / "job" / "mlruns"))
    for trace in (store / "7" / "traces").iterdir():
        old, new = (bytes.fromhex(trace.name.removeprefix("tr-")), os.urandom(16))
        for file in filter(Path.is_file, trace.rglob("*")):
            text = file.read_text().replace(old.hex(), new.hex())
            text = text.replace(str(logged), str(store))
            file.write_text(text.replace(b64encode(old).decode(), b64encode(new).decode()))
        trace.rename(trace.with_name(f"tr-{new.hex()}"))
    return store


def replayed(store: Path, server: TrackingServer, experiment: str) -> Replayed:
    client = MlflowClient(tracking_uri=server.uri)
    into = client.create_experiment(experiment)
    run = client.create_run(into, run_name="train C=1")
    return Replayed(client, store, run.info.run_id, into, [])


@pytest.fixture
def told(traced: Path, tracking_server: TrackingServer, tmp_path: Path) -> Replayed:
    return replayed(traced, tracking_server, str(tmp_path))


def found(told: Replayed, run: str = "") -> list[Trace]:
    runs = told.client.search_runs([told.experiment_id])
    (run_id,) = [r.info.run_id for r in runs if r.info.run_name == run] or [None]
    traces = told.client.search_traces(locations=[told.experiment_id], run_id=run_id)
    return sorted(traces, key=lambda trace: trace.info.request_time)


def view(told: Replayed) -> Any:
    of_runs = {run: [t.info.trace_id for t in found(told, run)] for run in ("train C=1", "inner")}
    return [trace.to_dict() for trace in found(told)], of_runs


def test_traces_come_to_the_runs_that_made_them(told: Replayed) -> None:
    told.replay()

    assert not told.said
    made = MlflowClient(tracking_uri=told.store.as_uri()).search_traces(locations=["7"])
    logged = {trace.info.trace_id: trace for trace in made}
    before, within, failed = found(told)
    assert {each.info.trace_id for each in (before, within, failed)} == set(logged)
    for trace in (before, within, failed):
        job = logged[trace.info.trace_id]
        assert [span.name for span in trace.data.spans] == [span.name for span in job.data.spans]
        for span, its in zip(trace.data.spans, job.data.spans, strict=True):
            new = {"far": str(1 << 70)} if span.name == "look" else {}
            inputs = its.attributes.pop("mlflow.spanInputs") | new
            more = dict(span.attributes)
            assert more.pop("mlflow.spanInputs") == inputs
            assert (
                more.items()
                >= {k: v for k, v in its.attributes.items() if k != "mlflow.spanInputs"}.items()
            )
            for name in ("span_id", "parent_id", "start_time_ns", "end_time_ns", "events"):
                assert getattr(span, name) == getattr(its, name), name
            assert span.status.status_code == its.status.status_code
        assert trace.info.state == job.info.state
        assert trace.info.tags["mlflow.traceName"] == job.info.tags["mlflow.traceName"]
        assert trace.info.request_preview == job.info.request_preview
    assert within.info.tags["kind"] == "grün"
    known = within.info.trace_metadata
    assert (known["mlflow.trace.session"], known["mlflow.trace.user"]) == ("s1", "me")
    assert within.info.token_usage["total_tokens"] == 7
    of_runs = {"train C=1": [before, within], "inner": [failed]}
    assert view(told)[1] == {run: [t.info.trace_id for t in its] for run, its in of_runs.items()}


class Wire:
    """Sends spans, and breaks at one of its requests: before it was sent, or before the answer."""

    def __init__(self, breaks_at: int, *, sent: bool, then: Callable[[], object]) -> None:
        self._left, self._sent, self._then = breaks_at, sent, then

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._sent:
            self._then()
        answer = http_request(*arguments, **named)
        if self._left == 0:
            self._then()
        return answer


def die() -> None:
    raise Killed


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_killed_at_any_of_them_and_repeated(
    told: Replayed, monkeypatch: pytest.MonkeyPatch, number: int, *, sent: bool
) -> None:
    monkeypatch.setattr(traces, "http_request", Wire(number, sent=sent, then=die))

    with pytest.raises(Killed):
        told.replay()
    monkeypatch.setattr(traces, "http_request", http_request)
    with pytest.raises(Killed):
        told.replay(Mortal(told.client, number + 1), again=True)
    told.replay(again=True)

    whole = view(told)
    assert [len(trace["data"]["spans"]) for trace in whole[0]] == [2, 2, 1]
    assert [len(its) for its in whole[1].values()] == [2, 1]
    assert [trace.info.tags["mlflow.traceName"] for trace in found(told)] == ["ask", "ask", "fail"]
    told.replay(again=True)
    assert view(told) == whole


@pytest.mark.parametrize("code", [404, 501, 503])
def test_what_a_server_does_not_take(
    told: Replayed, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    answer = Mock(status_code=code, ok=False)
    monkeypatch.setattr(traces, "http_request", lambda *_, **__: answer)

    if code == httpx.codes.SERVICE_UNAVAILABLE:
        with pytest.raises(MlflowException):
            told.replay()
    else:
        told.replay()
        (said,) = told.said
        assert said.startswith(
            f"3 traces are left out: the tracking server refused them with {code}"
        )
    assert told.client.get_run(told.run_id).info.status in ("RUNNING", "FAILED")
    assert not found(told)


def test_what_is_no_finished_trace(told: Replayed, tmp_path: Path) -> None:
    told.store = Path(shutil.copytree(told.store, tmp_path / "copy"))
    first, second, third = (told.store / "7" / "traces").iterdir()
    (first / "artifacts/traces.json").unlink()
    (second / "artifacts/traces.json").write_text('{"spans": [{"name": "x"}]}')
    whole = third / "artifacts/traces.json"
    known = json.loads(whole.read_text())
    for span in known["spans"]:
        span["end_time_unix_nano"] = None
    whole.write_text(json.dumps(known))

    told.replay()

    assert told.said == [
        "3 traces are left out: the job has not finished them, or they are damaged"
    ]
    assert not found(told)
