from pathlib import PurePosixPath
from types import SimpleNamespace

from snakemake_executor_plugin_mantik.mlproject import Call, read_call

CALL = Call(PurePosixPath("churn"), "churn", "train", "d", {"alpha": "0.5"})


def test_the_call_of_a_job() -> None:
    assert read_call(SimpleNamespace(command="x", call=CALL)) is CALL
    assert read_call({"call": CALL}) is CALL


def test_other_jobs_make_no_call() -> None:
    assert read_call(SimpleNamespace(command="x", entry_point="train")) is None
    assert read_call(SimpleNamespace(call="me")) is None
    assert read_call({}) is None
