"""firecREST's records of the jobs of a real Slurm, from sacct and squeue at each request."""

import asyncio
import os
import pwd
from collections.abc import Iterable, Iterator

from ..batch import BatchScheduler, BatchState
from ..scheduler import LocalScheduler
from ..settings import FirecrestSettings
from ..slurm import SlurmScheduler, seconds_of
from .accounting import (
    Accounting,
    AccountingRecord,
    LocalAccounting,
    merged,
    status_of,
)

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

_Row = dict[str, str]


def accounting_of(
    scheduler: BatchScheduler, settings: FirecrestSettings, user: str, account: str
) -> Accounting:
    """Return the accounting of a scheduler; `account` is the user's default."""
    if isinstance(scheduler, SlurmScheduler):
        return _SlurmAccounting(scheduler)
    assert isinstance(scheduler, LocalScheduler)
    return LocalAccounting(scheduler, settings, user, account)


class _SlurmAccounting(Accounting):
    """The accounting of a real Slurm, with its own delays and gaps."""

    def __init__(self, scheduler: SlurmScheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._user = pwd.getpwuid(os.geteuid()).pw_name

    async def _of_job(self, number: str) -> list[AccountingRecord]:
        return await self._both((f"--jobs={number}",), (f"--jobs={number}",)) if _id(number) else []

    async def _listed(self, names: set[str], account: str, window: float) -> list[AccountingRecord]:
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
        return merged(_records(_rows(jobs, _SACCT)), map(_queued, _rows(queued, tuple(_SQUEUE))))


def _id(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _rows(output: str, columns: tuple[str, ...]) -> Iterator[_Row]:
    for line in output.split("\n"):
        if line:
            yield dict(zip(columns, line.split(_BETWEEN), strict=True))


def _records(rows: Iterable[_Row]) -> list[AccountingRecord]:
    """Return a record per job from sacct's rows, where a job's steps follow it."""
    found: list[AccountingRecord] = []
    for row in rows:
        if "." in row["JobID"]:
            found[-1]["tasks"].append(_step(row))
        else:
            limit = row["TimelimitRaw"]
            found.append(
                _record(row, int(row["ElapsedRaw"]), int(limit) * 60 if limit.isdigit() else None)
                | {"cluster": row["Cluster"], "status": _status(row), "tasks": []}
            )
    return found


def _queued(row: _Row) -> AccountingRecord:
    limit = seconds_of(row["Timelimit"]) if row["Timelimit"][:1].isdigit() else None
    return _record(row, seconds_of(row["Elapsed"]), limit) | {
        "status": status_of(row["State"], row["Reason"], None, None),
        "tasks": [],
    }


def _record(row: _Row, elapsed: int, limit: int | None) -> AccountingRecord:
    return {
        "jobId": row["JobID"],
        "name": row["JobName"],
        "status": None,
        "tasks": None,
        "time": {**_times(row), "elapsed": elapsed, "suspended": 0, "limit": limit},
        "account": row["Account"],
        "allocationNodes": int(row["AllocNodes"] or 0),
        "cluster": "",
        "group": row["Group"],
        "nodes": row["NodeList"],
        "partition": row["Partition"],
        "killRequestUser": None,
        "user": row["User"],
        "workingDirectory": row["WorkDir"],
        "priority": int(row["Priority"]) if row["Priority"].isdigit() else None,
    }


def _step(row: _Row) -> AccountingRecord:
    status = _status(row) | {"stateReason": None}
    times = {**_times(row), "elapsed": int(row["ElapsedRaw"]), "suspended": 0, "limit": None}
    return {"id": row["JobID"], "name": row["JobName"], "status": status, "time": times}


def _status(row: _Row) -> AccountingRecord:
    # State and exit code are empty for a step of a node that went down.
    exit_code, signal = (int(part) if part else None for part in _parts(row["ExitCode"]))
    return status_of(row["State"] or BatchState.PENDING.value, "None", exit_code, signal)


def _parts(text: str) -> tuple[str, str]:
    first, _, second = text.partition(":")
    return first, second


def _times(row: _Row) -> dict[str, int | None]:
    return {
        name: int(row[key]) if row[key].isdigit() else None
        for name, key in (("start", "Start"), ("end", "End"))
    }
