"""Jobs through firecREST's compute API, and what its answers say of their states."""

import asyncio
import logging
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final

from ...common.errors import SiteNotFound, SiteRejected, SiteUnreachable
from ...jobs.reasons import Reason
from ..base import MISSING, JobState, Phase, Submission, do_nothing
from ..rest import RestSite, ask_all, states_of
from ..slurm import (
    describe_end,
    end_reason,
    failed_node,
    is_scheduler_id,
    memory_message,
    parse_number,
    pending_obstacle,
    pending_reason,
    slurm_phase,
)
from .connection import FirecrestConnection, FirecrestOpened
from .script import JOBS, job_body, scheduler_job_name, scheduler_script

_LONGEST_DETAIL: Final = 500

_PBS_PHASES: Final = {
    **dict.fromkeys("QHWT", Phase.WAITING),
    **dict.fromkeys("RESUB", Phase.RUNNING),
    **dict.fromkeys("FX", Phase.ENDED),
}

_KILL_SIGNAL: Final = 9

_PBS_SIGNALLED: Final = 256
"""PBS's exit status of a job that a signal ended is this plus the signal's number."""
_PBS_ENDS: Final = {
    0: Reason.SUCCESS,
    **dict.fromkeys((-29, -28), Reason.TIME_LIMIT),
    **dict.fromkeys((-27, -26), Reason.OUT_OF_MEMORY),
}


def firecrest_state(job: Mapping[str, Any]) -> JobState:
    """Return the state of one job in firecREST's list.

    Right after the start and the end of a job Slurm's accounting has half a record of it, in which
    a running job may be PENDING; an end in such a record was right each time.
    """
    status = job.get("status")
    status = status if isinstance(status, Mapping) else {}
    text = status.get("state")
    text = " ".join(map(str, text)) if isinstance(text, list) else str(text or "")
    word = text.split(" ")[0].rstrip("+")
    phase = _PBS_PHASES.get(word) or slurm_phase(word)
    code, signal = parse_number(status.get("exitCode")), parse_number(status.get("interruptSignal"))
    reason, node = None, ""
    if phase is Phase.ENDED:
        if len(word) == 1:
            reason, signal = _pbs_reason(code)
        else:
            reason = _slurm_reason(word, code, signal, job)
            node = failed_node(reason, job.get("nodes"))
    waits, never, pending = None, False, ""
    if phase is Phase.WAITING:
        pending = pending_reason(status.get("stateReason"))
        waits, never = pending_obstacle(pending)
    return JobState(
        phase,
        reason,
        detail=_detail(phase, text, pending_reason(status.get("stateReason")), (code, signal)),
        scheduler_id=str(job.get("jobId") or ""),
        failed_node=node,
        waits=waits,
        never=never,
        pending=pending,
        started=_seconds(job, "start") or None,
        ran=_seconds(job, "elapsed") if phase is Phase.ENDED else None,
    )


def _seconds(job: Mapping[str, Any], name: str) -> float | None:
    times = job.get("time")
    number = parse_number(times.get(name)) if isinstance(times, Mapping) else None
    return float(number) if number is not None else None


def _slurm_reason(
    word: str, code: int | None, signal: int | None, job: Mapping[str, Any]
) -> Reason:
    killed = word == "FAILED" and not code and signal == _KILL_SIGNAL
    if killed and "CANCELLED by 0" in _steps(job):
        return Reason.OUT_OF_MEMORY  # OverMemoryKill: slurmd itself cancels the step
    return end_reason(word, code, signal) or Reason.UNKNOWN


def _pbs_reason(code: int | None) -> tuple[Reason, int | None]:
    """Return why PBS ended a job, and the signal if any (`Exit_status` in `qstat`'s manual)."""
    if code is None:
        return Reason.UNKNOWN, None
    if code < _PBS_SIGNALLED:
        other = Reason.LAUNCH_FAILURE if code < 0 else Reason.EXIT_CODE
        return _PBS_ENDS.get(code, other), None
    signal = code - _PBS_SIGNALLED
    return (Reason.CANCELLED if signal == 15 else Reason.UNKNOWN), signal


def _steps(job: Mapping[str, Any]) -> list[str]:
    tasks = job.get("tasks")
    return [
        str(task["status"].get("state"))
        for task in (tasks if isinstance(tasks, list) else [])
        if isinstance(task, Mapping) and isinstance(task.get("status"), Mapping)
    ]


def _detail(phase: Phase, said: str, reason: str, end: tuple[int | None, int | None]) -> str:
    """Describe a state in the scheduler's words; `end` are exit code and signal."""
    if phase is Phase.ENDED and len(said) > 1:
        text = describe_end(said, reason, *end)
    else:
        text = f"{said} ({reason})" if reason else said
        text += f", signal {end[1]}" if end[1] else ""
    return " ".join(text.split())[:_LONGEST_DETAIL]


