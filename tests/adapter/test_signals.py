"""What signals do to a run, apart from whole runs (`tests/e2e/test_interruption.py`)."""

import signal
import threading
from collections.abc import Iterator

import pytest
from snakemake.scheduling.job_scheduler import JobScheduler

from snakemake_executor_plugin_mantik.adapter.signals import Interruption

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
