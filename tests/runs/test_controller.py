"""Controllers whose workflow never gets as far as a job, and runs that have none."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from snakemake_executor_plugin_mantik.cli.runs import run_details, run_lines, runs_app
from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.runs import controller, local_runs
from snakemake_executor_plugin_mantik.runs.directories import (
    RunDirectory,
    RunRequest,
)
from snakemake_executor_plugin_mantik.runs.listing import (
    GONE,
    LATE,
    STALE,
    RunFilter,
    find_run,
    list_rows,
    refresh,
)
from snakemake_executor_plugin_mantik.runs.local_runs import (
    cancel_run,
    find_local_run,
    remove_run,
)
from snakemake_executor_plugin_mantik.runs.store import SITE, RunStore
from snakemake_executor_plugin_mantik.tracking.cursor import Cursor, open_log
from tests.tracking.written import Written

SLEEPS = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started the tests may have it ignored
print(flush=True)
time.sleep(100)
"""


@pytest.fixture
def run(tmp_path: Path, store_uri: str, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that was made and whose controller was never started."""
    monkeypatch.setenv("MANTIK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere.db")
    request = RunRequest(
        uri="/churn", version="", commit="", folder="project/churn", entry_point="main",
        parameters={}, values={}, extra={}, site="alps", config="site/alps.yaml", config_source="",
        account="", tracking_uri=store_uri, experiment_id="", experiment="churn", name="first",
        created=time.time(),
    )  # fmt: skip
    request = RunStore(store_uri).make(request, {SITE: "alps"}, {"alpha": "1"})
    directory = RunDirectory(tmp_path / "runs" / request.run_id)
    (directory.path / "project" / "churn").mkdir(parents=True)
    directory.write_request(request)
    return directory


def listed(**wanted: str | float) -> list[tuple[str, str]]:
    found = list_rows(RunFilter(**wanted), pytest.fail)  # type: ignore[arg-type]
    return [(row.state, row.note) for row in found]


def status(run: RunDirectory) -> str:
    return str(RunStore(run.request.tracking_uri).run(run.request.run_id).info.status)


def test_a_mistake_that_only_the_controller_finds(run: RunDirectory) -> None:
    assert listed() == [("SCHEDULED", GONE)]
    assert listed(state="SCHEDULED") == [("SCHEDULED", GONE)]

    assert controller.start_controller(run)
    controller.wait_for_controller(run)

    assert run.end is not None
    assert run.end["exit_code"] == 2
    assert "there is no MLproject file" in run.log.read_text()
    assert status(run) == "FAILED"
    assert listed(state="FAILED") == [
        ("FAILED", "it ended before a job was submitted; see smk-mantik runs logs")
    ]
    with pytest.raises(UserError, match="over already"):
        cancel_run(run, pytest.fail)
    remove_run(run)
    assert find_local_run("first") is None
    assert not run.path.exists()


def test_an_end_that_mlflow_was_not_told_of(run: RunDirectory) -> None:
    run.write_end(0)

    assert listed() == [("FINISHED", "")]

    found = refresh(find_run("first"))
    assert (found.run_id, found.run.info.status) == (run.request.run_id, "FINISHED")


def test_cancelled_before_it_was_started(run: RunDirectory) -> None:
    with pytest.raises(UserError, match="not over"):
        remove_run(run)
    cancel_run(run, pytest.fail)
    assert refresh(find_run("first")).run.info.status == "KILLED"
    assert run.end is not None


@pytest.fixture
def down(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """The run, whose server answers no more."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run.write_request(replace(run.request, tracking_uri="http://127.0.0.1:9"))
    return RunDirectory(run.path)


def test_commands_work_while_mlflow_is_down(down: RunDirectory) -> None:
    def smk_mantik(*words: str) -> Result:
        found = CliRunner().invoke(runs_app, [*words], catch_exceptions=False)
        assert found.exit_code == 0, found.output
        return found

    run_id = down.request.run_id
    listed = smk_mantik("list", "--json")
    (row,) = json.loads(listed.stdout)
    assert (row["run_id"], row["state"], row["note"]) == (run_id, "SCHEDULED", GONE)
    assert "127.0.0.1" in listed.stderr
    assert json.loads(smk_mantik("list", "--json", "--site", "daint").stdout) == []
    down.log.write_text("nothing submitted yet\n")
    logs = smk_mantik("logs", "first")
    assert logs.stdout == "nothing submitted yet\n"
    assert not logs.stderr
    cancelled = smk_mantik("cancel", run_id[:8])
    assert f"Run {run_id}: KILLED.\n" == cancelled.stdout
    assert "will report this to MLflow" in cancelled.stderr
    assert "127.0.0.1" in cancelled.stderr
    shown = smk_mantik("show", "first").stdout
    assert f"state: KILLED ({STALE})" in shown
    assert "  MLflow: " in shown
    (row,) = json.loads(smk_mantik("list", "--json").stdout)
    assert (row["state"], row["note"]) == ("KILLED", STALE)
    # What needs MLflow says why it fails, and removes nothing.
    with pytest.raises(MantikError, match=r"127\.0\.0\.1"):
        smk_mantik("delete", "first", "--yes")
    assert down.path.exists()


def test_cancelled_before_anybody_could_be_interrupted(run: RunDirectory) -> None:
    lock = controller.hold_directory(run)
    assert lock is not None
    run.cancelled.touch()
    words = [sys.executable, "-m", controller.MODULE, str(run.path), str(lock.fileno())]
    with lock:
        ended = subprocess.run(words, pass_fds=[lock.fileno()], check=False)

    assert ended.returncode == 130
    assert run.end is not None
    assert status(run) == "KILLED"


def test_nobody_is_interrupted_whom_an_earlier_holder_has_named(run: RunDirectory) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS], start_new_session=True, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        holder = {"group": other.pid, "pid": other.pid, "host": platform.node()}
        run.lock.write_text(json.dumps(holder))
        lock = controller.hold_directory(run)
        assert lock is not None
        with lock:
            assert controller.hold_directory(run) is None
            assert run.alive
            controller.interrupt_controller(run)
            assert other.poll() is None
            lock.write(json.dumps(holder | {"host": "elsewhere"}).encode())
            lock.flush()
            with pytest.raises(UserError, match="runs on elsewhere"):
                controller.interrupt_controller(run)
            lock.truncate(0)
            lock.write(json.dumps(holder).encode())
            lock.flush()
            controller.interrupt_controller(run)
            assert other.wait(600) == -signal.SIGINT
    assert not run.alive


