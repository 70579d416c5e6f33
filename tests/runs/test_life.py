"""Runs from their submission to their end, through the real command, controller and site."""

from tests.runs.conftest import Runs
from tests.support.workflows import tells


def test_a_run(runs: Runs) -> None:
    run_id = runs.submit("-P", "alpha=2", "--name", "first")

    run = runs.over(run_id)

    assert run.info.status == "FINISHED", runs.log(run_id)
    assert run.data.params == {"alpha": "2", "data": "data.csv"}
    assert run.info.run_name == "first"
    tells(runs.tell("logs", "first").output, "alpha 2")
