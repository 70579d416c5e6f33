"""Values: a schedule, and the outcome of its due times."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from itertools import takewhile
from zoneinfo import ZoneInfo

from snakemake_executor_plugin_mantik.schedule.cron import Cron


class MissedPolicy(StrEnum):
    """How to treat due times that passed while no scheduler ran."""

    SKIP = "skip"
    ONCE = "once"


class FiringState(StrEnum):
    """The state of a claimed due time."""

    FIRING = "firing"
    FIRED = "fired"
    FAILED = "failed"
    MISSED = "missed"


@dataclass(frozen=True)
class Schedule:
    """A run that is submitted again at each due time.

    Attributes:
        id: never reused.
        name: unique among the existing schedules.
        run: the MLflow id of the run that is submitted again.
        tz: the time zone of `cron` and `until`.
        until: the last day on which the schedule may be due; None: no end.
        account: the compute budget account; empty: the run's.
        site: `NAME=FILE`, a backend config that is read at each due time; empty: the run's.
        since: only due times after this time are still to be checked; seconds since the epoch.
        revision: grows with each edit.
    """

    id: int
    name: str
    run: str
    cron: str
    tz: str
    until: date | None
    account: str
    missed: MissedPolicy
    since: float
    revision: int
    site: str = ""

    def due(self, after: datetime) -> Iterator[datetime]:
        """Yield the due times later than `after`, in the schedule's time zone."""
        found = self._cron.after(after)
        return takewhile(lambda due: self.until is None or due.date() <= self.until, found)

    def latest(self, now: datetime) -> datetime | None:
        """Return the last due time after `since` and up to `now`, or None."""
        since = datetime.fromtimestamp(self.since, UTC)
        if self.until is not None:
            zone = ZoneInfo(self.tz)
            end = datetime(self.until.year, self.until.month, self.until.day, 23, 59, 59)
            now = min(now, end.replace(tzinfo=zone, fold=1))
        return self._cron.latest(since, now)

    @property
    def _cron(self) -> Cron:
        return Cron(self.cron, ZoneInfo(self.tz))


@dataclass(frozen=True)
class Firing:
    """A due time that was claimed.

    Attributes:
        schedule: the schedule's id.
        due: the due time in seconds since the epoch.
        key: identifies the run if a submission was interrupted.
        attempts: how many submissions were started.
        begun: whether the outcome of an attempt is unknown: it is running, or was interrupted.
        retry: when to submit again, if not fired by then; seconds since the epoch.
        run: the id of the new run; empty: none yet.
        told: the reason for the state, for users.
        changed: time of the last claim, attempt or outcome, in seconds since the epoch.
    """

    id: int
    schedule: int
    due: int
    state: FiringState
    key: str
    attempts: int
    begun: bool
    retry: float
    run: str
    told: str
    changed: float
