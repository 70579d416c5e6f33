"""A machine whose clock is moved by hand, schedulers on it, and runs that are only written down."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.runs.schedule_store import ScheduleStore
from snakemake_executor_plugin_mantik.runs.scheduler import DUE, SCHEDULE, claim_due, submit_firing
from snakemake_executor_plugin_mantik.runs.schedules import (
    Firing,
    FiringState,
    MissedPolicy,
    ScheduleRequest,
    edit_schedule,
    make_schedule,
)


class Killed(BaseException):
    """The process is no more: nothing handles this."""


@dataclass
class Runs:
    """What `runs.rerun` would do.

    Attributes:
        made: run ids by key.
        asked: what each was asked for.
        trouble: "away": it fails; "before", "after": the process dies before or after the run is
            made; empty: all is well.
    """

    made: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    trouble: str = ""

    def again(
        self, run_id: str, *, site: str, account: str, name: str, tags: Mapping[str, str], key: str
    ) -> str:
        if self.trouble == "away":
            raise MantikError("no answer", where="MLflow")
        if self.trouble == "before":
            raise Killed
        if key not in self.made:
            self.made[key] = f"run-{len(self.made)}"
            self.sites.append(site)
            self.asked.append((tags[SCHEDULE], tags[DUE], account))
        if self.trouble == "after":
            raise Killed
        return self.made[key]


@dataclass
class Machine:
    directory: Path
    now: datetime
    runs: Runs = field(default_factory=Runs)

    def __post_init__(self) -> None:
        self.store = ScheduleStore(self.directory)

    def clock(self) -> float:
        return self.now.timestamp()

    def add(
        self, cron: str, tz: str = "Europe/Berlin", until: str | None = None,
        missed: MissedPolicy = MissedPolicy.SKIP, name: str = "weekly",
    ) -> None:  # fmt: skip
        wish = ScheduleRequest("seed", cron, tz, until, None, missed)
        assert self.store.add(make_schedule(name, wish, self.now, str))

    def edit(self, wish: ScheduleRequest, name: str = "weekly") -> None:
        schedule = self.store.get(name)
        assert schedule is not None
        assert self.store.edit(edit_schedule(schedule, wish, self.now, str))

    def scheduler(self) -> Callable[[], float]:
        """Start a scheduler: each call is one look, and returns the seconds until its next."""

        def submit(firing: Firing) -> None:
            submit_firing(store, firing.id, self.runs.again, self.clock)

        store = ScheduleStore(self.directory)
        return lambda: claim_due(store, submit, self.clock)

    def go_on(self, until: str, *schedulers: Callable[[], float]) -> None:
        """Let time pass while schedulers run; they look when they said that they would."""
        end = datetime.fromisoformat(until).replace(tzinfo=UTC)
        while self.now < end:
            wait = min(scheduler() for scheduler in schedulers)
            # Where nothing happens for long, the looks in between are left out.
            dues = [next(s.due(self.now), end) for s in self.store.all()]
            retries = [datetime.fromtimestamp(f.retry, UTC) for f in self.store.open()]
            soon = min([end, *dues, *(retry for retry in retries if retry > self.now)])
            self.now = max(self.now + timedelta(seconds=wait), soon)
        for scheduler in schedulers:
            scheduler()

    def pass_by(self, until: str) -> None:
        """Let time pass while nothing runs."""
        self.now = datetime.fromisoformat(until).replace(tzinfo=UTC)

    @property
    def fired(self) -> list[str]:
        """For which due times runs were made, as they stand in the tags."""
        return [due for _, due, _ in self.runs.asked]

    def history(self, name: str = "weekly") -> list[tuple[str, FiringState, str]]:
        schedule = self.store.get(name)
        assert schedule is not None
        return [
            (f"{datetime.fromtimestamp(f.due, UTC):%m-%d %H:%M}", f.state, f.told)
            for f in reversed(self.store.history(schedule.id))
        ]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is such: each write of a store waits for the disk."""
    shared = Path("/dev/shm")
    where = Path(tempfile.mkdtemp(prefix="mantik-", dir=shared if shared.is_dir() else tmp_path))
    yield where
    shutil.rmtree(where)


@pytest.fixture
def machine(memory: Path) -> Iterator[Machine]:
    made = Machine(memory / "data", datetime(2026, 3, 1, 12, tzinfo=UTC))
    yield made
    made.store.close()
