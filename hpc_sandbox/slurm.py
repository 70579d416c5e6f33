"""Use this machine's Slurm as a site's scheduler, through sbatch, scontrol, sacct and scancel.

`SLURM_CONF` selects the Slurm. The sandbox adds only the jobs that are submitted to it, and ends
them when it stops.
"""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from . import processes
from .batch import NONE, BatchJob, BatchScheduler, BatchState, CancelError, Words
from .sbatch import SbatchError, parse_sbatch_time
from .settings import Partition, SandboxError, SandboxSettings
from .shims import user_environment

COMMANDS = ("sbatch", "scancel", "scontrol", "sacct", "squeue", "sinfo", "srun")
_ANSWER = 30.0
"""Timeout of a Slurm command in seconds."""
_STOP = 60.0
"""Seconds that jobs may take to end when the sandbox stops."""
_NODE_BACK = 10.0
"""Seconds that the jobs of a failed node may take to end, before the node is resumed."""
_IN_SECONDS = {"SLURM_TIME_FORMAT": "%s"}
"""Makes Slurm's commands write times as seconds since the epoch."""
_NO_NODES = ("", "(null)", "None assigned")
_FIELD = re.compile(r"(?:^| )([A-Z][\w/:]*)=")


class SlurmScheduler(BatchScheduler):
    """The jobs that one site has in this machine's Slurm."""

    def __init__(self, settings: SandboxSettings, *, home: Path, user: str) -> None:
        """Give jobs `home` and `user` in their environment; raise the errors of `partitions`."""
        self.jobs: dict[int, BatchJob] = {}
        self.partitions = partitions()
        self._interval = settings.timing.status_interval
        # That of sbatch, which jobs inherit: only the needed variables of ours.
        own = user_environment(home, user, "PATH", "SLURM_CONF")
        self._environment = own | dict(settings.environment)
        self._follower: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._follower = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Cancel all unfinished jobs, and wait up to `_STOP` seconds for their ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP):
                while left := [job for job in self.jobs.values() if not job.state.final]:
                    # Repeat scancel: a job that is being started may miss one.
                    await self._run("scancel", *(str(job.id) for job in left))
                    await asyncio.sleep(0.1)
                    await self._refresh()
        if self._follower is not None:
            self._follower.cancel()

    async def submit(
        self, script: str, directory: Path, options: Words = NONE, environment: Words = NONE
    ) -> BatchJob:
        words = [f"--{name}={value}" for name, value in options.items()]
        if environment:
            pairs = ",".join(f"{name}={value}" for name, value in environment.items())
            words.append(f"--export=ALL,{pairs}")
        code, output, errors = await self._run(
            "sbatch", "--parsable", *words, directory=directory, stdin=script
        )
        if code:
            raise SbatchError(errors.strip())
        job = BatchJob(int(output.partition(";")[0]))
        self.jobs[job.id] = job
        await self._refresh()
        return job

    async def cancel(self, number: int) -> None:
        _, _, errors = await self._run("scancel", "--verbose", str(number))
        if "error:" in errors:
            raise CancelError(errors.strip())

    async def fail_node(self, number: int) -> None:
        """Take the node of a running job down, with all its jobs, then resume it."""
        job, details = self.jobs[number], await self.details(number)
        node = f"nodename={(details or {}).get('BatchHost', '')}"
        await self._run("scontrol", "update", node, "state=down", "reason=sandbox")
        with suppress(TimeoutError):
            async with asyncio.timeout(_NODE_BACK):
                while not job.state.final:
                    await asyncio.sleep(0.1)
                    await self._refresh()
        # Slurm refuses this if the node has come back by itself.
        await self._run("scontrol", "update", node, "state=resume")

    async def details(self, number: int) -> dict[str, str] | None:
        _, output, _ = await self._run("scontrol", "--oneliner", "show", "job", str(number))
        return fields(output) or None

    async def script(self, number: int) -> str:
        code, output, _ = await self._run("scontrol", "write", "batch_script", str(number), "-")
        return "" if code else output

    async def attach(self, number: int, command: str) -> tuple[int, str]:
        words = ("--overlap", f"--jobid={number}", "/bin/bash", "-c", command)
        code, _, errors = await self._run("srun", *words)
        return code, errors

    async def ask(self, *command: str) -> str:
        """Return the output of a Slurm command that only reads, or raise `SlurmError`."""
        code, output, errors = await self._run(*command)
        if code:
            raise SlurmError(errors)
        return output

    # --- following -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._refresh()

    async def _refresh(self) -> None:
        """Update the jobs from scontrol, or from sacct if scontrol has forgotten them."""
        unfinished = {job.id for job in self.jobs.values() if not job.state.final}
        if not unfinished:
            return
        _, output, _ = await self._run("scontrol", "--oneliner", "show", "job")
        for line in output.splitlines():
            details = fields(line)
            number = int(details.get("JobId", 0))
            if number in unfinished:
                _update(self.jobs[number], details)
                unfinished.discard(number)
        for number in unfinished:
            await self._look_up(self.jobs[number])

    async def _look_up(self, job: BatchJob) -> None:
        columns = "State,ExitCode,Start,End,NodeList"
        code, output, _ = await self._run(
            "sacct", "-X", "-n", "-P", f"--format={columns}", f"--jobs={job.id}"
        )
        if code == 0 and output.strip():
            state, *values = output.splitlines()[-1].split("|")
            keys = ("JobState", "ExitCode", "StartTime", "EndTime", "NodeList")
            values = [state.partition(" ")[0], *values]
            _update(job, dict(zip(keys, values, strict=True)))

    async def _run(
        self, *command: str, directory: Path | None = None, stdin: str | None = None
    ) -> tuple[int, str, str]:
        """Run a Slurm command and return its exit code, stdout and stderr."""
        # Jobs inherit sbatch's environment, so it must not contain the time format.
        variables = self._environment | ({} if command[0] == "sbatch" else _IN_SECONDS)
        return await processes.communicate(
            *command, stdin=stdin, limit=_ANSWER, cwd=directory, env=variables
        )


