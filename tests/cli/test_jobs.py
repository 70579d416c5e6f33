import io
import json
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from snakemake_executor_plugin_mantik.cli import shared
from snakemake_executor_plugin_mantik.cli.watch import jobs, jobs_table
from snakemake_executor_plugin_mantik.common.errors import JournalError
from snakemake_executor_plugin_mantik.journal import Journal, read_history
from snakemake_executor_plugin_mantik.views.workflow import (
    Condition,
    overview_jobs,
    present_attempts,
)

STATE = Path(".snakemake", "mantik")


def shown(directory: Path, *, controlled: bool = False) -> str:
    console = Console(width=250, record=True, file=io.StringIO())
    records = read_history(directory / STATE)
    now = (records[0].submitted or 0.0) + 60.0
    console.print(jobs_table(overview_jobs(records, controlled=controlled), now, console.width))
    return console.export_text()


def make(journal: Journal, job: str, name: str) -> str:
    record = journal.new_attempt(site="hpc1", job=job, rule="train", name=name, fingerprint="f")
    journal.submitting(record.id, "batch", 7200)
    return record.id


def test_segments_are_numbered(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / STATE)) as journal:
        journal.new_attempt(
            site="hpc1", job="a", rule="train", name="train", fingerprint="f",
            segment=2, segments=10, follows="another",
        )  # fmt: skip
    assert "segment 3 of 10: planned" in shown(tmp_path)


def test_the_present_segment_is_shown(tmp_path: Path) -> None:
    directory = tmp_path / STATE
    with closing(Journal(directory)) as journal:

        def segment(number: int, follows: str) -> str:
            record = journal.new_attempt(
                site="hpc1", job="a", rule="train", name="train", fingerprint="f",
                segment=number, segments=10, follows=follows,
            )  # fmt: skip
            journal.submitting(record.id, "batch", 7200)
            journal.submitted(record.id, f"site-{number}")
            return record.id

        def present() -> list[str]:
            return [record.id for record in present_attempts(read_history(directory))]

        ids = [segment(0, "")]
        for number in (1, 2):
            ids.append(segment(number, ids[-1]))
        assert present() == ids[:1]
        assert "segment 3 of 10: waits for segment 2 of 10" in shown(tmp_path)
        journal.ended(ids[0], "goes on (time limit)", waited=1.0, ran=2.0, log="")
        assert present() == ids[1:2]
        # Another attempt takes the place of a segment; what waits behind that one is not needed.
        journal.abandoned(ids[1], "failed: its inputs changed")
        journal.abandoned(ids[2], "cancelled")
        ids.append(segment(1, ids[0]))
        assert present() == ids[3:]
        journal.ended(ids[3], "succeeded", waited=1.0, ran=2.0, log="")
        assert present() == ids[3:]
        states = [job.condition for job in overview_jobs(read_history(directory), controlled=True)]
        assert states[0] is Condition.WENT_ON


def test_each_job_has_a_line_with_what_became_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / STATE)
    running = make(journal, "a", "train x=1")
    journal.submitted(running, "site-7")
    finished = make(journal, "b", "train [bold]x=2")
    journal.submitted(finished, "site-8")
    journal.ended(finished, "succeeded", waited=62.0, ran=3661.0, log="")
    failed = make(journal, "c", "train \x1b[31mx=3\x07")
    journal.ended(failed, "failed: it", waited=None, ran=None, log="", reason="out_of_memory")
    journal.close()
    lines = shown(tmp_path).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["train", "x=1", "hpc1", "batch", "site-7", "1", "waiting", "or", "running"],
        [
            *("train", "[bold]x=2", "hpc1", "batch", "site-8", "1"),
            *("1", "min", "2", "s", "1", "h", "1", "min", "succeeded"),
        ],
        ["train", "[31mx=3", "hpc1", "batch", "1", "failed", "(out", "of", "memory):", "it"],
    ]


