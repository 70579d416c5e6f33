"""firecREST's records of jobs, merged from sacct and squeue as firecREST does.

The accounting lags behind the scheduler. Just after a job's start and end it has half a record: no
partition and directory, another name and group, and for a running job perhaps a wrong state. A list
by name then lacks a job that has just ended. All of that was measured.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from ..batch import BatchState
from ..local_job import LocalJob
from ..scheduler import LocalScheduler
from ..settings import FirecrestSettings

_CLUSTER = "sandbox"
USER_ID = 1000
"""The user id at the simulated cluster."""

WINDOWS = {"1h": 3600, "8h": 8 * 3600, "24h": 86_400, "3d": 3 * 86_400, "7d": 7 * 86_400}
"""The `time_window` of a list, in seconds, by its value in the request."""

_PRIORITY = 1
_OUT_OF_MEMORY_SIGNAL = 125
_TERM = 15

AccountingRecord = dict[str, Any]


class Accounting(ABC):
    """The jobs of one scheduler as firecREST reports them, except the ids in `hidden`."""

    def __init__(self) -> None:
        self.hidden: set[int] = set()

    async def of_job(self, number: str) -> list[AccountingRecord]:
        """Return the records of a job; `number` is its id in a URL."""
        denied = number.isdecimal() and int(number) in self.hidden
        return [] if denied else await self._of_job(number)

    async def listed(
        self, names: Iterable[str], account: str, window: float
    ) -> list[AccountingRecord]:
        """Return the unfinished jobs, and those that ended in the last `window` seconds.

        `names` and `account` select jobs, unless they are empty.
        sacct and squeue filter separately, so half a record is not found by the job's name.
        """
        found = await self._listed(set(names), account, window)
        return [record for record in found if int(record["jobId"]) not in self.hidden]

    @abstractmethod
    async def _of_job(self, number: str) -> list[AccountingRecord]: ...

    @abstractmethod
    async def _listed(
        self, names: set[str], account: str, window: float
    ) -> list[AccountingRecord]: ...


class LocalAccounting(Accounting):
    """The accounting of the local scheduler, with the delays of a real one."""

    def __init__(
        self,
        scheduler: LocalScheduler,
        settings: FirecrestSettings,
        user: str,
        account: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._scheduler = scheduler
        self._lag = settings.accounting_lag
        self._user = user
        self._default_account = account

    async def _of_job(self, number: str) -> list[AccountingRecord]:
        job = self._scheduler.jobs.get(int(number)) if number.isdecimal() else None
        if job is None:
            return []
        now = self._clock()
        found = merged([self._sacct(job, now)], [self._squeue(job, now)])
        # A job is reported at once, whatever the lag: by squeue, or as half a record.
        return found or [self._half(job, job.state, now)]

    async def _listed(self, names: set[str], account: str, window: float) -> list[AccountingRecord]:
        now = self._clock()
        sacct: list[AccountingRecord | None] = []
        squeue: list[AccountingRecord | None] = []
        for job in self._scheduler.jobs.values():
            if account and account != self._account(job):
                continue
            if job.ended is None or job.ended > now - window:
                sacct.append(self._sacct(job, now))
            squeue.append(self._squeue(job, now))
        if names:
            sacct = [record for record in sacct if record and record["name"] in names]
            squeue = [record for record in squeue if record and record["name"] in names]
        return merged(sacct, squeue)

    def _account(self, job: LocalJob) -> str:
        return job.request.account or self._default_account

    def _squeue(self, job: LocalJob, now: float) -> AccountingRecord | None:
        if job.state.final:
            return None
        start = None if job.started is None else int(job.started)
        record = self._record(job, now)
        record |= {
            "status": status_of(job.state.value, job.reason, None, None),
            "allocationNodes": job.request.nodes,
            "nodes": os.uname().nodename if start else "",
            "tasks": [],
        }
        record["time"]["end"] = None if start is None else start + job.request.time_s
        return record

    def _sacct(self, job: LocalJob, now: float) -> AccountingRecord | None:
        if job.state.final:
            ended = job.ended or now
            if now < ended + self._lag:
                return self._half(job, job.state, now)
            return self._whole(job, now)
        if job.state is BatchState.PENDING:
            return self._whole(job, now) if now >= job.submitted + self._lag else None
        started = job.started or now
        if now < started + self._lag:
            return None
        if now < started + 2 * self._lag:
            return self._half(job, BatchState.PENDING, now)
        return self._whole(job, now)

    def _whole(self, job: LocalJob, now: float) -> AccountingRecord:
        record = self._record(job, now)
        exit_code, signal = _ending(job)
        state = _state_text(job.state)
        record |= {
            "status": status_of(state, "None", exit_code, signal),
            "allocationNodes": job.request.nodes if job.started else 0,
            "nodes": os.uname().nodename if job.started else "None assigned",
            "tasks": [_batch_step(job, record["time"])] if job.started else [],
        }
        return record

    def _half(self, job: LocalJob, state: BatchState, now: float) -> AccountingRecord:
        record = self._whole(job, now)
        exit_code, signal = _ending(job) if state.final else (0, 0)
        return record | {
            "status": status_of(_state_text(state), "None", exit_code, signal),
            "name": "allocation",
            "partition": "",
            "workingDirectory": "",
            "group": "root",
            "tasks": [],
        }

    def _record(self, job: LocalJob, now: float) -> AccountingRecord:
        """Return the fields that both commands report, in the order of the real answers."""
        elapsed = int((job.ended or now) - job.started) if job.started else 0
        return {
            "jobId": str(job.id),
            "name": job.request.name,
            "status": None,
            "tasks": None,
            "time": {
                "elapsed": elapsed,
                "start": None if job.started is None else int(job.started),
                "end": None if job.ended is None else int(job.ended),
                "suspended": 0,
                # Slurm stores limits in minutes.
                "limit": -(-job.request.time_s // 60) * 60,
            },
            "account": self._account(job),
            "allocationNodes": 0,
            "cluster": _CLUSTER,
            "group": self._user,
            "nodes": "",
            "partition": job.request.partition,
            "killRequestUser": None,
            "user": self._user,
            "workingDirectory": str(job.directory),
            "priority": _PRIORITY,
        }


def merged(
    sacct: Iterable[AccountingRecord | None], squeue: Iterable[AccountingRecord | None]
) -> list[AccountingRecord]:
    """Return one record per job: sacct's, or squeue's if that is PENDING or sacct has none."""
    found: dict[str, AccountingRecord] = {}
    for record in (*sacct, *squeue):
        if record is not None:
            pending = record["status"]["state"] == BatchState.PENDING.value
            if pending or record["jobId"] not in found:
                found[record["jobId"]] = record
    return list(found.values())


def status_of(
    state: str, reason: str, exit_code: int | None, signal: int | None
) -> AccountingRecord:
    """Return the `status` of a job's record."""
    return {
        "state": state,
        "stateReason": reason or "None",
        "exitCode": exit_code,
        "interruptSignal": signal,
    }


def _state_text(state: BatchState) -> str:
    return f"CANCELLED by {USER_ID}" if state is BatchState.CANCELLED else state.value


def _ending(job: LocalJob) -> tuple[int, int]:
    """Return exit code and signal as in the accounting.

    Both are 0 unless the job is COMPLETED, FAILED, or OUT_OF_MEMORY (0 and 125).
    """
    if job.state is BatchState.OUT_OF_MEMORY:
        return 0, _OUT_OF_MEMORY_SIGNAL
    if job.state in (BatchState.COMPLETED, BatchState.FAILED):
        return job.exit_code or 0, job.signal
    return 0, 0


def _batch_step(job: LocalJob, times: AccountingRecord) -> AccountingRecord:
    exit_code, signal = _ending(job)
    state = _state_text(job.state).partition(" ")[0]
    if job.state is BatchState.TIMEOUT:
        state, signal = "CANCELLED", _TERM
    elif job.over_memory and job.state is BatchState.FAILED:
        state = "CANCELLED by 0"
    return {
        "id": f"{job.id}.batch",
        "name": "batch",
        "status": {
            "state": state, "stateReason": None, "exitCode": exit_code, "interruptSignal": signal
        },
        "time": {**times, "limit": None},
    }  # fmt: skip
