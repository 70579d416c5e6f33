"""What Slurm's slurmstepd writes into a job's standard error when it ends the job (22.05)."""

import os
import time
from pathlib import Path


def append_error(file: Path, *lines: str) -> None:
    """Append lines of slurmstepd to a job's standard error, if it can be written."""
    node = os.uname().nodename
    try:
        with file.open("a") as opened:
            opened.writelines(f"slurmstepd-{node}: error: {line}\n" for line in lines)
    except OSError:
        pass


def cancelled(number: int, *, time_limit: bool = False) -> str:
    """The line for a job that is cancelled, or whose time is over."""
    node, now = os.uname().nodename, time.strftime("%Y-%m-%dT%H:%M:%S")
    due = " DUE TO TIME LIMIT" if time_limit else ""
    return f"*** JOB {number} ON {node} CANCELLED AT {now}{due} ***"


def over_memory(number: int, used: int, limit: int) -> tuple[str, ...]:
    """The lines for a job that OverMemoryKill ends; `used` and `limit` are bytes."""
    step = f"StepId={number}.batch"
    return (
        f"{step} exceeded memory limit ({used} > {limit}), being killed",
        "Exceeded job memory limit",
        cancelled(number),
    )


def oom_killed(number: int) -> str:
    """The line for a job whose processes the kernel killed for its cgroup's limit."""
    return (
        f"Detected 1 oom-kill event(s) in StepId={number}.batch. Some of your processes may have "
        "been killed by the cgroup out-of-memory handler."
    )
