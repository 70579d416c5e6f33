"""The batch scheduler of one sandbox site: a queue, slots, limits, and jobs as local processes."""

import asyncio
import itertools
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from snakemake_executor_plugin_mantik.sandbox import processes, shims
from snakemake_executor_plugin_mantik.sandbox.sbatch import (
    BatchRequest,
    Rules,
    SbatchError,
    parse_script,
)
from snakemake_executor_plugin_mantik.sandbox.settings import Settings

_FIRST_ID = 1000
_NO_DIRECTORY_SIGNAL = 53
"""What Slurm says of a job whose working directory or output file cannot be used."""


class State(Enum):
    """The states of Slurm that a job of the sandbox can be in."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    CANCELLED = "CANCELLED"
    NODE_FAIL = "NODE_FAIL"

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self not in (State.PENDING, State.RUNNING)


_REASONS = {
    State.TIMEOUT: "TimeLimit",
    State.OUT_OF_MEMORY: "OutOfMemory",
    State.NODE_FAIL: "NodeDown",
    State.FAILED: "NonZeroExitCode",
}


@dataclass
class BatchJob:
    """One job of the scheduler.

    Attributes:
        id: the scheduler's id, a number.
        request: what it asked for.
        script: the copy of the batch script that is run.
        directory: working directory.
        state, reason: as Slurm says them.
        exit_code: of the batch script, None until it ended; 0 when a signal ended it.
        signal: that ended the batch script, 0 for none.
        starts: how often it was started.
        submitted, started, ended: seconds since the epoch, None if not yet.
        pid: of the batch script while it runs.
        slots: slots of this machine that it is charged.
        environment: variables that the submission brought.
        verdict: the state that it will end in, None as long as its exit code decides.
    """

    id: int
    request: BatchRequest
    script: Path
    directory: Path
    slots: int
    state: State = State.PENDING
    reason: str = "None"
    exit_code: int | None = None
    signal: int = 0
    starts: int = 0
    submitted: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    pid: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    verdict: State | None = None

    @property
    def exit_text(self) -> str:
        """The exit code as scontrol writes it: `code:signal`."""
        return f"{self.exit_code or 0}:{self.signal}"


class Scheduler:
    """A FIFO queue with first fit: a job starts when its slots are free, in the order of arrival.

    All methods are to be called in the loop that runs the jobs.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        *,
        home: Path,
        user: str,
        rules: Rules | None = None,
    ) -> None:
        """Keep batch scripts in `directory`; jobs run with `home` and `user` in the environment."""
        self.jobs: dict[int, BatchJob] = {}
        self._directory = directory
        self._settings = settings
        self._home = home
        self._user = user
        self._rules = rules or Rules()
        self._ids = itertools.count(_FIRST_ID)
        self._free = settings.slots
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._listeners: list[Callable[[BatchJob], None]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def listen(self, listener: Callable[[BatchJob], None]) -> None:
        """Call `listener` whenever the state of a job changes."""
        self._listeners.append(listener)

    def submit(
        self,
        script: str,
        directory: Path,
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> BatchJob:
        """Queue a batch script that is to run in `directory`.

        `options` are those of sbatch's command line by their long names, `environment` variables
        for the job.

        Raises:
            SbatchError: where sbatch would refuse it, in its words.
        """
        try:
            request = parse_script(script, self._settings.partitions, options, self._rules)
        except SbatchError as error:
            if error.name is not None:
                self._record_refused(error.name, directory)
            raise
        number = next(self._ids)
        copy = self._directory / f"slurm_script.{number}"
        copy.write_text(script)
        copy.chmod(0o700)
        chdir = directory / request.chdir if request.chdir else directory
        job = BatchJob(number, request, copy, chdir, min(request.cpus, self._settings.slots))
        job.environment = environment or {}
        job.reason = request.blocked or "None"
        self.jobs[number] = job
        self._dispatch()
        return job

    def _record_refused(self, name: str, directory: Path) -> None:
        """Keep the record of a job that no node can run, where Slurm keeps one."""
        if not self._rules.records_refused:
            return
        number = next(self._ids)
        request = BatchRequest(self._settings.partitions[0].name, 0, name=name)
        job = BatchJob(number, request, self._directory, directory, 0, state=State.FAILED)
        job.ended = job.submitted
        self.jobs[number] = job

    def cancel(self, number: int) -> None:
        """End a job: TERM to all its processes, KILL to those left after the kill wait."""
        self._end(number, State.CANCELLED)

    def fail_node(self, number: int) -> None:
        """Let the node of a running job die: all its processes are killed at once."""
        job = self.jobs[number]
        if job.state is State.RUNNING and job.pid is not None:
            job.verdict = State.NODE_FAIL
            processes.signal_job(job.pid, signal.SIGKILL)

    def _end(self, number: int, verdict: State) -> None:
        job = self.jobs.get(number)
        if job is None or job.state.final:
            return
        job.verdict = job.verdict or verdict
        if job.state is State.PENDING:
            self._set(job, job.verdict)
        elif job.pid is not None:
            processes.signal_job(job.pid, signal.SIGTERM)
            wait = self._settings.timing.kill_wait
            asyncio.get_running_loop().call_later(wait, self._kill, job)

    def _kill(self, job: BatchJob) -> None:
        if job.state is State.RUNNING and job.pid is not None:
            processes.signal_job(job.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End all jobs at once, by KILL, and wait until none of their processes is left."""
        for job in self.jobs.values():
            if job.state is State.PENDING:
                job.verdict = State.CANCELLED
                self._set(job, State.CANCELLED)
        for job in self.jobs.values():
            if job.state is State.RUNNING:
                job.verdict = State.CANCELLED
                self._kill(job)
        await asyncio.gather(*self._tasks.values())
        shutil.rmtree(self._directory, ignore_errors=True)

    def _set(self, job: BatchJob, state: State) -> None:
        job.state = state
        job.reason = _REASONS.get(state, "None")
        if state.final:
            job.ended = time.time()
        for listener in self._listeners:
            listener(job)

    def _dispatch(self) -> None:
        for job in self.jobs.values():
            if job.state is State.PENDING and not job.request.blocked:
                if job.slots <= self._free:
                    self._free -= job.slots
                    job.started = time.time()
                    job.starts += 1
                    self._set(job, State.RUNNING)
                    self._tasks[job.id] = asyncio.create_task(self._run(job))
                else:
                    job.reason = "Resources"

    async def _run(self, job: BatchJob) -> None:
        try:
            await self._execute(job)
        except OSError as error:
            # A working directory that is gone, a file that cannot be made.
            job.exit_code, job.signal = 0, _NO_DIRECTORY_SIGNAL
            job.verdict = job.verdict or State.FAILED
            job.reason = str(error)
        finally:
            self._free += job.slots
            self._tasks.pop(job.id, None)
            self._set(job, job.verdict or (State.FAILED if job.exit_code else State.COMPLETED))
            self._dispatch()

    async def _execute(self, job: BatchJob) -> None:
        output, error = self.output_path(job), self.error_path(job)
        with output.open("wb") as out:
            err = error.open("wb") if error else None
            try:
                process = await asyncio.create_subprocess_exec(
                    str(job.script),
                    cwd=job.directory,
                    env=self._environment(job),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=err or out,
                    start_new_session=True,
                )
            finally:
                if err:
                    err.close()
        job.pid = process.pid
        if job.verdict is not None:  # cancelled while it was being started
            processes.signal_job(process.pid, signal.SIGKILL)
        watch = asyncio.create_task(self._enforce(job))
        code = await process.wait()
        watch.cancel()
        # The job is over when its batch script is; what it left behind is ended.
        await asyncio.to_thread(processes.kill_rest, process.pid, job.mark)
        job.pid = None
        job.exit_code, job.signal = (0, -code) if code < 0 else (code, 0)
        if job.signal and job.verdict is None:
            job.verdict = State.FAILED

    async def _enforce(self, job: BatchJob) -> None:
        """End the job when its walltime is over or it uses more memory than it asked for."""
        assert job.pid is not None
        deadline = time.monotonic() + job.request.time_s
        limit = job.request.memory_mib
        while (left := deadline - time.monotonic()) > 0:
            if limit is None:
                await asyncio.sleep(left)
                continue
            seen = await asyncio.to_thread(processes.processes)
            if sum(p.memory for p in processes.members(job.pid, seen)) > limit * 2**20:
                job.verdict = job.verdict or State.OUT_OF_MEMORY
                processes.signal_job(job.pid, signal.SIGKILL)
                return
            await asyncio.sleep(min(left, self._settings.timing.memory_interval))
        self._end(job.id, State.TIMEOUT)

    def output_path(self, job: BatchJob) -> Path:
        """Where a job's output goes."""
        return job.directory / self._expand(job.request.output, job)

    def error_path(self, job: BatchJob) -> Path | None:
        """Where a job's error output goes, None for the file of its output."""
        error = job.request.error
        return job.directory / self._expand(error, job) if error else None

    @staticmethod
    def _expand(name: str, job: BatchJob) -> str:
        return name.replace("%j", str(job.id)).replace("%x", job.request.name)

    def _environment(self, job: BatchJob) -> dict[str, str]:
        """A job's environment: nothing of ours but the search path and the language.

        The sandbox often runs with the user's credentials in its environment; they must not be
        seen by jobs, as they are not at a real site.
        """
        request = job.request
        node = os.uname().nodename
        environment = {
            name: os.environ[name] for name in ("LANG", "LC_ALL", "TZ") if name in os.environ
        }
        environment |= {
            "HOME": str(self._home),
            "USER": self._user,
            "LOGNAME": self._user,
            "SHELL": "/bin/bash",
            "SLURM_JOB_ID": str(job.id),
            "SLURM_JOBID": str(job.id),
            "SLURM_JOB_NAME": request.name,
            "SLURM_JOB_PARTITION": request.partition,
            "SLURM_JOB_ACCOUNT": request.account,
            "SLURM_JOB_NODELIST": node,
            "SLURM_NODELIST": node,
            "SLURMD_NODENAME": node,
            "SLURM_NNODES": str(request.nodes),
            "SLURM_JOB_NUM_NODES": str(request.nodes),
            "SLURM_NTASKS": str(request.tasks),
            "SLURM_NPROCS": str(request.tasks),
            "SLURM_NTASKS_PER_NODE": str(request.tasks_per_node),
            "SLURM_CPUS_PER_TASK": str(request.cpus_per_task),
            "SLURM_CPUS_ON_NODE": str(request.tasks_per_node * request.cpus_per_task),
            "SLURM_GPUS_ON_NODE": str(request.gpus),
            "SLURM_SUBMIT_DIR": str(job.directory),
            "SLURM_CLUSTER_NAME": "sandbox",
            processes.MARK: job.mark,
        }
        if request.memory_mib is not None:
            environment["SLURM_MEM_PER_NODE"] = str(request.memory_mib)
        given = dict(self._settings.environment) | dict(job.environment)
        return shims.environment(environment) | given
