"""What notices may not do: show a secret address, or disturb the run."""

import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from snakemake_executor_plugin_mantik.adapter.executor import Executor
from snakemake_executor_plugin_mantik.adapter.run_notices import RunNotices
from snakemake_executor_plugin_mantik.adapter.signals import Interruption
from snakemake_executor_plugin_mantik.adapter.workflow_metadata import describe_workflow
from snakemake_executor_plugin_mantik.notices.notice import RunOutcome

ADDRESS = "https://hooks.slack.com/services/T0/B0/s3cr3t"


@pytest.mark.parametrize("words", [["--mantik-notify", ADDRESS], [f"--mantik-notify={ADDRESS}"]])
def test_an_address_is_not_tracked_and_the_user_is_warned(
    words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["snakemake", "--jobs", "2", *words])
    workflow: Any = SimpleNamespace(
        executor_settings=SimpleNamespace(notify=ADDRESS),
        main_snakefile=Path("Snakefile"),
        config={},
        scheduler=None,
    )
    assert "s3cr3t" not in " ".join(describe_workflow(workflow).command)
    assert describe_workflow(workflow).command[:3] == ("snakemake", "--jobs", "2")
    RunNotices(workflow, ADDRESS, logging.getLogger("test"))
    assert "set SNAKEMAKE_MANTIK_NOTIFY" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_a_notice_that_cannot_be_sent_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    job = SimpleNamespace(
        jobid=1, rule=SimpleNamespace(name="a"), name="a", wildcards_dict={}, is_group=lambda: False
    )
    scheduler = SimpleNamespace(failed=[job], running=[job], finished_jobs=0)
    workflow: Any = SimpleNamespace(scheduler=scheduler, dag=[job])
    notices = RunNotices(workflow, "cat", logging.getLogger("test"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        notices.look(["here"])
        notices.look(["here"])  # is not repeated
        assert len(caplog.records) == 1
        notices.end(RunOutcome.FAILED, ["here"])
    notices.wait(at_once=False)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.text.count("A notice could not be sent (RuntimeError: can't start") == 2


def test_a_notice_never_keeps_a_run_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    class Broken:
        def end(self, *_: object) -> None:
            raise KeyboardInterrupt

        def wait(self, *, at_once: bool) -> None:
            done.append(f"waited {at_once}")

    monkeypatch.setattr(RemoteExecutor, "shutdown", lambda _: None)
    executor: Any = Executor.__new__(Executor)
    executor._notices, executor._ending = Broken(), "failed"
    executor._interruption = Interruption("ask")
    executor._close_run = done.append
    with pytest.raises(KeyboardInterrupt):
        executor.shutdown()
    assert done == ["failed", "waited False"]
