"""Job states from the schedulers behind firecREST. Pure functions.

All of Slurm was seen on a real server (states, exit codes and signals in each case); PBS follows
the source of firecREST and OpenPBS's own documentation.
"""

from collections.abc import Mapping
from typing import Any, Final

from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase
from snakemake_executor_plugin_mantik.sites.pending import pending_obstacle, pending_reason
from snakemake_executor_plugin_mantik.sites.slurm import (
    LAUNCH_SIGNAL,
    SLURM_RUNNING,
    SLURM_STATES,
    SLURM_WAITING,
    describe_end,
)

_LONGEST_DETAIL: Final = 500

_ENDED: Final = frozenset((*SLURM_STATES, "COMPLETED", "FAILED"))

_PBS_PHASES: Final = {
    **dict.fromkeys("QHWT", Phase.WAITING),
    **dict.fromkeys("RESUB", Phase.RUNNING),
    **dict.fromkeys("FX", Phase.ENDED),
}

_KILL_SIGNAL: Final = 9

_PBS_SIGNALLED: Final = 256
"""PBS's exit status of a job that a signal ended is this plus the signal's number."""
_PBS_TIME_LIMIT: Final = frozenset((-29, -28))
_PBS_OUT_OF_MEMORY: Final = frozenset((-27, -26))


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
    phase = _phase(word)
    code, signal = _number(status.get("exitCode")), _number(status.get("interruptSignal"))
    reason = None
    if phase is Phase.ENDED:
        if len(word) == 1:
            reason, signal = _pbs_reason(code)
        else:
            reason = _slurm_reason(word, code, signal, job)
    waits, never, pending = None, False, ""
    if phase is Phase.WAITING:
        pending = pending_reason(status.get("stateReason"))
        waits, never = pending_obstacle(pending)
    plain = reason in (Reason.SUCCESS, Reason.EXIT_CODE)
    return JobState(
        phase,
        reason,
        detail=_detail(phase, text, pending_reason(status.get("stateReason")), (code, signal)),
        exit_code=code if plain else None,
        scheduler_id=str(job.get("jobId") or ""),
        queue=str(job.get("partition") or ""),
        waits=waits,
        never=never,
        pending=pending,
        started=_seconds(job, "start") or None,
        ran=_seconds(job, "elapsed") if phase is Phase.ENDED else None,
    )


def _seconds(job: Mapping[str, Any], name: str) -> float | None:
    times = job.get("time")
    number = _number(times.get(name)) if isinstance(times, Mapping) else None
    return float(number) if number is not None else None


def _phase(word: str) -> Phase:
    if word in _PBS_PHASES:
        return _PBS_PHASES[word]
    if word in _ENDED:
        return Phase.ENDED
    if word in SLURM_RUNNING:
        return Phase.RUNNING
    return Phase.WAITING if word in SLURM_WAITING else Phase.UNKNOWN


def _slurm_reason(
    word: str, code: int | None, signal: int | None, job: Mapping[str, Any]
) -> Reason:
    if word == "COMPLETED":
        return Reason.SUCCESS
    if word in SLURM_STATES:
        return SLURM_STATES[word]
    if code:
        return Reason.EXIT_CODE
    if signal == LAUNCH_SIGNAL:
        return Reason.LAUNCH_FAILURE
    if signal == _KILL_SIGNAL and "CANCELLED by 0" in _steps(job):
        return Reason.OUT_OF_MEMORY  # OverMemoryKill: slurmd itself cancels the step
    return Reason.UNKNOWN


def _pbs_reason(code: int | None) -> tuple[Reason, int | None]:
    """Return why PBS ended a job, and the signal if any (`Exit_status` in `qstat`'s manual)."""
    if code is None or code == 0:
        return (Reason.UNKNOWN if code is None else Reason.SUCCESS), None
    if code in _PBS_TIME_LIMIT:
        return Reason.TIME_LIMIT, None
    if code in _PBS_OUT_OF_MEMORY:
        return Reason.OUT_OF_MEMORY, None
    if code < 0:
        return Reason.LAUNCH_FAILURE, None
    if code < _PBS_SIGNALLED:
        return Reason.EXIT_CODE, None
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


def _number(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None
