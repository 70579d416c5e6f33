"""firecREST's records of jobs, merged from sacct and squeue as firecREST does.

The accounting lags behind the scheduler. Just after a job's start and end it has half a record: no
partition and directory, another name and group, and for a running job perhaps a wrong state. A list
by name then lacks a job that has just ended. All of that was measured. A real Slurm is asked at
each request, and has its own delays and gaps.
"""

import asyncio
import os
import pwd
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..batch import BatchScheduler, BatchState
from ..scheduler import LocalJob, LocalScheduler
from ..settings import FirecrestSettings
from ..slurm import SlurmScheduler, seconds_of

_CLUSTER = "sandbox"
USER_ID = 1000
"""The user id at the simulated cluster."""

WINDOWS = {"1h": 3600, "8h": 8 * 3600, "24h": 86_400, "3d": 3 * 86_400, "7d": 7 * 86_400}
"""The `time_window` of a list, in seconds, by its value in the request."""

_PRIORITY = 1
_OUT_OF_MEMORY_SIGNAL = 125
_TERM = 15

_BETWEEN = "\x1f"
"""Separates columns: no name contains it."""
_SACCT = (
    "JobID", "JobName", "State", "ExitCode", "Account", "AllocNodes", "Cluster", "Group",
    "NodeList", "Partition", "User", "WorkDir", "ElapsedRaw", "Start", "End", "TimelimitRaw",
    "Priority",
)  # fmt: skip
_SQUEUE = {
    "JobID": "%A", "JobName": "%j", "State": "%T", "Reason": "%r", "Account": "%a",
    "AllocNodes": "%D", "Group": "%g", "NodeList": "%N", "Partition": "%P", "User": "%u",
    "WorkDir": "%Z", "Elapsed": "%M", "Start": "%S", "End": "%e", "Timelimit": "%l",
    "Priority": "%Q",
}  # fmt: skip

AccountingRecord = dict[str, Any]
_Row = dict[str, str]
"""A line of sacct, or of squeue with the elapsed time and the limit in sacct's form."""


class Accounting(ABC):
    """The jobs of one scheduler as firecREST reports them."""

    @abstractmethod
    async def of_job(self, number: int) -> list[AccountingRecord]:
        """Return the records of a job."""

    @abstractmethod
    async def listed(
        self, names: Collection[str], account: str, window: float
    ) -> list[AccountingRecord]:
        """Return the unfinished jobs, and those that ended in the last `window` seconds.

        `names` and `account` select jobs, unless they are empty.
        sacct and squeue filter separately, so half a record is not found by the job's name.
        """


def accounting_of(
    scheduler: BatchScheduler, settings: FirecrestSettings, user: str, account: str
) -> Accounting:
    """Return the accounting of a scheduler; `account` is the user's default."""
    if isinstance(scheduler, SlurmScheduler):
        return _SlurmAccounting(scheduler)
    assert isinstance(scheduler, LocalScheduler)
    return LocalAccounting(scheduler, settings, user, account)


class _SlurmAccounting(Accounting):
    def __init__(self, scheduler: SlurmScheduler) -> None:
        self._scheduler = scheduler
        self._user = pwd.getpwuid(os.geteuid()).pw_name

    async def of_job(self, number: int) -> list[AccountingRecord]:
        return await self._both((f"--jobs={number}",), (f"--jobs={number}",))

    async def listed(
        self, names: Collection[str], account: str, window: float
    ) -> list[AccountingRecord]:
        common = [f"--user={self._user}"]
        common += [f"--name={','.join(sorted(names))}"] if names else []
        common += [f"--account={account}"] if account else []
        return await self._both((*common, f"--starttime=now-{int(window)}seconds"), common)

    async def _both(self, sacct: Iterable[str], squeue: Iterable[str]) -> list[AccountingRecord]:
        jobs, queued = await asyncio.gather(
            self._scheduler.ask(
                "sacct", "--noheader", "--parsable2", f"--delimiter={_BETWEEN}",
                f"--format={','.join(_SACCT)}", *sacct,
            ),
            self._scheduler.ask(
                "squeue", "--noheader", f"--format={_BETWEEN.join(_SQUEUE.values())}", *squeue
            ),
        )  # fmt: skip
        return _merged(_rows(jobs, _SACCT), map(_in_sacct_form, _rows(queued, tuple(_SQUEUE))))