def test_what_the_controller_is_told(run: RunDirectory) -> None:
    environ = {
        "HOME": "/home/me", "SNAKEMAKE_MANTIK_TRACK": "none", "MLFLOW_RUN_ID": "other",
        "MLFLOW_TRACKING_URI": "https://me:hunter2@mlflow.org", "MANTIK_RUN_ID": "other",
    }  # fmt: skip
    request = replace(run.request, account="a1", site="my-site")
    run.write_request(request)

    made = controller.controller_environment(RunDirectory(run.path), environ)

    assert made["MLFLOW_TRACKING_URI"] == request.tracking_uri
    assert made["MANTIK_MY_SITE_COMPUTE_BUDGET_ACCOUNT"] == "a1"
    assert made["MANTIK_RUN_ID"] == request.run_id
    assert made["HOME"] == "/home/me"
    assert not {"SNAKEMAKE_MANTIK_TRACK", "MLFLOW_RUN_ID"} & made.keys()
    # A password is taken from the environment, where it is the same server.
    run.write_request(replace(request, tracking_uri="https://mlflow.org"))
    made = controller.controller_environment(RunDirectory(run.path), environ)
    assert made["MLFLOW_TRACKING_URI"] == "https://me:hunter2@mlflow.org"


def test_named_by_the_beginning_of_its_id_or_not_at_all(run: RunDirectory) -> None:
    twin = RunDirectory(run.path.with_name(run.request.run_id[:8] + "0" * 24))
    os.makedirs(twin.path)
    twin.write_request(replace(run.request, run_id=twin.path.name))
    with pytest.raises(UserError, match="matches several runs"):
        find_local_run(run.request.run_id[:8])
    with pytest.raises(UserError, match="matches several runs"):
        find_local_run("first")
    found = find_local_run(run.request.run_id)
    assert found is not None
    assert found.request == run.request
    with pytest.raises(UserError, match="there is no run 'gone'"):
        find_run("gone")
    assert find_local_run(f"../runs/{run.request.run_id}") is None


