"""A schedule, and what became of its due times. Values."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from itertools import takewhile
from zoneinfo import ZoneInfo

from snakemake_executor_plugin_mantik.schedule.cron import Cron


class MissedPolicy(StrEnum):
    """What becomes of due times that passed while nothing ran."""

    SKIP = "skip"
    ONCE = "once"


class FiringState(StrEnum):
    """How far a due time is."""

    FIRING = "firing"
    FIRED = "fired"
    FAILED = "failed"
    MISSED = "missed"


@dataclass(frozen=True)
class Schedule:
    """A run that is submitted again whenever its time has come.

    Attributes:
        id: never used again.
        name: unique at a time.
        run: the MLflow id of the run that is submitted again.
        cron: a crontab line.
        tz: the time zone that it is meant in.
        until: the last day, there, on which it may be due; None: for ever.
        account: the compute budget account; empty: the run's.
        missed: what becomes of due times that passed while nothing ran.
        since: due times after this one have not been looked at, seconds since the epoch.
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

    def due(self, after: datetime) -> Iterator[datetime]:
        """The moments later than `after` at which it is due, in its own time zone."""
        found = self._cron.after(after)
        return takewhile(lambda due: self.until is None or due.date() <= self.until, found)

    def latest(self, now: datetime) -> datetime | None:
        """The last moment up to now that has not been looked at; None: there is none."""
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
        due: when it was due, seconds since the epoch.
        state: how far it is.
        key: what the run can be found by, if a submission was interrupted.
        attempts: how often it was begun to be submitted.
        begun: whether nobody knows what came of an attempt: it is under way, or was interrupted.
        retry: when it is submitted again, if it is not fired then; seconds since the epoch.
        run: the run that was made; empty: none yet.
        told: why it is as it is, in words.
        changed: when it came to be so, seconds since the epoch.
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
