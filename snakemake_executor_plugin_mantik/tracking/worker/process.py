"""The worker process: `python -m` with this module publishes an outbox to MLflow.

It works through the outbox of the working directory in lanes (`Lane`): creating runs, which jobs
wait for and the other lanes give way to; the states of jobs; what jobs log; and the ends of runs.

Input only wakes the worker up. The end of its input means that the controller has ended. Then the
worker ends as soon as everything is published, or MLflow does not answer, and after `DRAIN_S` at
the latest. The next worker publishes what is left; `smk-mantik track` starts one for that.

It answers with JSON, one object per line: `{"try": …, "run": …}` when MLflow has created a run,
`{"down": WHY, "tries": […]}` when MLflow cannot be updated for these tries, and `{"tell": TEXT}`
for the user.
"""

import fcntl
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..outbox import Lane, Outbox, RunRecord
from ..run import without_users
from ..store import DIRECTORY

OUTBOX = "outbox.sqlite"
WORKER_LOCK = "lock"
_IDLE_S = 5.0
"""Seconds after which the worker reads the outbox without being woken up."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
"""The longest wait after a failure, in seconds; waits double from `_FIRST_WAIT_S`."""
_FAILURES = 2
"""Failures in a row after which the rest of a round skips a destination."""
MAKERS = 4
"""Runs to create at the same time: a server may be far away, and jobs wait."""
GIVE_WAY_S = 1.0
"""The most seconds that other lanes wait while runs are being created."""
DRAIN_S = 600.0
"""The most seconds that the worker continues after its controller has ended."""
SETTINGS: Mapping[str, str] = {
    # To read the jobs' own stores.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    # The worker itself retries: the outbox holds everything.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""The settings of the worker's MLflow, unless the user has set them."""
_BEFORE: Mapping[Lane, Lane] = {Lane.STATES: Lane.MAKING, Lane.ENDING: Lane.STATES}
"""The lane whose end a lane waits for, since that one passes its tries on."""


class RunTarget(NamedTuple):
    """The destination of a run: its failures mostly affect all runs that go there."""

    uri: str
    experiment_id: str
    experiment: str


def _place(run: RunRecord | None) -> RunTarget:
    """Return the requested destination, not MLflow's: a deleted experiment has an id, too."""
    if run is None:
        return RunTarget("", "", "")
    return RunTarget(run.uri, str(run.data["experiment_id"]), str(run.data["experiment"]))


@dataclass(frozen=True)
class _Round:
    """One pass through the open tries of a lane.

    Attributes:
        places: the destinations by try, in the order of publication.
        failing: the tries and destinations that failed the last time.
        failures: failures in a row, by destination.
    """

    lane: Lane
    places: Mapping[str, RunTarget]
    failing: set[str | RunTarget]
    failures: Counter[RunTarget] = field(default_factory=Counter)


