"""The process that tells MLflow: `python -m snakemake_executor_plugin_mantik.tracking.worker`.

It works off the outbox of the working directory, in three lanes (`Lane`): the runs that are to be
made and their states, for which jobs wait; what jobs log; the ends of runs with all of that. Its
input only wakes it up; when that is at its end, so is the controller, and the worker ends as soon
as everything is told, or MLflow does not answer. What is left, the next worker tells;
`smk-mantik track` starts one for that.

It answers with JSON, one object per line: `{"ready": VERSION}`, `{"try": …, "run": …, …}` when a
run is made, `{"down": WHY, "tries": […]}` when MLflow cannot be told of these tries, `{"tell":
TEXT}` for the user.
"""

import fcntl
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from snakemake_executor_plugin_mantik.tracking.outbox import Lane, Outbox, RunRecord
from snakemake_executor_plugin_mantik.tracking.store import DIRECTORY

OUTBOX = "outbox.sqlite"
LOCK = "lock"
IDLE_S = 5.0
"""Seconds after which the outbox is looked at without being woken up."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
"""Seconds to wait after a failure, doubled each time."""
FAILURES = 2
"""Failures in a row after which the others of the same place are not tried either, for a while."""
DRAIN_S = 600.0
"""Seconds that the worker goes on after its controller has ended."""
SETTINGS: Mapping[str, str] = {
    # Reading the jobs' own stores.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    # Waiting for a server is the worker's own business: it keeps all in the outbox.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""What the worker's MLflow is set to, unless the user has set it."""


class Place(NamedTuple):
    """Where a run goes: what fails there fails for the others that go there, too, mostly."""

    uri: str
    experiment_id: str
    experiment: str


def _place(run: RunRecord | None) -> Place:
    """What was asked for, not what MLflow made of it: a deleted experiment has an id as well."""
    if run is None:
        return Place("", "", "")
    return Place(run.uri, str(run.data["experiment_id"]), str(run.data["experiment"]))


class Worker:
    """Works off the outbox until there is nothing left and the input has ended."""

    def __init__(self, workdir: Path, answer: Callable[[Mapping[str, Any]], None]) -> None:
        """Prepare; `answer` is called with each answer to the controller."""
        self._workdir = workdir
        self._answer = answer
        self._wake = {lane: threading.Event() for lane in Lane}
        self._ending = threading.Event()
        self._making_is_over = threading.Event()
        self._said: set[str] = set()
        # What MLflow has been told of what jobs log, by try; belongs to who is busy with that.
        self._told: dict[str, Any] = {}
        self._busy: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def wake(self) -> None:
        """There may be something new."""
        for event in self._wake.values():
            event.set()

    def finish(self) -> None:
        """Nothing new will come."""
        self._ending.set()
        self.wake()

    def work(self, lane: Lane) -> None:
        """Tell what there is in a lane; a thread's whole work."""
        from snakemake_executor_plugin_mantik.tracking.telling import Teller

        outbox = Outbox(self._workdir / DIRECTORY / OUTBOX)
        teller = Teller(outbox, self._workdir, self._answer, self._tell_once, self._told)
        wait = FIRST_WAIT_S
        failing: set[str | Place] = set()
        while True:
            last = self._ending.is_set() and (
                lane is not Lane.ENDING or self._making_is_over.is_set()
            )
            event = self._wake[lane]
            event.clear()
            if self._round(teller, outbox, lane, failing):
                wait = FIRST_WAIT_S
            elif last:
                break
            else:
                event.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)
                continue
            if last:
                break
            if not outbox.open_tries(lane):
                event.wait(IDLE_S)
        outbox.close()
        if lane is Lane.MAKING:
            self._making_is_over.set()
            self._wake[Lane.ENDING].set()

    def _round(self, teller: Any, outbox: Outbox, lane: Lane, failing: set[str | Place]) -> bool:
        """Tell what there is once; whether all of it could be told.

        A place that fails is left alone until the next round, and then comes last: what is told
        elsewhere neither waits for it nor stays untold. `failing`, the tries and places that failed
        the last time, is kept up to date.
        """
        oldest_first = outbox.open_tries(lane)
        places = {try_id: _place(outbox.run(try_id)) for try_id in oldest_first}
        newest = {place: number for number, place in enumerate(places.values())}
        tries = sorted(
            oldest_first,
            key=lambda t: (places[t] in failing, -newest[places[t]], t in failing),
        )
        # All runs are made before anything else is told of one: jobs wait for them.
        acts = [(teller.make, try_id) for try_id in tries] if lane is Lane.MAKING else []
        tell = partial(self._alone, teller, lane)
        failures: Counter[Place] = Counter()
        all_told = True
        for act, try_id in [*acts, *((tell, try_id) for try_id in tries)]:
            place = places[try_id]
            if failures[place] >= FAILURES:
                continue
            try:
                all_told = act(try_id) is not False and all_told
                failures[place] = 0
                failing -= {try_id, place}
            except Exception as error:  # noqa: BLE001 - MLflow's stores and plugins raise anything
                why = " ".join(f"{type(error).__name__}: {error}".split())
                sys.stderr.write(f"{try_id}: {why}\n")
                concerned = [other for other in tries if places[other] == place]
                self._answer({"down": why[:300], "tries": concerned})
                failures[place] += 1
                failing |= {try_id, place}
                all_told = False
        return all_told

    def _alone(self, teller: Any, lane: Lane, try_id: str) -> bool:
        """Tell of a try while no other lane does; False: another one does, and only ends wait."""
        busy = self._busy[try_id]
        if not busy.acquire(blocking=lane is Lane.ENDING):
            return False
        try:
            teller.tell(try_id, lane)
        finally:
            busy.release()
        return True

    def _tell_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._answer({"tell": text})


def main() -> int:
    """Work for the current directory."""
    workdir = Path.cwd()
    directory = workdir / DIRECTORY
    if not (directory / OUTBOX).exists():
        return 0
    answering = threading.Lock()

    def answer(values: Mapping[str, Any]) -> None:
        # A controller that is gone needs no answer.
        with answering, suppress(OSError, ValueError):
            sys.stdout.write(json.dumps(values) + "\n")
            sys.stdout.flush()

    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with (directory / LOCK).open("w") as lock:
        # Another worker ends soon: its controller has ended.
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        import mlflow

        answer({"ready": mlflow.__version__})
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
        sys.stdout.flush()
        # What hangs in a request must not keep the lock.
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
