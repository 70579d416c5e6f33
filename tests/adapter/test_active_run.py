"""What a run that has started knows of its jobs."""

import logging
import os
import pty
import signal
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TextIO, cast

import pytest
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake.settings.enums import Quietness

from snakemake_executor_plugin_mantik.adapter.progress_line import (
    RunProgress,
    describe_progress,
    open_progress_line,
)
from snakemake_executor_plugin_mantik.adapter.signals import Interruption
from snakemake_executor_plugin_mantik.adapter.startup import ActiveRun
from snakemake_executor_plugin_mantik.engine.transfer_meter import (
    Direction,
    TransferMeter,
    TransferView,
)


class Dag:
    """The jobs of a run, as Snakemake has them."""

    def __init__(self) -> None:
        self.jobs: list[SimpleNamespace] = []

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, *outputs: str) -> None:
        self.jobs.append(SimpleNamespace(input=[], output=outputs, log=[], benchmark=None))


def test_earlier_requests_learn_what_a_checkpoint_adds() -> None:
    dag, nothing = Dag(), cast(Any, None)
    run = ActiveRun(
        engine=nothing, checked=nothing, states=nothing, tracker=nothing, dag=dag, notify=nothing,
        proposals=nothing,
    )  # fmt: skip
    dag.add("first.txt")
    named = run.named
    assert named.paths == {"first.txt"}

    dag.add("post/z.txt")
    assert run.named is named
    assert named.paths == {"first.txt", "post/z.txt"}


# When there is a line below the log, and what it says.


TRANSFERS = [
    TransferView(Direction.UPLOAD, "a", "x", 3 << 30, 1 << 30, 35 << 20),
    TransferView(Direction.UPLOAD, "b", "y", 1 << 30, 0, None),
    TransferView(Direction.DOWNLOAD, "a", "z", 10 << 20, 5 << 20, 1 << 20),
]
STATES = {"running": 4, "queued": 23, "staging": 2}


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (
            200,
            "12 of 40 jobs done, 1 failed, 4 running, 23 queued, 2 staging | uploading 1.0 GiB of"
            " 4.0 GiB, 35.0 MiB/s, 1 min 28 s left; downloading 5.0 MiB of 10.0 MiB, 1.0 MiB/s,"
            " 5.0 s left",
        ),
        (
            140,
            "12 of 40 jobs done, 1 failed, 4 running, 23 queued, 2 staging | uploading 25% of 4.0"
            " GiB, 35.0 MiB/s; downloading 50% of 10.0 MiB, 1.0 MiB/s",
        ),
        (
            100,
            "12/40 done, 1 failed, 4 running, 23 queued, 2 staging | uploading 25%; downloading"
            " 50%",
        ),
        (80, "12/40 done, 1 failed, 4 running, 23 queued, 2 staging"),
        (27, "12/40 done, 1 failed"),
        (5, "12/40"),
    ],
)
def test_what_matters_least_is_left_out_of_a_narrow_line(width: int, line: str) -> None:
    assert describe_progress(RunProgress(12, 40, 1, STATES, TRANSFERS), width) == line
    assert len(line) <= width


def test_what_is_not_known_or_nothing_is_not_said() -> None:
    assert describe_progress(RunProgress(0, 3), 100) == "0 of 3 jobs done"
    begun = [TransferView(Direction.IMPORT, "a", "x", 2 << 20, 0, None)]
    assert describe_progress(RunProgress(0, 3, transfers=begun), 100) == (
        "0 of 3 jobs done | importing 0 B of 2.0 MiB"
    )


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        yield stream
    os.close(ours)


def opened(stream: TextIO, *quiet: Quietness) -> bool:
    logger = logging.Logger("snakemake")
    handler = logging.StreamHandler(stream)
    handler.name = "DefaultStreamHandler"
    logger.addHandler(handler)
    workflow: Any = SimpleNamespace(
        output_settings=SimpleNamespace(quiet=set(quiet) or None), scheduler=None, dag=()
    )
    line = open_progress_line(workflow, logger, dict, TransferMeter())
    if line is None:
        assert handler.stream is stream
        return False
    assert handler.stream is not stream
    line.close()
    assert handler.stream is stream
    return True


def test_there_is_a_line_only_where_one_is_wanted(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert opened(terminal)
    assert opened(terminal, Quietness.RULES)
    assert not opened(terminal, Quietness.RULES, Quietness.PROGRESS)
    assert not opened(terminal, Quietness.ALL)
    assert sys.stderr is not terminal
    with open(os.devnull, "w", encoding="utf-8") as stream:
        assert not opened(stream)
    monkeypatch.setenv("TERM", "dumb")
    assert not opened(terminal)
    monkeypatch.delenv("TERM")
    assert not opened(terminal)


# What signals do to a run, apart from whole runs (`tests/e2e/test_interruption.py`).


NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.fixture
def interruption() -> Iterator[Interruption]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    made = Interruption("cancel")
    made.handle()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_waits_until_snakemake_has_recorded_what_has_succeeded(
    interruption: Interruption, number: signal.Signals
) -> None:
    recorded = []

    def _finish_jobs() -> None:
        recorded.append("first")
        signal.raise_signal(number)
        recorded.append("second")

    assert _finish_jobs.__name__ in vars(JobScheduler)
    with pytest.raises(SystemExit if number != signal.SIGINT else KeyboardInterrupt):  # noqa: PT012
        _finish_jobs()
        threading.Event().wait(600)
    assert recorded == ["first", "second"]
    assert interruption.detached is (number != signal.SIGINT)
