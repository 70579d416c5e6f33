"""Wait for due times, and submit each claimed one: one run, however often that is started.

    smk-mantik schedule run ─▶ loop: claims due times ─▶ fire, a process for each: runs.rerun
                                        └────────── store ──────────┘

Each due time is fired once, or the store records why not:

- A scheduler claims it in the store before any other step. It can be claimed once only, so two
  schedulers fire it once.
- The claim includes a key that the new run is submitted under. A submission that was killed is
  repeated under the same key, and `runs.rerun` makes one run per key. Only the process that holds
  the schedule's lock submits, so a firing that has begun and is not locked was interrupted.
- A failed submission is repeated until the next due time is claimed, then given up. An interrupted
  one may have made a run, so it is repeated even then. Both are given up a week after their time.

The code reads the time only from the clock that it is given.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

from ..common.errors import MantikError
from ..common.locks import is_locked, take_lock
from ..common.state_directory import open_private
from .schedule_store import CAUGHT_UP, ScheduleStore
from .schedules import Firing, FiringState, MissedPolicy, Schedule, format_moment

_RETRY_FIRST_S: Final = 60.0
RETRY_MOST_S: Final = 3600.0
"""First and longest pause before a failed submission is repeated, in seconds; it doubles."""
FIRING_S: Final = 3600
"""Longest duration of a submission in seconds; then its process is killed and another continues."""
_GIVE_UP_S: Final = 7 * 86400.0
"""Seconds after the due time when a failing submission is given up at the latest."""

INTERRUPTED: Final = (
    "An earlier attempt was interrupted: smk-mantik runs list shows whether it made a run."
)

SCHEDULE: Final = "mantik.schedule"
DUE: Final = "mantik.schedule.due"
"""Tags of the new runs: the schedule's name, and the due time."""

Resubmit = Callable[..., str]
"""Submits a run again: `runs.rerun`."""


def submit_firing(
    store: ScheduleStore, firing_id: int, again: Resubmit, clock: Callable[[], float]
) -> str:
    """Submit a due time, unless it has ended or a process is submitting one of its schedule.

    `clock` returns the time in seconds since the epoch. Return a line for the user, empty if
    nothing was done.
    """
    firing = store.firing(firing_id)
    if firing is None:
        return ""
    with lock_schedule(store.path.parent, firing.schedule) as ours:
        firing = store.firing(firing_id) if ours else None
        schedule = store.by_id(firing.schedule) if firing is not None else None
        if firing is None or schedule is None or firing.state is not FiringState.FIRING:
            return ""
        now = clock()
        pause = min(RETRY_MOST_S, _RETRY_FIRST_S * 2.0 ** min(firing.attempts, 20))
        store.begin(firing, now, now + pause)
        due = datetime.fromtimestamp(firing.due, ZoneInfo(schedule.tz))
        what = f"{schedule.name}, due {format_moment(due)}"
        try:
            run = again(
                schedule.run,
                site=schedule.site,
                account=schedule.account,
                name=f"{schedule.name} {due:%Y-%m-%d %H:%M}",
                tags={SCHEDULE: schedule.name, DUE: due.isoformat()},
                key=firing.key,
            )
        except (MantikError, OSError) as error:
            now = clock()
            why = f"{error} {INTERRUPTED}" if firing.begun else str(error)
            store.put_off(firing, why, now, give_up=now - firing.due > _GIVE_UP_S)
            after = store.firing(firing.id)
            over = after is None or after.state is FiringState.FAILED
            return f"{what}: not submitted{', given up' if over else ''}: {error}"
        store.fired(firing, run, clock())
        return f"{what}: submitted as run {run}."


@contextmanager
def lock_schedule(directory: Path, schedule_id: int) -> Iterator[bool]:
    """Yield whether we got a schedule's lock. It ends with the block, or with the process."""
    with open_private(_lock_file(directory, schedule_id), "ab") as file:
        yield take_lock(file)


def is_under_way(directory: Path, schedule_id: int) -> bool:
    """Return whether a process is submitting a due time of a schedule now."""
    return is_locked(_lock_file(directory, schedule_id))


def forget_lock(directory: Path, schedule_id: int) -> None:
    """Delete the lock file of a removed schedule; a process that holds the lock continues."""
    _lock_file(directory, schedule_id).unlink(missing_ok=True)


def _lock_file(directory: Path, schedule_id: int) -> Path:
    return directory / f"schedule-{schedule_id}.lock"


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
        until = "" if first == missed else f" from then to {format_moment(missed)}"
        why = f"no scheduler was running{until}"
        rows.append((int(first.timestamp()), FiringState.MISSED, why))
    if not skip:
        rows.append((due, FiringState.FIRING, CAUGHT_UP if late else ""))
    store.claim(schedule, due, rows, now)


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
    with suppress(FileNotFoundError):
        return os.getcwd()
    return "/"
