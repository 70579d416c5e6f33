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

from snakemake_executor_plugin_mantik.locks import take
from snakemake_executor_plugin_mantik.private import open_private
from snakemake_executor_plugin_mantik.schedule.fire import RETRY_MOST_S, is_under_way, shown
from snakemake_executor_plugin_mantik.schedule.store import Store
from snakemake_executor_plugin_mantik.schedule.value import Firing, Missed, Schedule, State

LATE_S: Final = 120.0
"""Seconds after which a due time that nobody has looked at counts as missed."""
LOOK_S: Final = 15.0
"""Seconds after which the store is looked at again: it may have been edited, a clock set."""

_PRESENT: Final = "schedulers.lock"


@contextmanager
def present(directory: Path) -> Iterator[None]:
    """Let others see that a scheduler is there; several may be."""
    with open_private(directory / _PRESENT, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_present(directory: Path) -> bool:
    """Whether a scheduler is there."""
    with suppress(FileNotFoundError), (directory / _PRESENT).open("rb") as file:
        return not take(file)
    return False


class Scheduler:
    """Claims due times, and has what is claimed submitted."""

    def __init__(
        self, store: Store, submit: Callable[[Firing], None], clock: Callable[[], float]
    ) -> None:
        """Prepare.

        Args:
            store: of the schedules; others may work with it at the same time.
            submit: begins to submit a due time, or does it; may be called while one is under way.
            clock: tells the time, seconds since the epoch.
        """
        self._store = store
        self._submit = submit
        self._clock = clock

    def look(self) -> float:
        """Do what is to be done now; seconds until it is to be looked again."""
        now = self._clock()
        for schedule in self._store.all():
            self._claim(schedule, now)
        waits = [LOOK_S]
        for firing in self._store.open():
            # A time that lies too far ahead was set by a clock that was wrong.
            left = firing.retry - now
            if left > 0 and left <= RETRY_MOST_S:
                waits.append(left)
            elif not is_under_way(self._store.path.parent, firing.schedule):
                self._submit(firing)
        for schedule in self._store.all():
            due = next(schedule.due(datetime.fromtimestamp(now, UTC)), None)
            if due is not None:
                waits.append(due.timestamp() - self._clock())
        return max(0.0, min(waits))

    def _claim(self, schedule: Schedule, now: float) -> None:
        if now < schedule.since:
            # Due times that were claimed are not claimed again, whatever the clock says.
            self._store.rewind(schedule, now)
            return
        latest = schedule.latest(datetime.fromtimestamp(now, UTC))
        if latest is None:
            return
        due = int(latest.timestamp())
        late = now - due > LATE_S
        first = next(schedule.due(datetime.fromtimestamp(schedule.since, UTC)))
        rows = []
        if late and schedule.missed is Missed.SKIP:
            rows.append((int(first.timestamp()), State.MISSED, _missed(first, latest)))
        else:
            if first != latest:
                before = self._before(schedule, first, latest)
                rows.append((int(first.timestamp()), State.MISSED, _missed(first, before)))
            rows.append((due, State.FIRING, "caught up" if late else ""))
        self._store.claim(schedule, due, rows, now)

    @staticmethod
    def _before(schedule: Schedule, first: datetime, latest: datetime) -> datetime:
        """The due time before the latest one."""
        just_before = datetime.fromtimestamp(latest.timestamp() - 1, UTC)
        return schedule.latest(just_before) or first


def _missed(first: datetime, last: datetime) -> str:
    if first == last:
        return "no scheduler was running"
    return f"no scheduler was running from then to {shown(last)}"


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
