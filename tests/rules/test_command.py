"""What stands in `shell:`, evaluated in each job."""

from types import SimpleNamespace
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.errors import UserError
from snakemake_executor_plugin_mantik.rules.command import _declared


def shell(command: str, **_: object) -> None:
    raise AssertionError(f"this ran: {command}")


def job(run: Any) -> Any:
    return SimpleNamespace(rule=SimpleNamespace(run_func=run, name="a"))


def test_an_expression_sees_the_things_of_the_job_and_runs_nothing() -> None:
    word = "closed over"

    def run(output: list[str], threads: int, conda_env: object, marker: bool = True) -> None:
        shell(f"cat {output[0]} {threads} {conda_env} {word} {{input}}", bench_record=None)

    found = _declared(job(run), {"output": ["x"], "threads": 3, "input": ["y"]})
    assert found == "cat x 3 None closed over {input}"


def test_an_expression_that_fails_names_the_rule() -> None:
    def run(output: list[str]) -> None:
        shell(f"touch {output[1]}")

    with pytest.raises(UserError, match=r"rule a: .*shell: cannot be evaluated: IndexError"):
        _declared(job(run), {"output": ["x"]})
