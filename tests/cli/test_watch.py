"""The table of `smk-mantik watch`, in a narrow and a wide terminal."""

import asyncio
import io
import re
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from snakemake_executor_plugin_mantik.cli import shared
from snakemake_executor_plugin_mantik.cli.watch import last_line, watch, watch_view
from snakemake_executor_plugin_mantik.engine.transfer_meter import (
    Direction,
    TransferMeter,
    TransferView,
    publish_transfers,
    read_transfers,
)
from snakemake_executor_plugin_mantik.journal import Journal, read_history
from snakemake_executor_plugin_mantik.views.workflow import Condition, overview_jobs

STATE = Path(".snakemake", "mantik")


def make(journal: Journal, name: str, site: str = "juwels", rule: str = "train") -> str:
    record = journal.new_attempt(site=site, job=name, rule=rule, name=name, fingerprint="f")
    journal.submitting(record.id, "booster", 14400)
    journal.submitted(record.id, "7")
    return record.id


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / STATE)
    (tmp_path / "done.log").write_text("epoch 1\nloss [red]0.12\x1b[31m\n\n")
    done = make(journal, "prepare")
    journal.ended(done, "succeeded", waited=60.0, ran=600.0, log="done.log")
    failed = make(journal, "train sample=a, seed=1")
    journal.ended(
        failed, "failed: The job ended: out of memory", waited=60.0, ran=600.0, log="",
        reason="out_of_memory",
    )  # fmt: skip
    running = make(journal, "train sample=b, seed=1")
    [began] = {record.submitted for record in read_history(tmp_path / STATE)[2:]}
    assert began is not None
    journal.started(running, began + 60.0)
    journal.pending(make(journal, "train sample=c, seed=1", "alps"), "AssocMaxJobsLimit")
    never = make(journal, "train sample=d, seed=1", "alps")
    journal.waiting(never, "QOSMaxWallDurationPerJobLimit")
    journal.pending(never, "QOSMaxWallDurationPerJobLimit")
    journal.close()
    return tmp_path


def shown(
    directory: Path,
    width: int,
    rows: int | None = None,
    transfers: Sequence[TransferView] = (),
    line: str = "",
) -> list[str]:
    records = read_history(directory / STATE)
    jobs = overview_jobs(records, controlled=True)
    console = Console(width=width, record=True, file=io.StringIO())
    now = (records[2].submitted or 0.0) + 60.0 + 7200.0
    view = watch_view(
        jobs, now=now, width=width, rows=rows, directory=directory,
        transfers=transfers, last_lines={records[2].id: line},
    )  # fmt: skip
    console.print(view)
    lines = console.export_text().rstrip("\n").split("\n")
    assert all(len(line) <= width for line in lines)
    return [" ".join(line.split()) for line in lines]


def test_wide(workflow: Path) -> None:
    lines = shown(workflow, 140)
    assert lines[0] == "job site queue state since for walltime note"
    assert lines[1].startswith("train sample=a, seed=1 juwels booster failed ")
    assert lines[1].endswith("10 min 4 h The job ended: out of memory")
    assert lines[2].startswith("train sample=b, seed=1 juwels booster running ")
    assert lines[2].endswith(" 2 h 50% of 4 h")
    assert "4 h AssocMaxJobsLimit (your limit of running jobs is" in lines[3]
    assert "4 h cannot start: QOSMaxWallDurationPerJobLimit (it" in lines[4]
    assert lines[5].endswith("loss [red]0.12[31m"), "the last line of its log, which is no markup"
    assert lines[-2:] == ["alps: 2 waiting", "juwels: 1 running, 1 succeeded, 1 failed"]


def test_narrow(workflow: Path) -> None:
    lines = shown(workflow, 80)
    assert lines[0] == "job site state for note"
    assert lines[2].startswith("train sample=b, seed=1 juwels running 2 h")
    assert lines[3].startswith("train sample=c, seed=1 alps waiting 2 h 1 min AssocMaxJobs")
    assert lines[3].endswith("…")


def test_what_does_not_fit_is_counted(workflow: Path) -> None:
    lines = shown(workflow, 80, rows=2)
    assert len(lines) == 1 + 2 + 1 + 1 + 2
    assert "… and 3 more" in lines
    assert lines[-1] == "juwels: 1 running, 1 succeeded, 1 failed"


