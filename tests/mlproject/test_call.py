from pathlib import PurePosixPath
from types import SimpleNamespace

from snakemake_executor_plugin_mantik.mlproject import Call, call_of

CALL = Call(PurePosixPath("churn"), "churn", "train", "d", {"alpha": "0.5"})


def test_the_call_of_a_job() -> None:
    assert call_of(SimpleNamespace(command="x", call=CALL)) is CALL
    assert call_of({"call": CALL}) is CALL


def test_other_jobs_make_no_call() -> None:
    assert call_of(SimpleNamespace(command="x", entry_point="train")) is None
    assert call_of(SimpleNamespace(call="me")) is None
    assert call_of({}) is None
