"""What people are told of a job that failed."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.engine import messages
from snakemake_executor_plugin_mantik.engine.messages import LastWords
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.script import STEPS
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase

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
    state = JobState(Phase.ENDED, Reason.UNKNOWN, detail=f"gone{CONTROL}")
    told = messages.stopped_message(state, "hpc1", LastWords(f"bad{CONTROL}\r\n".encode(), None))
    told += str(SiteRejected(f"no{CONTROL}", where=f"site{CONTROL}", do=f"do{CONTROL}"))
    assert not set(told) & set("\x1b\x07\x9b\r")
    assert "gone" in told


def test_jobs_that_wait_for_others_are_told_of_in_whole_sentences() -> None:
    assert messages.waiting_message("b", "hpc1", "7", []) == (
        "b: waits for the jobs that make its inputs at hpc1, as 7."
    )
    one = TryRecord(
        id="1", site="hpc1", bucket=0, job="b", rule="b", name="b", fingerprint="f",
        state=TryState.SUBMITTED,
    )  # fmt: skip
    assert messages.ahead_message([one]) == (
        "1 job waits at its site and starts without this machine when the jobs before it have"
        " ended: b."
    )