def test_why_a_job_cannot_start_is_listed_until_it_is_over(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDirectory, "gone", False)
    with closing(Journal(run.workdir / STATE)) as journal:
        sent = journal.new_attempt(site="alps", job="j", rule="main", name="main", fingerprint="f")
        journal.submitting(sent.id, "batch")
        journal.waiting(sent.id, "PartitionDown")
        assert listed() == [("SCHEDULED", "cannot start: PartitionDown")]
        shown = run_details(refresh(find_run(run.request.run_id)))
        assert shown["jobs"][0]["waiting_reason"] == "PartitionDown"
        assert "  state: SCHEDULED (cannot start: PartitionDown)" in run_lines(shown)
        journal.waiting(sent.id, "")
        assert listed() == [("SCHEDULED", "")]
        journal.waiting(sent.id, "PartitionDown")
        journal.abandoned(sent.id, "cancelled")
        assert listed() == [("SCHEDULED", "")]


def test_each_job_of_a_run_is_shown() -> None:
    alone = {"queue": "batch", "outcome": "succeeded", "segment": None, "segments": None}
    jobs = [alone | {"id": number} for number in ("1", "2")]
    run = {"run_id": "r", "state": "FINISHED", "note": ""}
    both = run_lines(run | {"jobs": jobs})
    assert "  jobs: 1, batch, succeeded; 2, batch, succeeded" in both
    assert "  job: 1, batch, succeeded" in run_lines(run | {"jobs": jobs[:1]})


def test_a_job_that_may_run_is_no_end(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Journal(run.workdir / STATE)) as journal:
        sent = journal.new_attempt(site="alps", job="j", rule="main", name="main", fingerprint="f")
        journal.submitting(sent.id, "batch")
    assert controller.start_controller(run)
    controller.wait_for_controller(run)
    assert run.end is None, run.log.read_text()
    # The site does not confirm it.
    monkeypatch.setattr(local_runs, "_smk_mantik", lambda *_: None)

    with pytest.raises(MantikError, match="did not confirm"):
        cancel_run(run, pytest.fail)

    assert run.end is None
    assert status(run) == "SCHEDULED"


def test_what_tracking_has_still_to_tell_goes_first(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []
    monkeypatch.setattr(controller, "start_worker", begun.append)
    written = Written(run.workdir, run.request.tracking_uri)
    record = written.job("t", run_id=run.request.run_id)
    written.end(record, "failed", exit_code=1)
    run.write_end(1)

    controller.settle_run(run)

    assert begun == [run.workdir]
    assert status(run) == "SCHEDULED"
    assert (listed(), begun.pop()) == ([("FAILED", LATE)], run.workdir)
    with closing(Cursor(run.workdir)) as cursor, open_log(run.workdir) as log:
        cursor.set(record.id, seq=log.events()[-1].seq)
    written.journal.close()

    controller.settle_run(run)

    # It has been told by tracking, with all that it knows.
    assert (begun, status(run)) == ([run.workdir], "SCHEDULED")
    assert run.reported.exists()


def test_an_end_stays_and_so_does_what_is_under_way(run: RunDirectory) -> None:
    store = RunStore(run.request.tracking_uri)
    store.end(run.request.run_id, "FINISHED")
    store.end(run.request.run_id, "KILLED", "too late")
    assert status(run) == "FINISHED"
    run.write_end(0)
    lock = controller.hold_directory(run)
    assert lock is not None
    with lock, pytest.raises(UserError, match="under way"):
        remove_run(run)
    assert run.path.exists()
    store.delete(run.request.run_id)
    assert store.run(run.request.run_id) is None


def test_what_is_listed(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert listed(site="alps") == listed(experiment="churn") == listed(since=1.0) == listed()
    assert len(listed()) == 1
    for nothing in ({"site": "daint"}, {"since": time.time() + 60}, {"state": "RUNNING"}):
        assert listed(**nothing) == []
    # To ask MLflow for a file that is not there would make it.
    assert not (tmp_path / "elsewhere.db").exists()
    # One store that does not answer is told, and the others are listed.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    assert [row.run_id for row in list_rows(RunFilter(), said.append)] == [run.request.run_id]
    assert len(said) == 1
    assert "127.0.0.1" in said[0]
