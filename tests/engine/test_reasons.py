"""Why a job failed that could still write its marker: what the scheduler says is asked for."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine import messages
from snakemake_executor_plugin_mantik.engine.ending import find_reason
from snakemake_executor_plugin_mantik.engine.machine import End, decide
from snakemake_executor_plugin_mantik.engine.messages import LastWords, failed_message
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.script import STEPS
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site
from tests.support import virtualtime

RUNNING = JobState(Phase.RUNNING)
FAILED = JobState(Phase.ENDED, Reason.EXIT_CODE)
OOM = JobState(Phase.ENDED, Reason.OUT_OF_MEMORY)
PREEMPTED = JobState(Phase.ENDED, Reason.PREEMPTED)
TERM = Marker(143, signal="TERM")
KILLED = Marker(137)


class Scheduler:
    """Says one thing after the other; the last one for ever. `details` are what it explains."""

    states_lag = False

    def __init__(self, said: list[JobState | Exception], details: JobState | None = None) -> None:
        self.said, self.details = said, details
        self.asked = 0
        self.tags: list[dict[str, str] | None] = [{}]

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        self.asked += 1
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        return dict.fromkeys(ids, said)

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        """Of a submission that nobody heard the answer to."""
        if self.tags[0] is None:
            self.tags.pop(0)
            raise SiteUnreachable("not now")
        known = self.tags[0]
        return {tag: [job for job, its in known.items() if its == tag] for tag in names}

    async def get(self, path: str, *, size: int | None = None) -> AsyncIterator[bytes]:
        """The claim."""
        yield b"scheduler_job=7\nhost=n\n"

    async def explain(self, job_id: str) -> JobState:
        if self.details is None:
            raise SiteNotFound("nothing more")
        return self.details


RECORD = AttemptRecord(
    id="attempt", site="sim", bucket=0, job="j", rule="r", name="r", fingerprint="f",
    state=AttemptState.SUBMITTED,
)  # fmt: skip


def reason(
    marker: Marker, scheduler: Scheduler, *ids: str, ran: float = 0.0, limit: float = 3600.0
) -> Reason:
    site = cast("Site", scheduler)
    marker = replace(marker, started=1e9, ended=1e9 + ran)
    return virtualtime.run(
        find_reason(site, SiteSettings(), marker, RECORD, ids=list(ids), limit=limit)
    )[0]


@pytest.mark.parametrize(
    ("marker", "said", "details", "found"),
    [
        (KILLED, [OOM], None, "out_of_memory"),
        (KILLED, [FAILED], OOM, "out_of_memory"),
        (KILLED, [RUNNING, SiteUnreachable("x"), OOM], None, "out_of_memory"),
        (KILLED, [FAILED], None, "exit_code"),
        (KILLED, [SiteUnreachable("for ever")], None, "exit_code"),
        (KILLED, [RUNNING], None, "exit_code"),
        (TERM, [PREEMPTED], None, "preempted"),
        (TERM, [JobState(Phase.ENDED, Reason.TIME_LIMIT)], None, "time_limit"),
        (TERM, [FAILED], None, "cancelled"),
        # The command alone has heard it.
        (Marker(143), [PREEMPTED], None, "preempted"),
        (Marker(143), [JobState(Phase.ENDED, Reason.CANCELLED)], None, "cancelled"),
        (Marker(143), [FAILED], None, "exit_code"),
    ],
)
def test_the_scheduler_is_asked_after_a_signal(
    marker: Marker, said: list[JobState | Exception], details: JobState | None, found: str
) -> None:
    assert reason(marker, Scheduler(said, details), "1") == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (JobState(Phase.ENDED, Reason.TIME_LIMIT), "time_limit"),
        (FAILED, "exit_code"),
        (SiteUnreachable("for ever"), "exit_code"),
    ],
)
@pytest.mark.parametrize("code", [1, 143])
def test_the_scheduler_is_asked_of_what_fails_when_its_time_is_over(
    code: int, said: JobState | Exception, found: str
) -> None:
    """What reads from a process that the scheduler ended may end by itself, with a code of its
    own, before the script is told."""
    assert reason(Marker(code), Scheduler([said]), "1", ran=3570) == found


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ([{"1": "attempt"}], "time_limit"),
        ([None, {"1": "attempt"}], "time_limit"),
        ([{"1": "other"}], "cancelled"),
    ],
)
def test_job_whose_id_nobody_heard_is_asked_for_by_its_tag(
    tags: list[dict[str, str] | None], found: str
) -> None:
    scheduler = Scheduler([JobState(Phase.ENDED, Reason.TIME_LIMIT)])
    scheduler.tags = tags
    assert reason(TERM, scheduler) == found


@pytest.mark.parametrize(
    ("marker", "ran", "found"),
    [
        (Marker(1), 0, "exit_code"),
        (Marker(139), 0, "exit_code"),
        (Marker(1, failed_step="modules"), 3600, "set_up"),
        (Marker(137, failed_step="image"), 0, "set_up"),
    ],
)
def test_it_is_not_asked_where_the_marker_says_enough(
    marker: Marker, ran: float, found: str
) -> None:
    scheduler = Scheduler([OOM])
    assert reason(marker, scheduler, "1", ran=ran) == found
    assert not scheduler.asked


@pytest.mark.parametrize(
    ("limit", "ran", "found"),
    [
        # With walltimes of a minute and less every end would be near that of the time.
        (60, 3, "cancelled"), (60, 45, "cancelled"), (60, 55, "time_limit"), (60, 61, "time_limit"),
        (10, 1, "cancelled"), (10, 10, "time_limit"), (1, 0, "cancelled"),
        (300, 200, "cancelled"), (300, 280, "time_limit"),
        (3600, 3500, "cancelled"), (3600, 3545, "time_limit"),
        (86400, 84000, "cancelled"), (86400, 85000, "time_limit"),
    ],
)  # fmt: skip
def test_a_signal_near_the_end_of_the_walltime(limit: float, ran: float, found: str) -> None:
    """Nobody says why; the time alone tells."""
    assert reason(TERM, Scheduler([FAILED]), "1", ran=ran, limit=limit) == found


@pytest.mark.parametrize("said", [Reason.CANCELLED, Reason.PREEMPTED, Reason.NODE_FAILURE])
def test_the_schedulers_word_counts_more_than_the_time(said: Reason) -> None:
    """A job that was told to end just before its time, and took some of it to do so."""
    scheduler = Scheduler([JobState(Phase.ENDED, said)])
    assert reason(TERM, scheduler, "1", ran=3700) == said


def test_only_what_somebody_cancelled_counts_as_killed() -> None:
    """Whoever heard of it: the script, or its command alone with exit code 143."""
    cancelled = [JobState(Phase.ENDED, Reason.CANCELLED)]
    for marker in (TERM, Marker(143)):
        assert decide(End.FAILED, reason(marker, Scheduler([*cancelled]), "1")).how == "killed"
    assert [r for r in Reason if decide(End.FAILED, r).how == "killed"] == [Reason.CANCELLED]


@pytest.mark.parametrize(
    ("marker", "why", "words"),
    [
        (KILLED, Reason.OUT_OF_MEMORY, ["ended by SIGKILL: out of memory", "Request more memory"]),
        (KILLED, Reason.EXIT_CODE, ["ended by SIGKILL", "This often means a lack of memory"]),
        (TERM, Reason.PREEMPTED, ["ended by a signal (TERM): preempted", "in favour of another"]),
        (TERM, Reason.CANCELLED, ["ended by a signal (TERM) (hpc1", "was cancelled at the site"]),
        (TERM, Reason.TIME_LIMIT, ["reached its time limit", "Request more time"]),
    ],
)
def test_the_reason_is_told(marker: Marker, why: Reason, words: list[str]) -> None:
    told = failed_message(marker, "hpc1, 17", LastWords(b"", None), why)
    assert [word for word in words if word not in told] == []


def test_a_job_that_waits_again_was_not_cancelled() -> None:
    """But for some seconds after its end, firecREST may say so of any; and what waits may be
    another start of the same submission."""
    waiting, other = (JobState(Phase.WAITING, scheduler_id=one) for one in ("7", "8"))
    assert reason(TERM, Scheduler([waiting]), "1") is Reason.PREEMPTED
    assert reason(TERM, Scheduler([other]), "1") is Reason.CANCELLED
    cancelled = JobState(Phase.ENDED, Reason.CANCELLED)
    assert reason(TERM, Scheduler([waiting, waiting, cancelled]), "1") is Reason.CANCELLED


# What people are told of a job that failed.


LOG = Path("logs/x.log")
CONTROL = "\x1b]0;title\x07\x1b[2J\x9b31m"


def failed(exit_code: int = 1, **values: str) -> str:
    marker = Marker(exit_code, **values)  # type: ignore[arg-type]
    return messages.failed_message(
        marker, "hpc1, 17", LastWords(b"the end\n", LOG), Reason.EXIT_CODE
    )


@pytest.mark.parametrize("step", STEPS)
def test_every_step_has_its_words(step: str) -> None:
    told = failed(failed_step=step)
    assert told.startswith("The job failed before its command, ")
    assert "in its set-up" not in told
    assert "the end" in told
    assert str(LOG) in told


def test_a_step_that_nobody_knows() -> None:
    assert "in its set-up" in failed(failed_step=f"{CONTROL}x")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exit code 1 (hpc1, 17)."),
        (137, "exit code 137, which means that it was ended by SIGKILL (hpc1, 17)."),
        (139, "ended by SIGSEGV"),
        (128, "exit code 128 (hpc1, 17)."),
        (255, "exit code 255 (hpc1, 17)."),
    ],
)
def test_exit_codes(code: int, words: str) -> None:
    told = failed(code)
    assert words in told
    assert ("mem_mb=" in told) == (code == 137)


def test_no_text_of_others_reaches_the_terminal_raw() -> None:
    state = JobState(Phase.ENDED, Reason.UNKNOWN, detail=f"{CONTROL}gone.")
    told = messages.stopped_message(state, "hpc1", LastWords(f"bad{CONTROL}\r\n".encode(), None))
    told += str(SiteRejected(f"no{CONTROL}", where=f"site{CONTROL}", do=f"do{CONTROL}"))
    assert not set(told) & set("\x1b\x07\x9b\r")
    assert "gone (hpc1)." in told


def test_jobs_that_wait_for_others_are_told_of_in_whole_sentences() -> None:
    assert messages.waiting_message("b", "hpc1", "7", []) == (
        "b: waits for the jobs that make its inputs at hpc1, as 7."
    )
    one = AttemptRecord(
        id="1", site="hpc1", bucket=0, job="b", rule="b", name="b", fingerprint="f",
        state=AttemptState.SUBMITTED,
    )  # fmt: skip
    assert messages.presubmitted_message([one]) == (
        "1 job waits at its site and starts without this machine when the jobs before it have"
        " ended: b."
    )