def _rows(output: str, columns: tuple[str, ...]) -> Iterator[_Row]:
    for line in output.split("\n"):
        if line:
            yield dict(zip(columns, line.split(_BETWEEN), strict=True))


def _in_sacct_form(row: _Row) -> _Row:
    limited = row["Timelimit"][:1].isdigit()
    return row | {
        "ElapsedRaw": str(seconds_of(row["Elapsed"])),
        "TimelimitRaw": str(seconds_of(row["Timelimit"]) // 60) if limited else "",
    }


@dataclass(frozen=True)
class LocalAccounting(Accounting):
    """The accounting of the local scheduler, with the delays of a real one."""

    scheduler: LocalScheduler
    settings: FirecrestSettings
    user: str
    account: str
    clock: Callable[[], float] = time.time

    async def of_job(self, number: int) -> list[AccountingRecord]:
        job = self.scheduler.jobs.get(number)
        if job is None:
            return []
        now = self.clock()
        sacct, squeue = self._sacct(job, now), self._squeue(job, now)
        # A job is reported at once, whatever the lag: by squeue, or as half a record.
        return _merged(sacct if sacct or squeue else self._half(job, job.state, now), squeue)

    async def listed(
        self, names: Collection[str], account: str, window: float
    ) -> list[AccountingRecord]:
        now = self.clock()
        sacct: list[_Row] = []
        squeue: list[_Row] = []
        for job in self.scheduler.jobs.values():
            if account and account != self._account(job):
                continue
            if job.ended is None or job.ended > now - window:
                sacct += self._sacct(job, now)
            squeue += self._squeue(job, now)
        return _merged(sacct, squeue, names)

    def _account(self, job: LocalJob) -> str:
        return job.request.account or self.account

    def _squeue(self, job: LocalJob, now: float) -> list[_Row]:
        if job.state.final:
            return []
        row = self._row(job, now) | {
            "State": job.state.value,
            "Reason": job.reason,
            "AllocNodes": str(job.request.nodes),
            "NodeList": os.uname().nodename if job.started else "",
        }
        if job.started is not None:
            row["End"] = str(int(job.started) + job.request.time_s)
        return [row]

    def _sacct(self, job: LocalJob, now: float) -> list[_Row]:
        lag = self.settings.accounting_lag
        if job.state.final:
            ended = job.ended or now
            if now < ended + lag:
                return self._half(job, job.state, now)
            return self._whole(job, now)
        if job.state is BatchState.PENDING:
            return self._whole(job, now) if now >= job.submitted + lag else []
        started = job.started or now
        if now < started + lag:
            return []
        if now < started + 2 * lag:
            return self._half(job, BatchState.PENDING, now)
        return self._whole(job, now)

    def _whole(self, job: LocalJob, now: float) -> list[_Row]:
        row = self._row(job, now) | {
            "State": _state_text(job.state),
            "ExitCode": _ending(job),
            "AllocNodes": str(job.request.nodes if job.started else 0),
            "NodeList": os.uname().nodename if job.started else "None assigned",
        }
        return [row, _batch_step(job, row)] if job.started else [row]

    def _half(self, job: LocalJob, state: BatchState, now: float) -> list[_Row]:
        row = self._whole(job, now)[0]
        return [
            row
            | {"State": _state_text(state), "ExitCode": row["ExitCode"] if state.final else "0:0"}
            | {"JobName": "allocation", "Partition": "", "WorkDir": "", "Group": "root"}
        ]

    def _row(self, job: LocalJob, now: float) -> _Row:
        """Return the columns that both commands print."""
        elapsed = int((job.ended or now) - job.started) if job.started else 0
        return {
            "JobID": str(job.id),
            "JobName": job.request.name,
            "Account": self._account(job),
            "Cluster": _CLUSTER,
            "Group": self.user,
            "Partition": job.request.partition,
            "User": self.user,
            "WorkDir": str(job.directory),
            "ElapsedRaw": str(elapsed),
            "Start": "" if job.started is None else str(int(job.started)),
            "End": "" if job.ended is None else str(int(job.ended)),
            # Slurm stores limits in minutes.
            "TimelimitRaw": str(-(-job.request.time_s // 60)),
            "Priority": str(_PRIORITY),
        }


def _state_text(state: BatchState) -> str:
    return f"CANCELLED by {USER_ID}" if state is BatchState.CANCELLED else state.value


def _ending(job: LocalJob) -> str:
    """Return exit code and signal as in the accounting.

    Both are 0 unless the job is COMPLETED, FAILED, or OUT_OF_MEMORY (0 and 125).
    """
    if job.state is BatchState.OUT_OF_MEMORY:
        return f"0:{_OUT_OF_MEMORY_SIGNAL}"
    return job.exit_text if job.state in (BatchState.COMPLETED, BatchState.FAILED) else "0:0"


def _batch_step(job: LocalJob, row: _Row) -> _Row:
    step = row | {"JobID": f"{job.id}.batch", "JobName": "batch"}
    step["State"] = row["State"].partition(" ")[0]
    if job.state is BatchState.TIMEOUT:
        step |= {"State": "CANCELLED", "ExitCode": f"0:{_TERM}"}
    elif job.over_memory and job.state is BatchState.FAILED:
        step["State"] = "CANCELLED by 0"
    return step


def _merged(
    sacct: Iterable[_Row], squeue: Iterable[_Row], names: Collection[str] = ()
) -> list[AccountingRecord]:
    """Return one record per job: sacct's, or squeue's if that is PENDING or sacct has none.

    With `names`, only records with one of these names count.
    """
    found: dict[str, AccountingRecord] = {}
    for record in (*_records(sacct), *map(_queued, squeue)):
        if names and record["name"] not in names:
            continue
        pending = record["status"]["state"] == BatchState.PENDING.value
        if pending or record["jobId"] not in found:
            found[record["jobId"]] = record
    return list(found.values())


def _records(rows: Iterable[_Row]) -> list[AccountingRecord]:
    """Return a record per job from sacct's rows, where a job's steps follow it."""
    found: list[AccountingRecord] = []
    for row in rows:
        if "." in row["JobID"]:
            status, times = _status(row) | {"stateReason": None}, _times(row) | {"limit": None}
            step = {"id": row["JobID"], "name": row["JobName"], "status": status, "time": times}
            found[-1]["tasks"].append(step)
        else:
            found.append(_record(row, _status(row)))
    return found


def _queued(row: _Row) -> AccountingRecord:
    return _record(row, _status(row | {"ExitCode": ""}) | {"stateReason": row["Reason"] or "None"})


def _record(row: _Row, status: AccountingRecord) -> AccountingRecord:
    return {
        "jobId": row["JobID"], "name": row["JobName"], "status": status, "tasks": [],
        "time": _times(row), "account": row["Account"],
        "allocationNodes": int(row["AllocNodes"] or 0), "cluster": row.get("Cluster", ""),
        "group": row["Group"], "nodes": row["NodeList"], "partition": row["Partition"],
        "killRequestUser": None, "user": row["User"], "workingDirectory": row["WorkDir"],
        "priority": _number(row["Priority"]),
    }  # fmt: skip


def _status(row: _Row) -> AccountingRecord:
    # State and exit code are empty for a step of a node that went down.
    exit_code, _, signal = row["ExitCode"].partition(":")
    return {
        "state": row["State"] or BatchState.PENDING.value,
        "stateReason": "None",
        "exitCode": _number(exit_code),
        "interruptSignal": _number(signal),
    }


def _times(row: _Row) -> AccountingRecord:
    limit = _number(row["TimelimitRaw"])
    return {
        "elapsed": int(row["ElapsedRaw"]),
        "start": _number(row["Start"]),
        "end": _number(row["End"]),
        "suspended": 0,
        "limit": None if limit is None else limit * 60,
    }


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
