"""What follows the end of a segment."""

from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.engine.segments import (
    ANYWAY,
    IF_CHANGED,
    LISTED,
    NOTHING,
    judge_segment,
    lost_checkpoint,
    plan_segment,
    without_checkpoint,
)
from snakemake_executor_plugin_mantik.jobs.markers import Marker, OutputEntry
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.segments import Continuation, parse_continuation
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState

CONTINUATION = Continuation(3, ("ckpt/",))
RECORD = TryRecord(
    "id", "hpc1", 1, "job", "train", "train", "print", TryState.SUBMITTED, segment=1, segments=3
)
ENDED = Marker(85, go_on="time_limit", changed=True)
ASKED = Marker(85, go_on="asked", changed=True)
STOPPED = Marker(143, signal="TERM", changed=True)


@pytest.mark.parametrize(
    ("marker", "reason", "goes_on"),
    [
        (ENDED, Reason.TIME_LIMIT, LISTED),
        (ASKED, Reason.EXIT_CODE, LISTED),
        (STOPPED, Reason.TIME_LIMIT, LISTED),
        (None, Reason.TIME_LIMIT, IF_CHANGED),
        (replace(ENDED, bare=True), Reason.TIME_LIMIT, IF_CHANGED),
        (ENDED, Reason.CANCELLED, None),
        (STOPPED, Reason.CANCELLED, None),
        (STOPPED, Reason.PREEMPTED, None),
        (None, Reason.NODE_FAILURE, None),
        (Marker(1), Reason.EXIT_CODE, None),
        (Marker(137), Reason.OUT_OF_MEMORY, None),
    ],
)
def test_only_some_ends_are_followed_by_another_segment(
    marker: Marker | None, reason: Reason, goes_on: str | None
) -> None:
    then = judge_segment(CONTINUATION, RECORD, marker, reason)
    assert (then and then.goes_on) == goes_on
    if then is not None:
        assert not then.failure
        last = judge_segment(CONTINUATION, replace(RECORD, segment=2), marker, reason)
        assert last is not None
        assert (last.goes_on, "segment 3 of 3" in last.failure) == (goes_on, True)


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.NODE_FAILURE])
@pytest.mark.parametrize(
    ("marker", "goes_on"), [(replace(STOPPED, changed=False), LISTED), (None, ANYWAY)]
)
def test_what_is_not_the_jobs_fault_needs_no_progress(
    marker: Marker | None, reason: Reason, goes_on: str
) -> None:
    on = replace(CONTINUATION, on=frozenset({reason}))
    then = judge_segment(on, RECORD, marker, reason)
    assert then is not None
    assert (then.goes_on, then.failure) == (goes_on, "")


@pytest.mark.parametrize(("marker", "reason"), [(ENDED, "time_limit"), (ASKED, "exit_code")])
def test_without_progress_the_job_fails(marker: Marker, reason: str) -> None:
    then = judge_segment(CONTINUATION, RECORD, replace(marker, changed=False), Reason(reason))
    assert then is not None
    assert (then.goes_on, "ckpt/" in then.failure) == ("", True)


def test_a_lost_checkpoint_is_told_from_other_lost_files() -> None:
    following = replace(RECORD, follows="other")
    gone = Marker(1, failed_step="inputs", missing_inputs=("ckpt/last",))
    assert lost_checkpoint(CONTINUATION, following, gone) is not None
    assert lost_checkpoint(CONTINUATION, RECORD, gone) is None
    assert lost_checkpoint(CONTINUATION, following, replace(gone, missing_inputs=("a",))) is None
    assert lost_checkpoint(None, following, gone) is None


def test_the_checkpoint_is_not_fetched() -> None:
    entries = tuple(
        OutputEntry(path, "f", 1, 0o644, "sum", "stored") for path in ("ckpt/a", "ckpts", "log")
    )
    rest, kept = without_checkpoint(CONTINUATION, replace(ENDED, files=entries))
    assert [entry.path for entry in rest.files] == ["ckpts", "log"]
    assert [(file.path, file.sha256) for file in kept] == [("ckpt/a", "sum")]


def test_a_segment_keeps_what_it_goes_on_from() -> None:
    request = JobRequest(
        1, "job", "train", "train", "hpc1", "true", "bash", {}, 1, {}, (),
        (OutputFile("model"), OutputFile("run", directory=True), OutputFile("log", "log")),
        continuation=replace(CONTINUATION, checkpoint=("run/ckpt/",)),
    )  # fmt: skip

    def kept(record: TryRecord) -> list[str]:
        return [o.path for o in plan_segment(request, record, 60, NOTHING)[1] if o.keep]

    assert kept(RECORD) == []
    assert kept(replace(RECORD, follows="other")) == ["run", "log", "run/ckpt"]


def test_its_resources_are_read() -> None:
    assert parse_continuation({}, []) is None
    assert parse_continuation({"mantik_continue": 0, "mantik_warn": "5m"}, []) is None
    assert parse_continuation({"mantik_continue": "2"}, ["state"]) == Continuation(2, ("state",))
    # The backend config's number is for rules with a checkpoint, unless these say so themselves.
    assert parse_continuation({}, [], 5) is None
    assert parse_continuation({"mantik_checkpoint": "a"}, [], 5) == Continuation(5, ("a",))
    assert parse_continuation({}, ["state"], 5) == Continuation(5, ("state",))
    assert parse_continuation({"mantik_continue": 2}, ["state"], 5) == Continuation(2, ("state",))
    assert parse_continuation({"mantik_continue": 0}, ["state"], 5) is None
    given = {
        "mantik_continue": 4,
        "mantik_checkpoint": "./a b/",
        "mantik_warn": "5m",
        "mantik_continue_on": "time_limit preempted node_fail",
    }
    reasons = frozenset({Reason.TIME_LIMIT, Reason.PREEMPTED, Reason.NODE_FAILURE})
    assert parse_continuation(given, []) == Continuation(4, ("a", "b/"), reasons, 300)


def test_the_warning_fits_the_walltime() -> None:
    assert [CONTINUATION.warning_s(s) for s in (60, 1200, 86400)] == [6, 120, 120]
