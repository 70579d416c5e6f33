"""What the end of an attempt means, and what follows: a line for each."""

from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine.evidence import Evidence, Finding, judge
from snakemake_executor_plugin_mantik.engine.machine import (
    ANYWAY,
    IF_CHANGED,
    LISTED,
    Do,
    End,
    decide,
    find_lost_checkpoint,
    judge_failure,
    judge_silence,
    judge_start,
)
from snakemake_executor_plugin_mantik.engine.plan import NOTHING, plan_segment
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.segments import (
    Continuation,
    parse_continuation,
)
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase

CONTINUATION = Continuation(3, ("ckpt/",))
RECORD = AttemptRecord(
    "id", "hpc1", 1, "job", "train", "train", "print", AttemptState.SUBMITTED, segment=1, segments=3
)
ENDED = Marker(85, go_on="time_limit", changed=True)
ASKED = Marker(85, go_on="asked", changed=True)
STOPPED = Marker(143, signal="TERM", changed=True)
SET_UP = Reason.SET_UP


def over(reason: Reason | None, *, later: bool = False) -> JobState:
    return JobState(Phase.ENDED, reason, later=later)


@pytest.mark.parametrize("started", [True, False])
def test_a_rejected_submission_is_not_the_end_of_a_job_that_has_started(started: bool) -> None:
    """Another one may have started it, and a pool's refusal is about its next allocation."""
    known = Evidence(claimed=started, ids=["id"])
    known.hear({"id": over(Reason.REJECTED)})
    found = [judge(known, now, SiteSettings()) for now in (0.0, 1000.0)][1]
    assert found is (Finding.RUNNING if started else Finding.ENDED)


@pytest.mark.parametrize(
    ("known", "end", "reason"),
    [
        (Evidence(Finding.REVOKED), "again", Reason.SUCCESS),
        (Evidence(Finding.ENDED, state=over(Reason.SUCCESS)), "again", Reason.SUCCESS),
        (Evidence(state=over(Reason.SUCCESS), claimed=True), "failed", Reason.UNKNOWN),
        (Evidence(Finding.LOST, state=over(None), claimed=True), "failed", Reason.UNKNOWN),
        (Evidence(state=over(Reason.REJECTED)), "failed", Reason.REJECTED),
        (Evidence(state=over(Reason.REJECTED, later=True)), "later", Reason.REJECTED),
        (Evidence(state=over(Reason.LAUNCH_FAILURE, later=True)), "later", Reason.LAUNCH_FAILURE),
        (Evidence(state=over(Reason.REJECTED, later=True), claimed=True), "failed", "rejected"),
        (Evidence(state=over(Reason.OUT_OF_MEMORY), claimed=True), "failed", "out_of_memory"),
    ],
)
def test_an_end_without_a_marker(known: Evidence, end: str, reason: Reason) -> None:
    verdict = judge_silence(RECORD, known, None)
    assert (verdict.end, verdict.reason) == (End(end), reason)


def test_what_had_succeeded_and_left_no_marker_runs_again() -> None:
    record = replace(RECORD, state=AttemptState.ENDED)
    known = Evidence(Finding.LOST, state=over(None), claimed=True)
    assert judge_silence(record, known, None).end is End.AGAIN


@pytest.mark.parametrize(
    ("marker", "bundles", "found"),
    [
        (Marker(1), [], None),
        (Marker(1, failed_step="predecessors"), [], ((), (), False)),
        (Marker(1, failed_step="inputs", missing_inputs=("a",)), [], (("a",), (), False)),
        (Marker(1, failed_step="bundles"), ["b"], ((), ("b",), False)),
        (Marker(1, failed_step="bundles"), None, ((), (), True)),
        (Marker(1, failed_step="bundles"), [], None),
        (Marker(143, failed_step="bundles", signal="TERM"), ["b"], None),
        (Marker(1, failed_step="modules"), None, None),
    ],
)
def test_what_did_not_find_its_files_runs_again(
    marker: Marker, bundles: list[str] | None, found: tuple[object, ...] | None
) -> None:
    again = judge_start(RECORD, marker, None, bundles)
    assert (again and (again.missing, again.bundles, again.purged)) == found
    assert again is None or again.end is End.AGAIN


def test_what_follows_from_each_end() -> None:
    """Only a success frees those behind it, and nothing that is recorded as over is kept there."""
    for end in End:
        then = decide(end)
        assert (Do.FREE in then.todo) is (end is End.SUCCEEDED)
        assert (then.state is AttemptState.ENDED) is (end.value in ENDED_HERE)
        assert (then.outcome == "succeeded") is (end in (End.SUCCEEDED, End.KEPT))
        assert (Do.WITHDRAW in then.todo) is (end.value in ("failed", "again", "later", "refused"))
        # Whoever ends without its script may leave secrets there.
        assert (Do.SECRETS in then.todo) is (end not in (End.SUCCEEDED, End.KEPT))


ENDED_HERE = ("succeeded", "kept", "failed", "goes on")


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
    then = judge_failure(RECORD, marker, reason, CONTINUATION)
    assert (then.goes_on or None, then.end is End.GOES_ON) == (goes_on, goes_on is not None)
    last = judge_failure(replace(RECORD, segment=2), marker, reason, CONTINUATION)
    told = "segment 3 of 3" in last.why
    assert (last.goes_on, last.end, told) == (goes_on or "", End.FAILED, goes_on is not None)


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.NODE_FAILURE])
@pytest.mark.parametrize(
    ("marker", "goes_on"), [(replace(STOPPED, changed=False), LISTED), (None, ANYWAY)]
)
def test_what_is_not_the_jobs_fault_needs_no_progress(
    marker: Marker | None, reason: Reason, goes_on: str
) -> None:
    on = replace(CONTINUATION, on=frozenset({reason}))
    then = judge_failure(RECORD, marker, reason, on)
    assert (then.goes_on, then.end) == (goes_on, End.GOES_ON)


@pytest.mark.parametrize(("marker", "reason"), [(ENDED, "time_limit"), (ASKED, "exit_code")])
def test_without_progress_the_job_fails(marker: Marker, reason: str) -> None:
    then = judge_failure(RECORD, replace(marker, changed=False), Reason(reason), CONTINUATION)
    assert (then.end, then.goes_on, "ckpt/" in then.why) == (End.FAILED, "", True)


def test_a_lost_checkpoint_is_told_from_other_lost_files() -> None:
    following = replace(RECORD, follows="other")
    gone = Marker(1, failed_step="inputs", missing_inputs=("ckpt/last",))
    assert judge_start(following, gone, CONTINUATION, []) is None
    assert "the job begins anew" in judge_failure(following, gone, SET_UP, CONTINUATION).advice
    other = replace(gone, missing_inputs=("a",))
    for record, marker, on in (
        (RECORD, gone, CONTINUATION), (following, other, CONTINUATION), (following, gone, None)
    ):  # fmt: skip
        assert not find_lost_checkpoint(record, marker, on)
        again = judge_start(record, marker, on, [])
        assert again is not None
        assert (again.end, again.missing) == (End.AGAIN, marker.missing_inputs)


def test_a_segment_keeps_what_it_goes_on_from() -> None:
    request = JobRequest(
        1, "job", "train", "train", "hpc1", "true", "bash", {}, 1, {}, (),
        (OutputFile("model"), OutputFile("run", directory=True), OutputFile("log", "log")),
        continuation=replace(CONTINUATION, checkpoint=("run/ckpt/",)),
    )  # fmt: skip

    def kept(record: AttemptRecord) -> list[str]:
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
