"""Find all processes of a job, measure their memory, and end them.

A job's processes are those of its session, their descendants, and those with the job's mark in
their environment (a daemon that left the session). Linux shows all of that in /proc. Elsewhere
(macOS), `ps` shows groups and descendants, but no marks.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "MANTIK_SANDBOX_JOB"
"""The environment variable that marks a job's processes."""

_LOOK_AGAIN = 0.01
"""Seconds between killing a job's remaining processes and the next check for more."""

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").exists()
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One process; `memory` is its resident memory in bytes."""

    pid: int
    parent: int
    group: int
    session: int
    memory: int


def processes() -> list[Process]:
    """Return all visible processes of this machine except zombies."""
    return _from_proc() if _HAS_PROC else _from_ps()


def _from_proc() -> list[Process]:
    found = []
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            with suppress(OSError):
                text = (_PROC / entry.name / "stat").read_text(errors="replace")
                # The command, in parentheses, may hold blanks and parentheses.
                fields = text.rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parent, group, session = (int(field) for field in fields[1:4])
                    memory = int(fields[21]) * _PAGE
                    found.append(Process(int(entry.name), parent, group, session, memory))
    return found


def _from_ps() -> list[Process]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,pgid=,rss=,state="],
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for line in listing.stdout.splitlines():
        pid, parent, group, memory, state = line.split()[:5]
        if not state.startswith("Z"):
            found.append(Process(int(pid), int(parent), int(group), int(group), int(memory) * 1024))
    return found


def members(leader: int, among: Iterable[Process]) -> list[Process]:
    """Return the processes of the session that `leader` leads or led, and their descendants.

    Each precedes its children. Sorting by id would not do: the kernel's ids wrap around.
    """
    among = list(among)
    mine = {process.pid for process in among if leader in (process.session, process.group)}
    grown = True
    while grown:
        more = {process.pid for process in among if process.parent in mine} - mine
        mine |= more
        grown = bool(more)
    found: list[Process] = []
    left = {process.pid: process for process in among if process.pid in mine}
    while left:
        # If ids were reused during the listing, a process may be its own ancestor.
        first = [p for p in left.values() if p.parent not in left] or list(left.values())
        found += first
        for process in first:
            del left[process.pid]
    return found


def marked(mark: str, among: Iterable[Process]) -> list[Process]:
    """Return the processes that have `mark` in their environment."""
    if not _HAS_PROC:
        return []
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in among:
        with suppress(OSError):
            if wanted in (_PROC / str(process.pid) / "environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def signal_job(leader: int, number: signal.Signals, gap: float = 0.0) -> None:
    """Send a signal to all processes of the job's session, the batch script first.

    So a parent gets the signal before it can notice the end of a child, for which its `set -e`
    would end it. A real scheduler does not take that care: with a `gap`, in seconds between two
    processes, the children get the signal first and the batch script last.
    """
    if gap:
        for process in reversed(members(leader, processes())):
            signal_all([process.pid], number)
            time.sleep(gap)
        return
    signal_all([leader], number)
    signal_all([p.pid for p in members(leader, processes()) if p.pid != leader], number)


def kill_rest(leader: int, mark: str) -> None:
    """Kill all remaining processes of a job whose batch script has ended.

    Repeat while there are any, up to ten times: a process may have forked meanwhile.
    """
    for _ in range(10):
        seen = processes()
        left = {p.pid for p in [*members(leader, seen), *marked(mark, seen)]} - {os.getpid()}
        if not left:
            return
        signal_all(left, signal.SIGKILL)
        time.sleep(_LOOK_AGAIN)


async def communicate(
    *command: str, stdin: str | None = None, limit: float | None = None, **options: Any
) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr; end it after `limit` seconds.

    `options` are those of `create_subprocess_exec`.
    """
    options = {"stdout": asyncio.subprocess.PIPE, **options}
    given = asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=given, stderr=asyncio.subprocess.PIPE, **options
    )
    try:
        async with asyncio.timeout(limit):
            output, errors = await process.communicate(None if stdin is None else stdin.encode())
    except (TimeoutError, asyncio.CancelledError):
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    shown = (output or b"").decode(errors="replace")
    return process.returncode or 0, shown, errors.decode(errors="replace")