def test_in_a_narrow_terminal_each_job_is_one_line_and_a_failed_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Journal(tmp_path / STATE)) as journal:
        for seed in (1, 2):
            one = journal.new_attempt(
                site="hpc1", job=f"{seed}", rule="a_rule_with_a_name", fingerprint="f",
                name=f"a_rule_with_a_name configuration=a_very_long_value, seed={seed}",
            )  # fmt: skip
            journal.submitting(one.id, "batch", 7200)
            journal.submitted(one.id, f"site-{seed}")
            said = f"failed: The command ended with exit code 3 (hpc1, site-{seed})."
            journal.ended(one.id, said, waited=1.0, ran=2.0, log="", reason="exit_code")
    terminal = Console(width=80, record=True, file=io.StringIO())
    monkeypatch.setattr(shared, "make_console", lambda: terminal)
    jobs(tmp_path)
    first, second = terminal.export_text().splitlines()[1:]
    for seed, line in ((1, first), (2, second)):
        start = [
            "a_rule_with_a_name",
            "c…_long_value,",
            f"seed={seed}",
            "hpc1",
            f"site-{seed}",
            "failed",
        ]
        assert line.split()[:6] == start
    jobs(tmp_path, failed=True)
    column = first.index("failed")
    words = " ".join(line[column:].strip() for line in terminal.export_text().splitlines())
    assert words.count("failed (exit code): The command ended with exit code 3.") == 2


def test_only_the_last_attempt_of_a_job_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / STATE)
    first = make(journal, "a", "train x=1")
    journal.abandoned(first, "cancelled")
    make(journal, "a", "train x=1")
    journal.close()
    jobs(tmp_path)
    assert capsys.readouterr().out.count("train x=1") == 1
    jobs(tmp_path, every=True)
    out = capsys.readouterr().out
    assert out.count("train x=1") == 2
    assert "cancelled" in out


def test_a_directory_without_jobs_is_told(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no job has been submitted"):
        jobs(tmp_path)


def test_what_may_still_run_is_always_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / STATE)
    journal.left_behind(make(journal, "a", "train x=1"), "/old")
    make(journal, "a", "train x=1")
    journal.close()
    jobs(tmp_path)
    out = capsys.readouterr().out
    assert out.count("train x=1") == 2
    assert "left in /old; may still run" in out


def test_a_job_that_waits_for_others_names_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path / STATE)
    first = make(journal, "a", "prepare")
    second = journal.new_attempt(
        site="hpc1", job="b", rule="train", name="train", fingerprint="f", makers={"x": first}
    )
    journal.submitting(second.id, "batch")
    journal.submitted(second.id, "site-8")
    assert "waits for prepare" in shown(tmp_path)
    journal.ended(first, "succeeded", waited=None, ran=None, log="")
    assert shown(tmp_path).splitlines()[2].endswith("waiting or running")
    journal.close()


def test_what_the_controller_has_seen_is_shown(tmp_path: Path) -> None:
    """Its reason to wait, its turn among the reasons; since when it runs, and how long it may."""
    journal = Journal(tmp_path / STATE)
    waiting, running, taken_up = (make(journal, job, f"train {job}") for job in ("a", "b", "c"))
    for number, attempt_id in enumerate((waiting, running, taken_up)):
        journal.submitted(attempt_id, f"site-{number}")
    journal.pending(waiting, "Priority")
    began = read_history(tmp_path / STATE)[1].submitted or 0.0
    journal.started(running, began + 30.0)
    journal.started(running, began + 50.0)  # the next controller has seen it, too
    journal.started(taken_up, 0.0)
    journal.close()
    lines = [" ".join(line.split()) for line in shown(tmp_path, controlled=True).splitlines()]
    assert lines[1].endswith("site-0 1 1 min waiting: Priority (other jobs come first)")
    assert lines[2].endswith("site-1 1 30 s 30 s running, at most 2 h")
    assert lines[3].endswith("site-2 1 running, at most 2 h"), "since when is not known"
    unwatched = " ".join(shown(tmp_path).splitlines()[2].split())
    assert unwatched.endswith("site-1 1 30 s running when last seen"), "it may have ended since"


def test_json_and_only_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / STATE)
    first = make(journal, "a", "train x=1")
    journal.ended(first, "failed: it", waited=3.0, ran=4.0, log="l", reason="time_limit")
    journal.done(first)
    make(journal, "a", "train x=1")
    failed = make(journal, "b", "train x=2")
    journal.ended(failed, "failed: it", waited=3.0, ran=4.0, log="l", reason="time_limit")
    journal.close()
    jobs(tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(job["job"], job["attempt"], job["state"]) for job in found] == [
        ("train x=1", 2, "submitting"),
        ("train x=2", 1, "failed"),
    ]
    assert (found[1]["failure"], found[1]["waited"], found[1]["log"]) == ("time_limit", 3.0, "l")
    assert [key for key, value in found[0].items() if value == ""] == [], "unknown is null"
    jobs(tmp_path, failed=True, every=True, as_json=True)
    assert [job["attempt"] for job in json.loads(capsys.readouterr().out)] == [1, 1]
