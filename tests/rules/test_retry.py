"""Resources that grow after attempts that failed for want of them."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik import retry
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.retry import failures, grows, last_failure

WILDCARDS = {"sample": "a b", "part": "1"}


@pytest.fixture(autouse=True)
def _workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(retry, "_run_by_mantik", True)


def failed(*reasons: str, name: str = "train sample=a b, part=1") -> None:
    """Write attempts of a job into the journal; `succeeded` is one that did not fail."""
    with closing(Journal(STATE)) as journal:
        for reason in reasons:
            record = journal.new_attempt(
                site="hpc1", job="j", rule="train", name=name, fingerprint="f"
            )
            outcome, why = ("failed: x", reason) if reason != "succeeded" else (reason, "")
            journal.ended(record.id, outcome, waited=None, ran=None, log="", reason=why)
            journal.done(record.id)


def value(function: Any, attempt: int = 1, **given: Any) -> Any:
    return function(WILDCARDS, rulename="train", attempt=attempt, **given)


def test_only_its_own_reasons_raise_it() -> None:
    memory = grows(1000, on="out_of_memory, cancelled", factor=1.5, at_most=2000)
    time = grows(60, on="time_limit")
    assert (value(memory), value(time)) == (1000, 60)
    failed("out_of_memory", "exit_code", "node_failure")
    assert (value(memory, attempt=4), value(time, attempt=4)) == (1500, 60)
    failed("cancelled", "time_limit", "time_limit", "out_of_memory")
    assert (value(memory), value(time)) == (2000, 240)
    assert failures("train", WILDCARDS)[:2] == ["out_of_memory", "time_limit"]
    assert last_failure("train", WILDCARDS) == "out_of_memory"


def test_a_success_and_other_jobs_do_not_count() -> None:
    failed("out_of_memory", name="train sample=a b, part=2")
    failed("out_of_memory", name="test sample=a b, part=1")
    failed("out_of_memory", "succeeded")
    assert value(grows(10, on="out_of_memory")) == 10
    assert last_failure("train", WILDCARDS) is None


def test_another_executor_tells_no_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_run_by_mantik", False)
    memory = grows(10, on="out_of_memory")
    assert [value(memory, attempt=n) for n in (1, 2, 3)] == [10, 20, 40]


def test_the_first_value_may_be_a_function() -> None:
    failed("out_of_memory")
    given: dict[str, Any] = {"input": ["a", "b"], "threads": 4, "async_run": None}

    def first(wildcards: Any, input: list[str], threads: int) -> int:  # noqa: A002 - Snakemake's
        return len(input) * threads

    assert value(grows(first, on="out_of_memory"), **given) == 16
    assert value(grows(lambda wildcards: int(wildcards["part"]), on="out_of_memory"), **given) == 2
    assert value(grows(lambda wildcards, attempt: "<TBD>", on="unknown"), **given) == "<TBD>"


@pytest.mark.parametrize(
    "wrong",
    [
        {"on": "oom"},
        {"on": ""},
        {"on": "preempted", "factor": 1},
        {"on": "preempted", "at_most": 0},
    ],
)
def test_mistakes(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        grows(1, **wrong)
