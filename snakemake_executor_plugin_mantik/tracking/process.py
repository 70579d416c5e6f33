"""The process that publishes to MLflow: `python -m` with this module reads the journal's log.

It publishes what is new in the log of the working directory, and what running jobs log, each
attempt by a thread of its own; making runs goes first, since jobs wait for that.

Input only wakes it up. The end of its input means that the controller has ended. Then it ends as
soon as everything is published, or MLflow does not answer, and after `DRAIN_S` at the latest. The
next one publishes what is left; `smk-mantik track` starts one for that.

It answers with JSON, one object per line: `{"attempt": …}` when MLflow has created a run,
`{"down": WHY, "attempts": […]}` when MLflow cannot be updated for these attempts, and `{"tell":
TEXT}` for the user.
"""

import fcntl
import json
import os
import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.state_directory import STATE
from ..journal import JOURNAL_FILE, EventKind, read_tracked
from .cursor import ALL, Cursor, Log, LoggedRun, open_log
from .run import DESTINATION, without_users
from .store import DIRECTORY, copy_directory

WORKER_LOCK = "lock"
_POSITION = "position"
"""The file that is written whenever a job's copy has grown, as in `engine.live_copies`."""
_IDLE_S = 2.0
"""Seconds after which the log is read without being woken up."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
"""The longest wait after a failure, in seconds; waits double from `_FIRST_WAIT_S`."""
_FAILURES = 2
"""Failures in a row after which nothing goes to a destination for a while."""
MAKERS = 4
"""Runs to create at the same time: a server may be far away, and jobs wait."""
_OTHERS, _ENDING = 4, 3
"""Most attempts to publish at once, and of these the most ends, which may take long."""
_UPDATE_S = 60.0
"""The least seconds between two updates of a workflow's run (counts and pictures)."""
DRAIN_S = 600.0
"""The most seconds that it continues after its controller has ended."""
SETTINGS: Mapping[str, str] = {
    # MLflow 3.13 and later refuse the user's own file store without it.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    # The process itself retries: the log holds everything.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""The settings of the process's MLflow, unless the user has set them."""


@dataclass
class _Place:
    """What is known of a destination: a server and an experiment, whose failures affect all runs.

    Attributes:
        answers: whether its last answer was no failure; until then, one request shows it.
        retry_at: when it may be asked again, by the monotonic clock.
    """

    answers: bool = False
    failures: int = 0
    retry_at: float = 0.0


@dataclass
class _Item:
    """An attempt or workflow of which something is not published.

    Attributes:
        seq: the first event that is not published, for the order.
        making: whether its run must be created first.
        ends: whether its end is among what is to be published.
        live: the states of what running jobs of it have logged, by their attempts, if that is new.
        failures: how often its publication has failed.
        at: when it may be published, by the monotonic clock.
    """

    place: _Place
    seq: int
    making: bool
    ends: bool = False
    live: dict[str, tuple[int, int]] = field(default_factory=dict)
    failures: int = 0
    at: float = 0.0


class Worker:
    """Publishes until the input has ended, and then what is left."""

    def __init__(self, workdir: Path, answer: Callable[[Mapping[str, Any]], None]) -> None:
        """Prepare; `answer` is called with each answer to the controller."""
        from .publishing import Publisher

        self._workdir = workdir
        self._answer = answer
        self._cursor = Cursor(workdir)
        self._publisher = Publisher(workdir, self._cursor, answer)
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._drains = False
        self._done: queue.SimpleQueue[tuple[str, Future[None]]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(MAKERS + _OTHERS, "publisher")
        self._items: dict[str, _Item] = {}
        self._busy: dict[str, _Item] = {}
        self._places: dict[tuple[str, ...], _Place] = {}
        self._read = self._advanced = self._cursor.run(ALL).seq
        self._look_again: set[str] = set()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self._updated: dict[str, float] = {}

    def wake(self) -> None:
        self._wake.set()

    def finish(self) -> None:
        """Announce the end of the input: nothing new will come."""
        self._ending.set()
        self.wake()

    def work(self) -> None:
        while True:
            if self._ending.is_set() and not self._drains:
                self._drains = True
                for item in self._items.values():
                    item.at, item.failures = 0.0, 0
                for place in self._places.values():
                    place.retry_at, place.failures = 0.0, 0
            self._wake.clear()
            self._collect()
            try:
                self._look()
            except sqlite3.Error as error:
                sys.stderr.write(f"the journal cannot be read now: {error}\n")
            self._dispatch()
            if not self._items and not self._busy and self._read != self._advanced:
                self._advanced = self._read
                self._cursor.set(ALL, seq=self._read)
            if self._drains and not self._busy and not any(map(self._may_go, self._items)):
                return
            self._wake.wait(self._pause())

    def close(self) -> None:
        self._pool.shutdown()
        self._cursor.close()

    # What is to be published

    def _look(self) -> None:
        """Read what is new in the log, and in what running jobs have logged."""
        with open_log(self._workdir) as log:
            new = log.events(self._read)
            for subject in dict.fromkeys([*self._look_again, *(event.subject for event in new)]):
                self._note(log, subject)
            self._look_again.clear()
            for subject in {event.subject for event in new}:
                if (tracked := read_tracked(log.db, subject)) is not None:
                    self._changed.add(tracked.workflow)
            self._read = new[-1].seq if new else self._read
            for attempt_id in log.running():
                self._note_live(log, attempt_id)
            now = time.monotonic()
            for workflow in list(self._changed):
                due = self._updated.get(workflow, now - _UPDATE_S) + _UPDATE_S
                if due > now and not self._drains:
                    continue
                self._changed.discard(workflow)
                if (run := log.run(workflow)) is not None and workflow not in self._items:
                    self._updated[workflow] = now
                    self._items[workflow] = self._item(run, self._read)

    def _note(self, log: Log, subject: str) -> None:
        """Note what is not published of an attempt's run, or of a workflow."""
        run = log.run(subject)
        if run is None or (run.tracked is not None and run.tracked.behind):
            return
        sharing = log.attempts(run.head) if run.tracked is not None else [run]
        events = [e for t in sharing for e in log.events(self._cursor.run(t.id).seq, of=t.id)]
        if events:
            item = self._items.get(run.head) or self._item(run, min(e.seq for e in events))
            item.ends = any(event.kind is EventKind.ENDED for event in events)
            self._items[run.head] = item
        elif run.tracked and run.head in self._items and not self._items[run.head].live:
            del self._items[run.head]  # it was published meanwhile

    def _note_live(self, log: Log, attempt_id: str) -> None:
        """Note whether the copy of what a job logs (`engine.live_copies`) has grown."""
        try:
            found = (self._workdir / copy_directory(attempt_id) / _POSITION).stat()
        except OSError:
            return
        stamp = (found.st_mtime_ns, found.st_ino)
        run = log.run(attempt_id) if self._stamps.get(attempt_id) != stamp else None
        if run is not None and run.head not in self._busy:
            item = self._items.setdefault(run.head, self._item(run, self._read))
            item.live[attempt_id] = stamp

    def _item(self, run: LoggedRun, seq: int) -> _Item:
        making = not self._cursor.run(run.head).run_id
        where = tuple(str(run.data[name]) for name in DESTINATION)
        return _Item(self._places.setdefault(where, _Place()), seq, making)

    # Who may go

    def _may_go(self, subject: str) -> bool:
        """Return whether a run may be published, as soon as a thread is free."""
        item = self._items[subject]
        return not (self._drains and (item.failures or item.place.failures >= _FAILURES))

    def _dispatch(self) -> None:
        now = time.monotonic()

        def rank(subject: str) -> tuple[bool, bool, int]:
            item = self._items[subject]
            return not item.making, item.failures > 0, item.seq

        for subject in sorted(self._items, key=rank):
            item, busy = self._items[subject], list(self._busy.values())
            if subject in self._busy or not self._may_go(subject):
                continue
            if max(item.at, item.place.retry_at) > now:
                continue
            if not item.place.answers and any(other.place is item.place for other in busy):
                continue
            others = [other for other in busy if not other.making]
            if item.making:
                free = len(busy) - len(others) < MAKERS
            else:
                ending = sum(other.ends for other in others)
                free = len(others) < _OTHERS and not (item.ends and ending >= _ENDING)
            if free:
                self._begin(subject, item)

    def _begin(self, subject: str, item: _Item) -> None:
        self._busy[subject] = item
        del self._items[subject]
        if item.making:
            future = self._pool.submit(self._publisher.make, subject)
        else:
            future = self._pool.submit(self._publisher.publish, subject, live=bool(item.live))

        def done(future: "Future[None]") -> None:
            self._done.put((subject, future))
            self._wake.set()

        future.add_done_callback(done)

    def _collect(self) -> None:
        """Take in what the threads have done."""
        while not self._done.empty():
            subject, future = self._done.get()
            item = self._busy.pop(subject)
            if error := future.exception():
                self._failed(subject, item, error)
                continue
            item.place.answers, item.place.failures = True, 0
            self._look_again.add(subject)
            if subject in self._updated:
                self._updated[subject] = time.monotonic()
            if not item.making:
                self._stamps |= item.live

    def _failed(self, subject: str, item: _Item, error: BaseException) -> None:
        why = " ".join(without_users(f"{type(error).__name__}: {error}").split())
        sys.stderr.write(f"{subject}: {why}\n")
        place = item.place
        concerned = [s for s, other in self._items.items() if other.place is place]
        self._answer({"down": why[:300], "attempts": [subject, *concerned]})
        now = time.monotonic()
        item.failures += 1
        item.at = now + min(_FIRST_WAIT_S * 2 ** (item.failures - 1), _LONGEST_WAIT_S)
        place.answers, place.failures = False, place.failures + 1
        if place.failures >= _FAILURES:
            wait = _FIRST_WAIT_S * 2 ** min(place.failures - _FAILURES, 10)
            place.retry_at = now + min(wait, _LONGEST_WAIT_S)
        self._items[subject] = item

    def _pause(self) -> float:
        """Return how long to wait for something new."""
        now = time.monotonic()
        moments = [max(item.at, item.place.retry_at) for item in self._items.values()]
        return min([_IDLE_S, *(moment - now for moment in moments if moment > now)])


def main() -> int:
    """Publish what the journal of the current directory says."""
    workdir = Path.cwd()
    directory = workdir / DIRECTORY
    if not (workdir / STATE / JOURNAL_FILE).exists():
        return 0
    directory.mkdir(parents=True, exist_ok=True)
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
        worker = Worker(workdir, answer)
        thread = threading.Thread(target=worker.work, daemon=True)
        thread.start()
        for _ in sys.stdin.buffer:
            worker.wake()
        worker.finish()
        thread.join(DRAIN_S)
        # A thread that hangs in a request must not keep the lock.
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
