"""What notices say, and what they may not do: show a secret, or disturb the run."""

import json
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from snakemake_executor_plugin_mantik.adapter import run_notices
from snakemake_executor_plugin_mantik.adapter.executor import SiteExecutor
from snakemake_executor_plugin_mantik.adapter.run_notices import RunNotices
from snakemake_executor_plugin_mantik.adapter.signals import Interruption
from snakemake_executor_plugin_mantik.adapter.workflow_metadata import describe_workflow
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.engine.request import JobNumber, Outcome
from snakemake_executor_plugin_mantik.jobs.reasons import Reason

SECRET = "T0/B0/s3cr3t"


def workflow_of(failed: int, **others: Any) -> Any:
    jobs = [
        SimpleNamespace(
            jobid=n, rule=SimpleNamespace(name="train"), name="train", wildcards_dict={"n": n},
            is_group=lambda: False,
        )
        for n in range(9)
    ]  # fmt: skip
    scheduler = SimpleNamespace(failed=jobs[:failed], running=jobs[failed:], finished_jobs=4)
    return SimpleNamespace(scheduler=scheduler, dag=jobs, **others)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "wf"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def test_the_command_gets_what_the_pages_say(here: Path) -> None:
    (here / "my notify").write_text('#!/bin/sh\n[ "$1" = "a b" ] && cat > got.json\n')
    (here / "my notify").chmod(0o755)
    what = "It needed more memory.\nSee above."
    outcomes: dict[JobNumber, Outcome] = {
        n: Outcome(n, "", False, what, site="hpc", site_job="17", reason=Reason.OUT_OF_MEMORY)
        for n in range(4)
    }
    logger = logging.getLogger("test")
    notices = RunNotices(workflow_of(5), "'./my notify' 'a b'", logger, outcomes)
    notices.end("failed", ["hpc"])
    notices.wait(at_once=False)
    got = json.loads((here / "got.json").read_text())
    why = " at hpc (out of memory)"
    assert got["text"].startswith("wf: failed after ")
    assert got["text"].endswith(
        f"; 4 of 9 jobs done, 5 failed: train n=0{why}, train n=1{why}, train n=2{why} and 2 more."
    )
    assert (got["event"], got["outcome"], got["sites"]) == ("finished", "failed", ["hpc"])
    assert (got["done"], got["total"], got["running"], got["failed"]) == (4, 9, 0, 5)
    assert got["failed_jobs"][0] == {
        "job": "train n=0", "rule": "train", "site": "hpc", "site_job": "17",
        "reason": "out_of_memory", "message": "It needed more memory.", "log": "",
    }  # fmt: skip
    assert got["failed_jobs"][4]["reason"] is None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sh -c 'echo one; echo why >&2; exit 3'", "sh ended with exit code 3: why."),
        (f"sh -c 'echo no {SECRET}; exit 3'", "sh ended with exit code 3: no …."),
        ("sh -c 'sleep 1000 & wait'", "sh did not end within 0 s and was ended."),
        ("./gone", "gone cannot be run (No such file or directory)."),
    ],
)
def test_a_failure_of_the_command_is_a_warning_without_a_secret(
    command: str, words: str, here: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (here / "gone").touch(0o755)
    notices = RunNotices(workflow_of(1), command, logging.getLogger("test"), {})
    (here / "gone").unlink()
    if "sleep" in command:
        monkeypatch.setattr(run_notices, "COMMAND_WAIT_S", 0.3)
    notices.end("failed", ["hpc"])
    notices.wait(at_once=False)
    [record] = caplog.records
    assert record.getMessage() == f"The notice of the run's end could not be delivered: {words}"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("  ", "there is no command ''"),
        (f"https://host/{SECRET}", "there is no command 'https'"),
        ("no-such-command --now", "there is no command 'no-such-command'"),
        ("./script", "there is no command './script'"),
        ("echo 'x", "cannot be read"),
    ],
)
def test_what_is_no_command_is_refused(setting: str, words: str, here: Path) -> None:
    (here / "script").write_text("#!/bin/sh\n")  # not executable
    with pytest.raises(UserError) as refused:
        RunNotices(None, setting, logging.getLogger("test"), {})
    assert words in str(refused.value)
    assert SECRET not in str(refused.value)


COMMAND = f"cat https://hooks.slack.com/services/{SECRET}"


@pytest.mark.parametrize("words", [["--mantik-notify", COMMAND], [f"--mantik-notify={COMMAND}"]])
def test_a_command_is_not_tracked_and_the_user_is_warned(
    words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["snakemake", "--jobs", "2", *words])
    workflow = workflow_of(
        0, executor_settings=SimpleNamespace(notify=COMMAND), main_snakefile="Snakefile", config={}
    )
    assert "s3cr3t" not in " ".join(describe_workflow(workflow).command)
    assert describe_workflow(workflow).command[:3] == ("snakemake", "--jobs", "2")
    RunNotices(workflow, COMMAND, logging.getLogger("test"), {})
    assert "set SNAKEMAKE_MANTIK_NOTIFY" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_a_notice_that_cannot_be_sent_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    notices = RunNotices(workflow_of(1), "cat", logging.getLogger("test"), {})
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        notices.look(["here"])
        notices.look(["here"])  # is not repeated
        assert len(caplog.records) == 1
        notices.end("failed", ["here"])
    notices.wait(at_once=False)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.text.count("could not be sent (RuntimeError: can't start") == 2


def test_a_notice_never_keeps_a_run_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    class Broken:
        def end(self, *_: object) -> None:
            raise KeyboardInterrupt

        def wait(self, *, at_once: bool) -> None:
            done.append(f"waited {at_once}")

    monkeypatch.setattr(RemoteExecutor, "shutdown", lambda _: None)
    executor: Any = SiteExecutor.__new__(SiteExecutor)
    executor._notices, executor._ending = Broken(), "failed"
    executor._interruption = Interruption("ask")
    executor._close_run = done.append
    with pytest.raises(KeyboardInterrupt):
        executor.shutdown()
    assert done == ["failed", "waited False"]