def test_of_hundreds_of_jobs_the_failed_ones_come_first(tmp_path: Path) -> None:
    """Those that wait share a row by rule and reason; so do others where there is no room."""
    rule = "train_transformer_model"
    with closing(Journal(tmp_path / STATE)) as journal:
        ids = [make(journal, f"{rule} lr=0.{i}, seed={i}", rule=rule) for i in range(100, 200)]
        for i, one in enumerate(ids[:4]):
            why = f"{rule} lr=0.{100 + i}, seed={100 + i} at juwels: the command ended with 0 but"
            journal.ended(
                one, f"failed: {why} did not make out/{100 + i}/model.bin", waited=1.0, ran=60.0,
                log="", reason="outputs",
            )  # fmt: skip
        for one in ids[4:6]:
            said = f"failed: The command ended with exit code 3 (juwels, {one})."
            journal.ended(one, said, waited=1.0, ran=60.0, log="", reason="exit_code")
        for one in ids[6:16]:
            journal.started(one, time.time())
        for i, one in enumerate(ids[16:]):
            journal.pending(one, ["Priority", "Resources"][i % 2], 3600.0 + i)
        for i in range(200):
            record = journal.new_attempt(
                site="juwels", job=f"plot {i}", rule="plot", name=f"plot i={i}", fingerprint="f",
                makers={"x": ids[16 + i % 84]},
            )  # fmt: skip
            journal.submitting(record.id, "booster", 14400)
            journal.submitted(record.id, "8")

    def rows(width: int, most: int, **options: Any) -> list[str]:
        jobs = overview_jobs(read_history(tmp_path / STATE), controlled=True)
        console = Console(width=width, record=True, file=io.StringIO())
        view = watch_view(jobs, now=time.time(), width=width, rows=most, **options)
        console.print(view)
        return [" ".join(line.split()) for line in console.export_text().splitlines()]

    narrow = rows(80, 12)
    states = [re.findall(r" (failed|running|waiting) ", line) for line in narrow[1:13]]
    assert states == 5 * [["failed"]] + 4 * [["running"]] + 3 * [["waiting"]]
    assert all(line.startswith(rule) for line in narrow[1:12]), "no rule's name is cut"
    assert narrow[5].startswith(f"{rule} (2 more) failed")
    assert narrow[9].startswith(f"{rule} (7 more) running")
    assert narrow[10].startswith(f"{rule} (42 jobs) waiting")
    assert re.fullmatch(r"plot \(200 jobs\) waiting .*waits for 84 jobs", narrow[12])
    assert narrow[-1] == "juwels: 284 waiting, 10 running, 6 failed"

    failed = rows(80, 12, only={Condition.FAILED}, numbered=True)
    assert [line.split()[0] for line in failed[:7]] == ["#", *"123456"]
    wide = rows(170, 40)
    assert [sum(f" {now} " in line for line in wide) for now in ("failed", "running")] == [6, 10]
    assert any(line.endswith("did not make out/100/model.bin") for line in wide), wide


def test_what_is_on_its_way_and_what_a_running_job_writes(workflow: Path) -> None:
    big = TransferView(Direction.UPLOAD, "juwels", "data/set.tar", 3 << 30, 1 << 30, 35 << 20)
    small = [TransferView(Direction.DOWNLOAD, "alps", f"{n}.txt", 4096, 0, None) for n in range(5)]
    lines = shown(workflow, 140, transfers=[big, *small], line="epoch 7\x1b[2J loss 0.1")
    assert lines[2].endswith(" 2 h 50% of 4 h epoch 7[2J loss 0.1")
    assert lines[-4:] == [
        "juwels: upload of data/set.tar, 1.0 GiB of 3.0 GiB, 35.0 MiB/s, 59 s left",
        "alps: download of 0.txt, 0 B of 4.0 KiB",
        "alps: download of 1.txt, 0 B of 4.0 KiB",
        "… and 3 more transfers: 0 B of 12.0 KiB",
    ]
    narrow = shown(workflow, 60, transfers=[big])
    assert narrow[-1].startswith("juwels: upload of data/set.tar, 1.0 GiB")


