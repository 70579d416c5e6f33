"""The sandbox's own batch scheduler: a queue, slots, limits, and jobs as local processes."""

import asyncio
import itertools
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import processes, shims
from .batch import NONE, BatchJob, BatchScheduler, BatchState, CancelError, Words, cancel_error
from .sbatch import TOO_MANY, BatchRequest, SbatchError, SlurmVariant, parse_script
from .settings import SandboxSettings

_FIRST_ID = 1000
_NO_DIRECTORY_SIGNAL = 53
"""The signal that Slurm reports for a job whose working directory or output file is unusable."""

_REASONS = {
    BatchState.TIMEOUT: "TimeLimit",
    BatchState.OUT_OF_MEMORY: "OutOfMemory",
    BatchState.NODE_FAIL: "NodeDown",
    BatchState.FAILED: "NonZeroExitCode",
}


@dataclass
class LocalJob(BatchJob):
    """A job of the local scheduler.

    Attributes:
        copy: the copy of the batch script that is run.
        slots: slots of this machine that the job is charged.
        pid: process id of the batch script while it runs.
        environment: variables from the submission.
        mark: marks the job's processes in their environment.
        verdict: the state that the job will end in, None if its exit code decides.
        over_memory: whether the job was ended for its memory.
    """

    request: BatchRequest = field(kw_only=True)
    copy: Path = field(kw_only=True)
    directory: Path = field(kw_only=True)
    slots: int = 0
    pid: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    verdict: BatchState | None = None
    over_memory: bool = False

    @property
    def output(self) -> Path:
        return self.directory / self._expand(self.request.output)

    @property
    def error(self) -> Path | None:
        """Return the requested file for stderr; None if it goes to `output`."""
        return self.directory / self._expand(self.request.error) if self.request.error else None

    @property
    def stderr(self) -> Path:
        return self.error or self.output

    def _expand(self, name: str) -> str:
        return name.replace("%j", str(self.id)).replace("%x", self.request.name)


