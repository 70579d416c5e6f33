import io
from pathlib import Path

import pytest
from rich.console import Console

from snakemake_executor_plugin_mantik.cli.jobs import jobs, jobs_table
from snakemake_executor_plugin_mantik.common.errors import JournalError
from snakemake_executor_plugin_mantik.journal import Journal, read_history

STATE = Path(".snakemake", "mantik")


def shown(directory: Path) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(jobs_table(read_history(directory / STATE)))
    return console.export_text()


def make(journal: Journal, job: str, name: str) -> str:
    record = journal.new_try(site="hpc1", job=job, rule="train", name=name, fingerprint="f")
    journal.submitting(record.id, "batch")
    return record.id


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
        ["train", "x=1", "hpc1", "batch", "site-7", "queued", "or", "running"],
        [
            *("train", "[bold]x=2", "hpc1", "batch", "site-8"),
            *("1", "min", "2", "s", "1", "h", "1", "min", "succeeded"),
        ],
        ["train", "[31mx=3", "hpc1", "batch", "failed", "(out", "of", "memory):", "it"],
    ]


def test_only_the_last_try_of_a_job_is_shown(
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
    second = journal.new_try(
        site="hpc1", job="b", rule="train", name="train", fingerprint="f", makers={"x": first}
    )
    journal.submitting(second.id, "batch")
    journal.submitted(second.id, "site-8")
    assert "queued behind prepare" in shown(tmp_path)
    journal.ended(first, "succeeded", waited=None, ran=None, log="")
    assert shown(tmp_path).splitlines()[2].endswith("queued or running")
    journal.close()