JOB_CHANNELS: Final = 2
"""ssh channels that firecREST opens to query jobs: sacct and squeue run concurrently."""
_LIST_WINDOW: Final = "1h"
"""Age up to which ended jobs are listed for their states; waiting and running ones always are."""
_LONG_WINDOW: Final = "24h"
"""The same if many jobs are missing in that list; a few are queried one by one."""
_FIND_WINDOW: Final = "7d"
"""Age up to which jobs are searched for by their names: the maximum of firecREST."""
_NAMES_LENGTH: Final = 235
"""Maximum length of the comma-separated names for one list (`name` of
`GET /compute/{system}/jobs`)."""
_FEW_LISTS: Final = 8
"""So many lists by name cost a site less than one list of all of the user's jobs: 0.1 s each, where
1,850 jobs take 1.3 s."""
_OUTPUT_BYTES: Final = 16_384
"""Bytes at the end of a job's output that are read to explain its end."""

_FOR_MEMORY: Final = (Reason.UNKNOWN, Reason.EXIT_CODE, Reason.OUT_OF_MEMORY)
"""Ends for which the job's output may show a lack of memory."""

FIRST_LOOK_S: Final = 0.5
"""Wait before the first poll of a transfer job, seconds; each further wait is 1.5 times longer."""
_LONGEST_LOOK_S: Final = 15.0
UNSEEN_S: Final = 120.0
"""How long a transfer job may be unknown to the scheduler before it counts as lost, seconds."""
_AGAIN: Final = frozenset((Reason.NODE_FAILURE, Reason.PREEMPTED))

_ID: Final = re.compile(r"[A-Za-z0-9]+")
_log = logging.getLogger(__name__)