class Worker:
    """Works through the outbox until the input has ended, and then once more."""

    def __init__(self, workdir: Path, answer: Callable[[Mapping[str, Any]], None]) -> None:
        """Prepare; `answer` is called with each answer to the controller."""
        self._workdir = workdir
        self._answer = answer
        self._wake = {lane: threading.Event() for lane in Lane}
        self._ending = threading.Event()
        self._over = {lane: threading.Event() for lane in Lane}
        self._all_made = threading.Event()
        self._all_made.set()
        self._reported: set[str] = set()
        # What was published of jobs' stores, by try; for the holder of the try's lock in `_busy`.
        self._told: dict[str, Any] = {}
        self._busy: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._making: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._experiments: dict[tuple[str, str, str], tuple[str, str]] = {}
        self._makers = ThreadPoolExecutor(MAKERS, "maker")
        self._here = threading.local()
        self._outboxes: list[Outbox] = []

    def wake(self) -> None:
        """Have all lanes read the outbox again."""
        for event in self._wake.values():
            event.set()

    def finish(self) -> None:
        """Announce the end of the input: nothing new will come."""
        self._ending.set()
        self.wake()

    def work(self, lane: Lane) -> None:
        """Publish the events of a lane until the end; the whole work of a thread."""
        outbox = self._publisher().outbox
        wait = _FIRST_WAIT_S
        failing: set[str | RunTarget] = set()
        before = _BEFORE.get(lane)
        while True:
            last = self._ending.is_set() and (before is None or self._over[before].is_set())
            event = self._wake[lane]
            event.clear()
            oldest_first = outbox.open_tries(lane)
            all_told = not oldest_first or self._round(outbox, lane, oldest_first, failing)
            if last:
                break
            if not all_told:
                event.wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)
                continue
            wait = _FIRST_WAIT_S
            if not oldest_first:
                event.wait(_IDLE_S)
        self._over[lane].set()
        self.wake()

    def close(self) -> None:
        """Close the outbox, once all lanes have ended."""
        self._makers.shutdown()
        for outbox in self._outboxes:
            outbox.close()

    def _publisher(self) -> Any:
        from .publishing import Publisher

        if not hasattr(self._here, "teller"):
            outbox = Outbox(self._workdir / DIRECTORY / OUTBOX)
            self._outboxes.append(outbox)
            self._here.teller = Publisher(
                outbox, self._workdir, self._answer, self._report_once, self._told,
                making=self._making, experiments=self._experiments,
            )  # fmt: skip
        return self._here.teller

    def _round(
        self, outbox: Outbox, lane: Lane, oldest_first: Sequence[str], failing: set[str | RunTarget]
    ) -> bool:
        """Publish the events of a lane once; return whether all were published.

        A destination that fails repeatedly is skipped for the rest of the round. One that fails
        comes last in the next round, so that others neither wait for it nor stay unpublished.
        Keeps `failing` up to date, the tries and destinations that failed the last time.
        """
        places = {try_id: _place(outbox.run(try_id)) for try_id in oldest_first}
        newest = {place: number for number, place in enumerate(places.values())}
        tries = sorted(
            oldest_first,
            key=lambda t: (places[t] in failing, -newest[places[t]], t in failing),
        )
        found = _Round(lane, {try_id: places[try_id] for try_id in tries}, failing)
        if lane is not Lane.MAKING:
            published = [self._attempt(found, try_id) for try_id in tries]
            return all(published)
        self._all_made.clear()
        try:
            return self._make(found)
        finally:
            self._all_made.set()
            self._wake[Lane.STATES].set()

    def _make(self, found: _Round) -> bool:
        """Create runs, several at a time once a destination has created its first."""
        answering: set[RunTarget] = set()
        all_made = True
        begun = []
        for try_id, place in found.places.items():
            if place in found.failing:
                # These come last, and may hang: other lanes must not wait for them.
                self._all_made.set()
            if place in answering:
                begun.append(self._makers.submit(self._attempt, found, try_id))
            elif self._attempt(found, try_id):
                answering.add(place)
            else:
                all_made = False
        made = [making.result() for making in begun]
        return all(made) and all_made

    def _attempt(self, found: _Round, try_id: str) -> bool:
        """Publish the events of a try; return whether all of them are published."""
        place = found.places[try_id]
        if found.failures[place] >= _FAILURES:
            return False
        if found.lane is not Lane.MAKING:
            self._all_made.wait(GIVE_WAY_S)
        try:
            published = self._alone(self._publisher(), found.lane, try_id)
        except Exception as error:  # noqa: BLE001 - MLflow's stores and plugins raise anything
            why = " ".join(without_users(f"{type(error).__name__}: {error}").split())
            sys.stderr.write(f"{try_id}: {why}\n")
            concerned = [other for other, there in found.places.items() if there == place]
            self._answer({"down": why[:300], "tries": concerned})
            found.failures[place] += 1
            found.failing.update({try_id, place})
            return False
        found.failures[place] = 0
        found.failing.difference_update({try_id, place})
        return published

    def _alone(self, teller: Any, lane: Lane, try_id: str) -> bool:
        """Publish a try unless another lane does; return whether nothing is left of it.

        If another lane does, return False, or wait in the ENDING lane.
        """
        busy = self._busy[try_id]
        if not busy.acquire(blocking=lane is Lane.ENDING):
            return False
        try:
            published = bool(teller.notify(try_id, lane))
        finally:
            busy.release()
        if published and lane is Lane.ENDING:
            self._wake[Lane.LIVE].set()  # what the next segment logs waits for this end
        return published

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._answer({"tell": text})


def main() -> int:
    """Publish the outbox of the current directory."""
    workdir = Path.cwd()
    directory = workdir / DIRECTORY
    if not (directory / OUTBOX).exists():
        return 0
    answering = threading.Lock()

    def answer(values: Mapping[str, Any]) -> None:
        # The controller may be gone.
        with answering, suppress(OSError, ValueError):
            sys.stdout.write(json.dumps(values) + "\n")
            sys.stdout.flush()

    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with (directory / WORKER_LOCK).open("w") as lock:
        # Wait for another worker, which ends soon: its controller has ended.
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        # Here and not in the threads: if the import fails, the worker ends.
        import mlflow  # noqa: F401

        worker = Worker(workdir, answer)
        threads = [threading.Thread(target=worker.work, args=(lane,), daemon=True) for lane in Lane]
        for thread in threads:
            thread.start()
        for _ in sys.stdin.buffer:
            worker.wake()
        worker.finish()
        deadline = time.monotonic() + DRAIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            worker.close()
        sys.stdout.flush()
        # A thread that hangs in a request must not keep the lock.
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