class SlurmError(Exception):
    """A Slurm command failed; the message is its standard error."""


def fields(line: str) -> dict[str, str]:
    """Return the `Key=value` pairs of a line of `scontrol --oneliner`; values may hold blanks."""
    parts = _FIELD.split(line.strip())
    found: dict[str, str] = {}
    for key, value in zip(parts[1::2], parts[2::2], strict=True):
        found.setdefault(key, value)
    return found


def _update(job: BatchJob, told: Mapping[str, str]) -> None:
    exit_code, _, signal = told.get("ExitCode", "0:0").partition(":")
    job.name = told.get("JobName", job.name)
    job.reason = told.get("Reason", job.reason)
    started, ended = (_moment(told.get(key, "")) for key in ("StartTime", "EndTime"))
    state = BatchState.__members__.get(told.get("JobState", ""))
    if state is None:
        return
    # A job that was cancelled while it waited has a start time, but no node.
    if state is not BatchState.PENDING and told.get("NodeList") not in _NO_NODES:
        job.started, job.starts = started, int(told.get("Restarts", 0)) + (started is not None)
    if state.final:
        job.ended, job.exit_code, job.signal = ended, int(exit_code), int(signal or 0)
    job.state = state


def _moment(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def partitions() -> tuple[Partition, ...]:
    """Return the partitions of this machine's Slurm, the default one first.

    Raise SandboxError if there is no Slurm, or sinfo fails, and TimeoutExpired if sinfo hangs.
    """
    where = "scheduler slurm"
    lacking = [command for command in COMMANDS if shutil.which(command) is None]
    if lacking:
        raise SandboxError(
            f"this machine has no {', '.join(lacking)}",
            where=where,
            do="Install Slurm's commands, or use the scheduler local",
        )
    listing = subprocess.run(
        ["sinfo", "--noheader", "--exact", "--format=%P|%l|%L|%D|%c|%m|%G"],
        capture_output=True, text=True, check=False, timeout=_ANSWER,
    )  # fmt: skip
    found = _partitions(listing.stdout.splitlines())
    if listing.returncode or not found:
        raise SandboxError(
            f"Slurm does not answer: {listing.stderr.strip() or 'it has no partitions'}",
            where=where,
            do="Start it, or set SLURM_CONF to its configuration file",
        )
    return found


def _partitions(lines: Iterable[str]) -> tuple[Partition, ...]:
    """Read the partitions from sinfo's lines; one with different nodes has several lines."""
    found: dict[str, Partition] = {}
    default = ""
    for line in lines:
        name, longest, usual, nodes, cpus, memory, gres = line.split("|")
        if name.endswith("*"):
            name = default = name.removesuffix("*")
        before = found.get(name, Partition(name, nodes=0, cpus=0, memory_mib=0, gpus=0))
        found[name] = Partition(
            name, max_time=seconds_of(longest), default_time=seconds_of(usual),
            nodes=before.nodes + int(nodes), cpus=max(before.cpus, int(cpus)),
            memory_mib=max(before.memory_mib, int(memory)), gpus=max(before.gpus, _gpus(gres)),
        )  # fmt: skip
    return tuple(sorted(found.values(), key=lambda partition: partition.name != default))


def seconds_of(text: str) -> int:
    """Return the seconds of a time that Slurm prints; a year for `infinite` and the like."""
    if not text[:1].isdigit():
        return 365 * 86400
    return parse_sbatch_time(text)


def _gpus(gres: str) -> int:
    """Return the GPUs in a node's generic resources: `gpu:4`, `gpu:a100:4(S:0-1)`."""
    counts = re.findall(r"gpu:(?:[^:,()]+:)?(\d+)", gres)
    return sum(int(count) for count in counts)
