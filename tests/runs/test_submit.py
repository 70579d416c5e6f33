"""Submissions that are killed, and Ctrl-C while one is not to be left half done."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.runs import submit
from snakemake_executor_plugin_mantik.runs.directories import NEW_PREFIX, runs_home
from snakemake_executor_plugin_mantik.runs.listing import RunFilter, list_rows
from snakemake_executor_plugin_mantik.runs.store import RunStore
from snakemake_executor_plugin_mantik.runs.submit import delay_signals, remove_aborted

SUBMITS = """
import sys, time
from snakemake_executor_plugin_mantik.runs.directories import RunRequest
from snakemake_executor_plugin_mantik.runs.store import SITE, RunStore
from snakemake_executor_plugin_mantik.runs.submit import _staging, submission_tag

uri, told = sys.argv[1:]
with _staging() as stage:
    if told:
        request = RunRequest(
            uri="/churn", version="", commit="", folder="project/churn", entry_point="main",
            parameters={}, values={}, extra={}, site="alps", config="site/alps.yaml",
            config_source="", account="", tracking_uri=uri, experiment_id="", experiment="churn",
            name="first", created=time.time(), tags=submission_tag(stage),
        )
        stage.write_request(request)
        RunStore(uri).make(request, {SITE: "alps", **submission_tag(stage)}, {})
    print("made", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def at_home(tmp_path: Path, store_uri: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MANTIK_RUNS", str(tmp_path / "all runs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_uri)
    return store_uri


def submitting(uri: str, told: str = "told") -> "Iterator[subprocess.Popen[str]]":
    """A process that submits a run and does not come to an end; it is killed at last."""
    words = [sys.executable, "-c", SUBMITS, uri, told]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        yield process
        process.kill()


def states() -> list[tuple[str, str]]:
    return [(row.state, row.note) for row in list_rows(RunFilter(), pytest.fail)]


def left() -> list[Path]:
    return list(runs_home().glob(f"{NEW_PREFIX}*"))


def test_a_run_whose_submission_was_killed_is_ended(at_home: str) -> None:
    for _ in submitting(at_home):
        assert states() == [("SCHEDULED", "")], "it is at it"

    assert states() == [("KILLED", submit.NEVER)]
    (run,) = MlflowClient(tracking_uri=at_home).search_runs(["1"])
    assert run.info.end_time is not None
    # A server may still have been at it: it is looked for once more.
    (stage,) = left()
    old = time.time() - submit.ARRIVES_S - 1
    os.utime(stage, (old, old))
    assert remove_aborted() == {}
    assert left() == []


def test_one_that_was_killed_before_a_run_was_asked_for(at_home: str) -> None:
    for _ in submitting(at_home, told=""):
        assert len(left()) == 1
        assert remove_aborted() == {}
        assert len(left()) == 1
    assert remove_aborted() == {}
    assert left() == []


def test_mlflow_that_is_away_is_asked_another_time(
    at_home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in submitting(at_home):
        pass
    file = Path(at_home.removeprefix("sqlite:///"))
    content = file.read_bytes()
    file.unlink()
    assert remove_aborted() == {}
    assert not file.exists(), "none is made where it was"
    file.write_text("something else")
    (stage,) = left()
    other = stage.with_name(f"{stage.name}-2")
    shutil.copytree(stage, other)
    asked: list[str] = []

    def opened(uri: str) -> RunStore:
        asked.append(uri)
        return RunStore(uri)

    with monkeypatch.context() as counted:
        counted.setattr(submit, "RunStore", opened)
        (why,) = remove_aborted().values()
    assert asked == [at_home], "a store that does not answer is asked once"
    assert "MLflow" in str(why)
    shutil.rmtree(other)
    file.write_bytes(content)
    assert states() == [("KILLED", submit.NEVER)]

    # Nobody waits for ever for one that is gone for good.
    file.write_text("something else")
    monkeypatch.setattr(submit, "GIVE_UP_S", 0.0)
    monkeypatch.setattr(submit, "ARRIVES_S", 0.0)
    remove_aborted()
    assert not stage.exists()


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_comes_afterwards_and_the_second_one_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - where it comes is what is looked at
        with delay_signals():
            press()
            done.append("first")
        done.append("after it")
    with pytest.raises(KeyboardInterrupt), delay_signals():  # noqa: PT012
        press()
        press()
        done.append("second")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_told_before_ctrl_c() -> None:
    with pytest.raises(ValueError, match="wrong"), delay_signals():  # noqa: PT012
        press()
        raise ValueError("wrong")
    with delay_signals():
        pass