def test_transfers_are_read_from_the_controller_while_they_last(tmp_path: Path) -> None:
    async def play() -> None:
        publishing = asyncio.create_task(publish_transfers(meter, tmp_path))
        with meter.measure(Direction.IMPORT, "alps", "a.bin", 5000, moved=1000):
            while not read_transfers(tmp_path):
                await asyncio.sleep(0.05)
            assert read_transfers(tmp_path) == meter.views()
        while read_transfers(tmp_path):
            await asyncio.sleep(0.05)
        with meter.measure(Direction.UPLOAD, "alps", "b.bin", 5000):
            while not read_transfers(tmp_path):
                await asyncio.sleep(0.05)
            publishing.cancel()
            await asyncio.wait([publishing])
        assert list(tmp_path.iterdir()) == []

    meter = TransferMeter()
    assert read_transfers(tmp_path) == []
    asyncio.run(play())
    for text in ('{"at": 5, "transfers": []}', "[", '{"at": "x"}', f'{{"at": {time.time()}}}'):
        (tmp_path / "transfers.json").write_text(text)
        assert read_transfers(tmp_path) == []


def test_when_a_job_is_expected_to_start(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / STATE)) as journal:
        first, second = make(journal, "prepare"), make(journal, "train")
        journal.pending(first, "Priority", 7200.0)
        journal.pending(second, "", 7200.0)
    jobs = overview_jobs(read_history(tmp_path / STATE), controlled=True)
    expected, later = (job.queued + 7200.0 for job in jobs if job.queued is not None)
    when, then = (time.strftime("%d %b %H:%M", time.localtime(t)) for t in (expected, later))
    assert [job.words for job in jobs] == [
        f"waiting: Priority (other jobs come first), expected to start on {when}",
        f"waiting: expected to start on {then}",
    ]
    assert jobs[0].as_json(0.0)["expected_start"] == expected
    with closing(Journal(tmp_path / STATE)) as journal:
        journal.started(first, expected)
        journal.pending(second, "Priority")
    jobs = overview_jobs(read_history(tmp_path / STATE), controlled=True)
    assert [job.as_json(0.0)["expected_start"] for job in jobs] == [None, None]


def test_how_many_jobs_wait_for_one(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / STATE)) as journal:
        first = make(journal, "prepare")
        for name in ("train a", "train b"):
            record = journal.new_attempt(
                site="juwels", job=name, rule="train", name=name, fingerprint="f",
                makers={"x": first},
            )  # fmt: skip
            journal.submitting(record.id, "booster", 14400)
    jobs = overview_jobs(read_history(tmp_path / STATE), controlled=True)
    assert jobs[0].awaited_by == ("train a", "train b")
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(watch_view(jobs, now=jobs[0].record.created, width=140, directory=tmp_path))
    lines = [" ".join(line.split()) for line in console.export_text().split("\n")]
    assert lines[0] == "job site queue state since for walltime next note"
    assert any(line.endswith("4 h 2") and line.startswith("prepare") for line in lines), lines


def test_the_last_line_of_a_log_that_is_gone_or_empty(tmp_path: Path) -> None:
    assert last_line(tmp_path / "gone") == ""
    (tmp_path / "empty").write_bytes(b"\n")
    assert last_line(tmp_path / "empty") == ""
    (tmp_path / "long").write_bytes(b"x" * 5000 + b"\xff\nend")
    assert last_line(tmp_path / "long") == "end"
    (tmp_path / "bar").write_bytes(b"begin\r\n 10%|#\r 20%|##\r\r\n")
    assert last_line(tmp_path / "bar") == " 20%|##"


def test_on_a_terminal_it_follows_until_nothing_is_left_to_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a controller: nobody else would notice that the last job is over."""
    with closing(Journal(tmp_path / STATE)) as journal:
        done = make(journal, "prepare")
        journal.ended(done, "succeeded", waited=60.0, ran=600.0, log="")
    said = io.StringIO()
    terminal = Console(width=100, height=30, file=said, force_terminal=True)
    monkeypatch.setattr(shared, "make_console", lambda: terminal)
    watch(tmp_path)
    last = said.getvalue().rpartition("job")[2]
    assert "prepare" in last
    assert "juwels: 1 succeeded" in last