class LocalScheduler(BatchScheduler):
    """A queue with first fit: the first submitted job whose slots are free starts.

    So a small job may overtake a larger one that waits.

    `fail_node` kills all processes of the one job at once.

    Attributes:
        max_submit_jobs: how many jobs may wait and run; more are refused. None for no limit.
    """

    jobs: dict[int, LocalJob]

    def __init__(
        self,
        directory: Path,
        settings: SandboxSettings,
        *,
        home: Path,
        user: str,
        rules: SlurmVariant | None = None,
    ) -> None:
        """Keep batch scripts in `directory`; jobs find `home` and `user` in their environment."""
        self.jobs = {}
        self.partitions = settings.partitions
        self.max_submit_jobs = settings.max_submit_jobs
        self._directory = directory
        self._settings = settings
        self._home = home
        self._user = user
        self._rules = rules or SlurmVariant()
        self._ids = itertools.count(_FIRST_ID)
        self._free = settings.slots
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._listeners: list[Callable[[LocalJob], None]] = []
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def has_room(self) -> bool:
        return self._free > 0

    def listen(self, listener: Callable[[LocalJob], None]) -> None:
        """Call `listener` whenever the state of a job changes."""
        self._listeners.append(listener)

    async def submit(
        self, script: str, directory: Path, options: Words = NONE, environment: Words = NONE
    ) -> LocalJob:
        unfinished = sum(not job.state.final for job in self.jobs.values())
        if self.max_submit_jobs is not None and unfinished >= self.max_submit_jobs:
            raise SbatchError(TOO_MANY)
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
        job = LocalJob(
            number, request.name, reason=request.blocked or "None", request=request, copy=copy,
            directory=chdir, slots=min(request.cpus, self._settings.slots),
            environment=environment,
        )  # fmt: skip
        self.jobs[number] = job
        self._dispatch()
        return job

    def _record_refused(self, name: str, directory: Path) -> None:
        """Keep a record of a job that no node can run, if the simulated Slurm keeps one."""
        if not self._rules.records_refused:
            return
        number = next(self._ids)
        request = BatchRequest(self._settings.partitions[0].name, 0, name=name)
        job = self.jobs[number] = LocalJob(
            number, name, BatchState.FAILED, request=request, copy=self._directory,
            directory=directory,
        )  # fmt: skip
        job.ended = job.submitted

    async def cancel(self, number: int) -> None:
        job = self.jobs.get(number)
        if job is None:
            raise CancelError(f"{cancel_error(number)}Invalid job id specified")
        if job.state.final or job.verdict is BatchState.CANCELLED:
            raise CancelError(f"{cancel_error(number)}Job/step already completing or completed")
        self._end(number, BatchState.CANCELLED)

    async def fail_node(self, number: int) -> None:
        job = self.jobs[number]
        if job.state is BatchState.RUNNING and job.pid is not None:
            job.verdict = BatchState.NODE_FAIL
            processes.signal_job(job.pid, signal.SIGKILL)

    async def expire(self, number: int) -> None:
        """End a job as if its walltime were over."""
        self._end(number, BatchState.TIMEOUT)

    async def script(self, number: int) -> str:
        copy = self.jobs[number].copy
        return copy.read_text() if copy.is_file() else ""

    async def attach(self, number: int, command: str) -> tuple[int, str]:
        job = self.jobs.get(number)
        if job is None or job.state is not BatchState.RUNNING:
            return 1, "srun: error: Unable to confirm allocation for job: Invalid job id"
        environment = shims.shim_environment({"HOME": str(self._home), processes.MARK: job.mark})
        code, _, errors = await processes.communicate(
            "/bin/bash", "-c", command, cwd=job.directory, env=environment,
            stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        return code, errors

    async def details(self, number: int) -> dict[str, str] | None:
        job = self.jobs[number]
        if job.ended is not None and job.ended < time.time() - self._rules.job_memory:
            return None
        return _scontrol(job)

    def _end(self, number: int, verdict: BatchState) -> None:
        job = self.jobs.get(number)
        if job is None or job.state.final:
            return
        job.verdict = job.verdict or verdict
        if job.state is BatchState.PENDING:
            self._set(job, job.verdict)
            self._dispatch()
        elif job.pid is not None:
            text = _cancelled(number, time_limit=verdict is BatchState.TIMEOUT)
            _append_error(job.stderr, text)
            loop, timing = asyncio.get_running_loop(), self._settings.timing
            if timing.signal_gap:
                arguments = (job.pid, signal.SIGTERM, timing.signal_gap)
                loop.run_in_executor(None, processes.signal_job, *arguments)
            else:
                processes.signal_job(job.pid, signal.SIGTERM)
            loop.call_later(timing.kill_wait, self._kill, job)

    def _kill(self, job: LocalJob) -> None:
        if job.state is BatchState.RUNNING and job.pid is not None:
            processes.signal_job(job.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Kill all jobs at once, wait until no process is left, and remove the batch scripts."""
        for job in self.jobs.values():
            if not job.state.final:
                job.verdict = BatchState.CANCELLED
                if job.state is BatchState.PENDING:
                    self._set(job, BatchState.CANCELLED)
                self._kill(job)
        await asyncio.gather(*self._tasks.values())
        shutil.rmtree(self._directory, ignore_errors=True)

    def _set(self, job: LocalJob, state: BatchState) -> None:
        waited = job.state is BatchState.PENDING
        job.state = state
        if state is BatchState.FAILED and job.signal:
            job.reason = "JobLaunchFailure"  # whatever the signal was
        elif not (waited and state is BatchState.CANCELLED):  # the reason for waiting stays
            job.reason = _REASONS.get(state, "None")
        if state.final:
            job.ended = time.time()
        for listener in self._listeners:
            listener(job)

    def _dispatch(self) -> None:
        for job in self.jobs.values():
            if job.state is BatchState.PENDING and not job.request.blocked:
                if self._waits(job):
                    job.reason = "Dependency"
                elif job.slots <= self._free:
                    self._free -= job.slots
                    job.started = time.time()
                    job.starts += 1
                    self._set(job, BatchState.RUNNING)
                    self._tasks[job.id] = asyncio.create_task(self._run(job))
                else:
                    job.reason = "Resources"

    def _waits(self, job: LocalJob) -> bool:
        """Return whether a job depends on one that has not ended. Forgotten jobs do not count."""
        before = map(self.jobs.get, job.request.after)
        return any(other is not None and not other.state.final for other in before)

    async def _run(self, job: LocalJob) -> None:
        try:
            await self._execute(job)
        except OSError as error:
            # The working directory is gone, or a file cannot be created.
            job.exit_code, job.signal = 0, _NO_DIRECTORY_SIGNAL
            job.verdict = job.verdict or BatchState.FAILED
            job.reason = str(error)
        finally:
            self._free += job.slots
            self._tasks.pop(job.id, None)
            self._set(
                job, job.verdict or (BatchState.FAILED if job.exit_code else BatchState.COMPLETED)
            )
            self._dispatch()

    async def _execute(self, job: LocalJob) -> None:
        output, error = job.output, job.error
        with output.open("wb") as out:
            err = error.open("wb") if error else None
            try:
                process = await asyncio.create_subprocess_exec(
                    str(job.copy), cwd=job.directory,
                    env=_environment(job, self._settings.environment, self._home, self._user),
                    stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err or out,
                    start_new_session=True,
                )  # fmt: skip
            finally:
                if err:
                    err.close()
        job.pid = process.pid
        if job.verdict is not None:  # cancelled during its start
            processes.signal_job(process.pid, signal.SIGKILL)
        watch = asyncio.create_task(self._enforce(job))
        code = await process.wait()
        watch.cancel()
        # The job ends with its batch script; the remaining processes are killed.
        await asyncio.to_thread(processes.kill_rest, process.pid, job.mark)
        job.pid = None
        job.exit_code, job.signal = (0, -code) if code < 0 else (code, 0)
        if job.signal and job.verdict is None:
            job.verdict = BatchState.FAILED

    async def _enforce(self, job: LocalJob) -> None:
        """End the job when its walltime is over or it uses more memory than it requested."""
        assert job.pid is not None
        deadline = time.monotonic() + job.request.time_s
        limit = job.request.memory_mib
        while (left := deadline - time.monotonic()) > 0:
            if limit is None:
                await asyncio.sleep(left)
                continue
            await asyncio.sleep(min(left, self._settings.timing.memory_interval))
            seen = await asyncio.to_thread(processes.processes)
            used = sum(p.memory for p in processes.members(job.pid, seen))
            if used > limit * 2**20:
                self._end_for_memory(job, used)
                return
        self._end(job.id, BatchState.TIMEOUT)

    def _end_for_memory(self, job: LocalJob, used: int) -> None:
        assert job.pid is not None
        job.over_memory = True
        job.verdict = job.verdict or BatchState(self._settings.memory_state)
        step = f"StepId={job.id}.batch"
        if job.verdict is BatchState.OUT_OF_MEMORY:
            _append_error(
                job.stderr,
                f"Detected 1 oom-kill event(s) in {step}. Some of your processes may have been "
                "killed by the cgroup out-of-memory handler.",
            )
        else:  # by OverMemoryKill
            limit = (job.request.memory_mib or 0) * 2**20
            _append_error(
                job.stderr,
                f"{step} exceeded memory limit ({used} > {limit}), being killed",
                "Exceeded job memory limit",
                _cancelled(job.id),
            )
        processes.signal_job(job.pid, signal.SIGKILL)


def _append_error(file: Path, *lines: str) -> None:
    """Append lines of slurmstepd to a job's standard error, if the file can be written."""
    node = os.uname().nodename
    with suppress(OSError), file.open("a") as opened:
        opened.writelines(f"slurmstepd-{node}: error: {line}\n" for line in lines)


def _cancelled(number: int, *, time_limit: bool = False) -> str:
    node, now = os.uname().nodename, time.strftime("%Y-%m-%dT%H:%M:%S")
    due = " DUE TO TIME LIMIT" if time_limit else ""
    return f"*** JOB {number} ON {node} CANCELLED AT {now}{due} ***"


def _environment(
    job: LocalJob, settings: Mapping[str, str], home: Path, user: str
) -> dict[str, str]:
    """Return a job's environment; of ours it has only search path, language and time zone.

    The sandbox often has the user's credentials in its environment. Jobs must not see them, as they
    do not at a real site. `settings` are the variables of all jobs.
    """
    request = job.request
    node = os.uname().nodename
    found = shims.user_environment(home, user) | {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), str(job.id)),
        "SLURM_JOB_NAME": request.name, "SLURM_JOB_PARTITION": request.partition,
        "SLURM_JOB_ACCOUNT": request.account,
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURMD_NODENAME"), node),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(request.nodes)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(request.tasks)),
        "SLURM_NTASKS_PER_NODE": str(request.tasks_per_node),
        "SLURM_CPUS_PER_TASK": str(request.cpus_per_task),
        "SLURM_CPUS_ON_NODE": str(request.tasks_per_node * request.cpus_per_task),
        "SLURM_GPUS_ON_NODE": str(request.gpus), "SLURM_SUBMIT_DIR": str(job.directory),
        "SLURM_CLUSTER_NAME": "sandbox", processes.MARK: job.mark,
    }  # fmt: skip
    if request.memory_mib is not None:
        found["SLURM_MEM_PER_NODE"] = str(request.memory_mib)
    return shims.shim_environment(found) | dict(settings) | dict(job.environment)


