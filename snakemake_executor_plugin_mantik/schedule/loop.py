"""The scheduler: claims due times and starts their submissions, in a loop."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.common.locks import take_lock
from snakemake_executor_plugin_mantik.common.state_directory import open_private
from snakemake_executor_plugin_mantik.schedule.schedules import (
    Firing,
    FiringState,
    MissedPolicy,
    Schedule,
)
from snakemake_executor_plugin_mantik.schedule.store import CAUGHT_UP, ScheduleStore
from snakemake_executor_plugin_mantik.schedule.submit import (
    RETRY_MOST_S,
    format_moment,
    is_under_way,
)

LATE_S: Final = 120.0
"""Seconds after which an unclaimed due time counts as missed."""
LOOK_S: Final = 15.0
"""Largest pause between two checks in seconds: a retry may be due, or the clock was set."""

_PRESENT: Final = "schedulers.lock"


@contextmanager
def mark_present(directory: Path) -> Iterator[None]:
    """Hold a shared lock that shows that a scheduler is running; several may hold it."""
    with open_private(directory / _PRESENT, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_present(directory: Path) -> bool:
    """Return whether a scheduler is running."""
    with suppress(FileNotFoundError), (directory / _PRESENT).open("rb") as file:
        return not take_lock(file)
    return False


def claim_due(
    store: ScheduleStore, submit: Callable[[Firing], None], clock: Callable[[], float]
) -> float:
    """Claim due times, and submit the claimed ones.

    Other processes may use `store` at the same time. `submit` submits a due time, or starts its
    submission; it may be called again while that runs. `clock` returns seconds since the epoch.

    Returns:
        Seconds until the next check: at the next full minute, when schedules are due, or earlier.
    """
    now = clock()
    for schedule in store.all():
        _claim(store, schedule, now)
    for firing in store.open():
        # A retry too far ahead was set while the clock was wrong.
        waits = 0 < firing.retry - now <= RETRY_MOST_S
        if not waits and not is_under_way(store.path.parent, firing.schedule):
            submit(firing)
    return min(LOOK_S, 60 - clock() % 60)


def _claim(store: ScheduleStore, schedule: Schedule, now: float) -> None:
    if now < schedule.since:
        # Due times that were claimed are not claimed again, whatever the clock shows.
        store.rewind(schedule, now)
        return
    latest = schedule.latest(datetime.fromtimestamp(now, UTC))
    if latest is None:
        return
    due = int(latest.timestamp())
    late = now - due > LATE_S
    skip = late and schedule.missed is MissedPolicy.SKIP
    missed = latest if skip else schedule.latest(datetime.fromtimestamp(due - 1, UTC))
    rows = []
    if missed is not None:
        first = next(schedule.due(datetime.fromtimestamp(schedule.since, UTC)))
        rows.append((int(first.timestamp()), FiringState.MISSED, _missed(first, missed)))
    if not skip:
        rows.append((due, FiringState.FIRING, CAUGHT_UP if late else ""))
    store.claim(schedule, due, rows, now)


def _missed(first: datetime, last: datetime) -> str:
    if first == last:
        return "no scheduler was running"
    return f"no scheduler was running from then to {format_moment(last)}"


class Processes:
    """Submits each due time in a separate process that may outlive this one.

    This keeps MLflow, whose import takes hundreds of megabytes, and a submission that hangs or
    crashes out of the scheduler's process.
    """

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def submit(self, firing: Firing) -> None:
        """Start a submission, unless one of our processes runs it already."""
        self.reap()
        if firing.id not in self._running:
            self._running[firing.id] = subprocess.Popen(
                [sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik", "schedule", "fire",
                 str(firing.id)],
                cwd=_there(), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def reap(self) -> None:
        self._running = {n: p for n, p in self._running.items() if p.poll() is None}

    def wait(self) -> None:
        for process in self._running.values():
            process.wait()


def _there() -> str:
    """Return a directory to start a process in: a scheduler may outlive its own."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