class FirecrestJobs(RestSite[FirecrestConnection, FirecrestOpened]):
    """The part of a site that deals with the user's jobs."""

    connection = FirecrestConnection
    states_lag = False
    _too_many = False
    """Whether the server was seen to fail at a list of all of the user's jobs."""

    @property
    def _jobs_path(self) -> str:
        return f"/compute/{self._open.system.name}/jobs"

    async def submit(self, submission: Submission, begin: Callable[[], None] = do_nothing) -> str:
        opened = self._open
        script = scheduler_script(submission, opened.system.scheduler, opened.root)
        return await self._submit(script, begin)

    async def _submit(self, script: str, begin: Callable[[], None] = do_nothing) -> str:
        body = job_body(script, self._open.root)
        async with self._turn():
            begin()
            answer = await self._connection.once("submit", "POST", self._jobs_path, json=body)
        job_id = str(self._connection.json_of(answer).get("jobId") or "")
        if not _ID.fullmatch(job_id):
            raise self._connection.nonsense("a submission")
        return job_id

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        """See `Site.find`.

        A job that has just started is listed with half a record, without its name.
        """
        found: dict[str, list[str]] = {tag: [] for tag in names}
        tags = {scheduler_job_name(name, tag): tag for tag, name in names.items()}
        for job in await self._named(list(tags)):
            if (tag := tags.get(str(job.get("name")))) is not None:
                found[tag].append(str(job.get("jobId")))
        return found

    async def _named(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """List the jobs of some names, perhaps among others, as the site can do it most cheaply."""
        # Otherwise every list has all jobs of the user: PBS lists all, and the server filters.
        system = self._open.system
        filters = system.scheduler == "slurm" and system.lists_by_time
        lists = name_lists(names)
        if not filters or (len(lists) > _FEW_LISTS and not self._too_many):
            try:
                return list((await self._list("find", _FIND_WINDOW)).values())
            except SiteUnreachable as error:
                if not filters or error.status is None:
                    raise
                self._too_many = True
        jobs: list[dict[str, Any]] = []
        for some in lists:
            jobs += (await self._list("find", _FIND_WINDOW, some)).values()
        return jobs

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        wanted = list(dict.fromkeys(ids))
        listed = await self._listed(set(wanted)) if len(wanted) > 1 else {}
        known = {job_id: firecrest_state(job) for job_id, job in listed.items()}
        left = [job_id for job_id in wanted if job_id not in known]
        max_concurrency = max(1, self._connection.max_concurrency // JOB_CHANNELS)
        # If the scheduler cannot answer for one job in time, the others are not queried.
        answers = await ask_all(left, self._state, max_concurrency, give_up=(SiteUnreachable,))
        known |= states_of(answers, len(wanted))
        return {job_id: known[job_id] for job_id in wanted}

    async def glance(self, ids: Sequence[str]) -> dict[str, JobState]:
        jobs = await self._list("status", _LIST_WINDOW)
        return {i: firecrest_state(jobs[i]) for i in ids if i in jobs}

    async def scheduler_ids(self, ids: Sequence[str]) -> dict[str, str]:
        return {i: i for i in ids if is_scheduler_id(i)}

    async def _state(self, job_id: str) -> JobState:
        """Return the state of one job, from the scheduler's queue and its accounting at once."""
        job = await self._job("status", job_id)
        return MISSING if job is None else firecrest_state(job)

    async def explain(self, job_id: str) -> JobState:
        """See `Site.explain`.

        The job's own record is read: the list has been seen to report NODE_FAIL for a job that was
        restarted and then cancelled.
        """
        job = await self._job("explain", job_id)
        if job is None:
            return MISSING
        state = firecrest_state(job)
        if state.phase is not Phase.ENDED or state.reason not in _FOR_MEMORY:
            return state
        path = f"/filesystem/{self._open.system.name}/ops/tail"
        output = f"{self._at(JOBS)}/{job_id}.out"
        try:
            answer = await self._connection.get(
                "explain", path, {"path": output, "bytes": _OUTPUT_BYTES}
            )
        except (SiteNotFound, SiteRejected, SiteUnreachable) as error:
            _log.debug("the output of job %s cannot be read: %s", job_id, error)
            return state
        found = answer.get("output")
        text = str(found.get("content", "")) if isinstance(found, dict) else ""
        if words := memory_message(text):
            return replace(state, reason=Reason.OUT_OF_MEMORY, detail=words)
        return state

    async def cancel(self, ids: Sequence[str]) -> None:
        await self._each(
            [job_id for job_id in ids if _ID.fullmatch(job_id)],
            lambda job: self._connection.ask("cancel", "DELETE", f"{self._jobs_path}/{job}"),
        )

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        """Do nothing: schedulers keep their records themselves."""

    async def _job(self, kind: str, job_id: str) -> dict[str, Any] | None:
        if not _ID.fullmatch(job_id):
            return None
        try:
            return (await self._jobs(kind, f"{self._jobs_path}/{job_id}")).get(job_id)
        except SiteNotFound:
            return None

    async def _listed(self, ids: Set[str]) -> dict[str, dict[str, Any]]:
        """Return the jobs `ids` that the scheduler lists; list as few others as possible."""
        try:
            jobs = await self._list("status", _LIST_WINDOW)
            if len(ids - jobs.keys()) > _FEW_LISTS and not self._too_many:
                jobs |= await self._list("status", _LONG_WINDOW)
        except (SiteUnreachable, SiteRejected) as error:
            if error.status is None:
                raise
            self._too_many = True
            jobs = {}
        return {job_id: job for job_id, job in jobs.items() if job_id in ids}

    async def _list(self, kind: str, window: str, name: str = "") -> dict[str, dict[str, Any]]:
        """List the user's jobs of `window` and those that wait or run; optionally those of `name`.

        Not repeated after an error of the server: it has then waited 5 s for the scheduler.
        """
        params = {"time_window": window} if self._open.system.lists_by_time else {}
        if params and name:
            params["name"] = name
        return await self._jobs(kind, self._jobs_path, params)

    async def _jobs(
        self, kind: str, path: str, params: Mapping[str, str] | None = None
    ) -> dict[str, dict[str, Any]]:
        answer = await self._connection.get(
            kind, path, params, channels=JOB_CHANNELS, answered=False
        )
        jobs = answer.get("jobs", "missing")
        if jobs is not None and not isinstance(jobs, list):
            raise self._connection.nonsense("a list of jobs")
        return {str(job.get("jobId")): job for job in jobs or () if isinstance(job, dict)}

    async def _wait(self, job_id: str) -> None:
        """Wait until a transfer job has succeeded.

        Raises:
            SiteRejected: it ended in another way.
            SiteUnreachable: the scheduler no longer knows it, its node failed, or it was preempted.
        """
        pause, unseen = FIRST_LOOK_S, 0.0
        while True:
            await asyncio.sleep(pause)
            state = await self._state(job_id)
            if state.phase is Phase.ENDED:
                break
            unseen = unseen + pause if state.phase is Phase.UNKNOWN else 0.0
            if unseen > UNSEEN_S:
                raise SiteUnreachable(
                    f"the scheduler no longer knows the transfer job {job_id}", where=self._where
                )
            pause = min(pause * 1.5, _LONGEST_LOOK_S)
        if state.reason is not Reason.SUCCESS:
            kind = SiteUnreachable if state.reason in _AGAIN else SiteRejected
            raise kind(
                f"the transfer job {job_id} ended as {state.detail}",
                where=self._where,
                do="Check your quota and permissions at the site",
            )

    def _job_of(self, transfer: Mapping[str, Any]) -> str:
        with self._connection.parsing("a transfer"):
            return str(transfer["transferJob"]["jobId"])


def name_lists(names: Iterable[str]) -> list[str]:
    """Join names, which have no blanks, with commas, as many in each text as one list accepts."""
    lines = textwrap.wrap(
        " ".join(names), _NAMES_LENGTH, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(" ", ",") for line in lines]
