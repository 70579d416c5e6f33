"""The scheduler: claims what is due and has it submitted, again and again."""

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
from snakemake_executor_plugin_mantik.schedule.store import ScheduleStore
from snakemake_executor_plugin_mantik.schedule.submit import (
    RETRY_MOST_S,
    format_moment,
    is_under_way,
)

LATE_S: Final = 120.0
"""Seconds after which a due time that nobody has looked at counts as missed."""
LOOK_S: Final = 15.0
"""Seconds between two looks at most: a failed submission may be due again, a clock be set."""

_PRESENT: Final = "schedulers.lock"


@contextmanager
def mark_present(directory: Path) -> Iterator[None]:
    """Let others see that a scheduler is there; several may be."""
    with open_private(directory / _PRESENT, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_present(directory: Path) -> bool:
    """Whether a scheduler is there."""
    with suppress(FileNotFoundError), (directory / _PRESENT).open("rb") as file:
        return not take_lock(file)
    return False


def claim_due(
    store: ScheduleStore, submit: Callable[[Firing], None], clock: Callable[[], float]
) -> float:
    """Claim due times, and have what is claimed submitted.

    Args:
        store: of the schedules; others may work with it at the same time.
        submit: begins to submit a due time, or does it; may be called while one is under way.
        clock: returns the time, seconds since the epoch.

    Returns:
        Seconds until the next look: at the next full minute, when due times are, or before.
    """
    now = clock()
    for schedule in store.all():
        _claim(store, schedule, now)
    for firing in store.open():
        # A time that lies too far ahead was set by a clock that was wrong.
        waits = 0 < firing.retry - now <= RETRY_MOST_S
        if not waits and not is_under_way(store.path.parent, firing.schedule):
            submit(firing)
    return min(LOOK_S, 60 - clock() % 60)


def _claim(store: ScheduleStore, schedule: Schedule, now: float) -> None:
    if now < schedule.since:
        # Due times that were claimed are not claimed again, whatever the clock says.
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
        rows.append((due, FiringState.FIRING, "caught up" if late else ""))
    store.claim(schedule, due, rows, now)


def _missed(first: datetime, last: datetime) -> str:
    if first == last:
        return "no scheduler was running"
    return f"no scheduler was running from then to {format_moment(last)}"


class Processes:
    """Submits due times, each in a process of its own that outlives this one.

    MLflow, whose import takes hundreds of megabytes, and whatever a submission hangs in or dies of
    are not in the scheduler's process so.
    """

    def __init__(self) -> None:
        """Prepare."""
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def submit(self, firing: Firing) -> None:
        """Begin to submit, unless a process of ours is at it."""
        self.reap()
        if firing.id not in self._running:
            self._running[firing.id] = subprocess.Popen(
                [sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik", "schedule", "fire",
                 str(firing.id)],
                cwd=_there(), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def reap(self) -> None:
        """Forget processes that have ended."""
        self._running = {n: p for n, p in self._running.items() if p.poll() is None}

    def wait(self) -> None:
        """Wait until all have ended."""
        for process in self._running.values():
            process.wait()


def _there() -> str:
    """Where a process can be started: a scheduler may outlive the directory that it is in."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
