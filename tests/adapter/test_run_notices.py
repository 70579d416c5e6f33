"""What becomes of a secret address on the command line."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.adapter.run_notices import RunNotices
from snakemake_executor_plugin_mantik.adapter.workflow_metadata import describe_workflow

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