def _scontrol(job: LocalJob) -> dict[str, str]:
    request = job.request
    return {
        "JobId": str(job.id), "JobName": request.name, "JobState": job.state.value,
        "Reason": job.reason, "ExitCode": job.exit_text, "Partition": request.partition,
        "Account": request.account or "(null)", "QOS": request.qos or "normal",
        "Comment": request.comment, "TimeLimit": _clock(request.time_s),
        "RunTime": _clock((job.ended or time.time()) - (job.started or time.time())),
        "SubmitTime": _date(job.submitted), "StartTime": _date(job.started),
        "EndTime": _date(job.ended), "NumNodes": str(request.nodes),
        "NodeList": os.uname().nodename if job.started else "(null)",
        "NumCPUs": str(request.cpus), "NumTasks": str(request.tasks),
        "CPUs/Task": str(request.cpus_per_task),
        "MinMemoryNode": f"{request.memory_mib}M" if request.memory_mib else "0",
        "TresPerNode": f"gres:gpu:{request.gpus}" if request.gpus else "(null)",
        "Restarts": str(max(0, job.starts - 1)), "WorkDir": str(job.directory),
        "StdErr": str(job.stderr), "StdIn": "/dev/null", "StdOut": str(job.output),
    }  # fmt: skip


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def _date(when: float | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(when)) if when else "Unknown"
