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

from snakemake_executor_plugin_mantik.sandbox import processes, shims
from snakemake_executor_plugin_mantik.sandbox.batch import (
    BatchJob,
    CancelError,
    Scheduler,
    State,
    cancel_error,
)
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


_REASONS = {
    State.TIMEOUT: "TimeLimit",
    State.OUT_OF_MEMORY: "OutOfMemory",
    State.NODE_FAIL: "NodeDown",
    State.FAILED: "NonZeroExitCode",
}


@dataclass
class LocalJob(BatchJob):
    """A job of the local scheduler.

    Attributes:
        request: what it asked for.
        copy: the copy of the batch script that is run.
        directory: working directory.
        slots: slots of this machine that it is charged.
        pid: of the batch script while it runs.
        environment: variables that the submission brought.
        mark: what its processes carry in their environment.
        verdict: the state that it will end in, None as long as its exit code decides.
    """

    request: BatchRequest = field(kw_only=True)
    copy: Path = field(kw_only=True)
    directory: Path = field(kw_only=True)
    slots: int = 0
    pid: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    verdict: State | None = None


class LocalScheduler(Scheduler):
    """A FIFO queue with first fit: a job starts when its slots are free, in the order of arrival.

    `fail_node` kills all processes of the one job at once.
    """

    jobs: dict[int, LocalJob]

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
        self.jobs = {}
        self.partitions = settings.partitions
        self._directory = directory
        self._settings = settings
        self._home = home
        self._user = user
        self._rules = rules or Rules()
        self._ids = itertools.count(_FIRST_ID)
        self._free = settings.slots
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._listeners: list[Callable[[LocalJob], None]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def listen(self, listener: Callable[[LocalJob], None]) -> None:
        """Call `listener` whenever the state of a job changes."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Nothing: the jobs run in tasks of the loop."""

    async def submit(
        self,
        script: str,
        directory: Path,
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> LocalJob:
        """Queue a batch script; see `Scheduler.submit`."""
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
            environment=environment or {},
        )  # fmt: skip
        self.jobs[number] = job
        self._dispatch()
        return job

    def _record_refused(self, name: str, directory: Path) -> None:
        """Keep the record of a job that no node can run, where Slurm keeps one."""
        if not self._rules.records_refused:
            return
        number = next(self._ids)
        request = BatchRequest(self._settings.partitions[0].name, 0, name=name)
        job = LocalJob(
            number, name, State.FAILED, request=request, copy=self._directory, directory=directory
        )
        job.ended = job.submitted
        self.jobs[number] = job

    async def cancel(self, number: int) -> None:
        """End a job; see `Scheduler.cancel`."""
        job = self.jobs.get(number)
        if job is None:
            raise CancelError(f"{cancel_error(number)}Invalid job id specified")
        if job.state.final or job.verdict is State.CANCELLED:
            raise CancelError(f"{cancel_error(number)}Job/step already completing or completed")
        self._end(number, State.CANCELLED)

    async def fail_node(self, number: int) -> None:
        """Let the node of a running job die: all its processes are killed at once."""
        job = self.jobs[number]
        if job.state is State.RUNNING and job.pid is not None:
            job.verdict = State.NODE_FAIL
            processes.signal_job(job.pid, signal.SIGKILL)

    async def script(self, number: int) -> str:
        """The batch script of a job."""
        copy = self.jobs[number].copy
        return copy.read_text() if copy.is_file() else ""

    async def attach(self, number: int, command: str) -> tuple[int, str]:
        """Run a command beside a running job; see `Scheduler.attach`."""
        job = self.jobs.get(number)
        if job is None or job.state is not State.RUNNING:
            return 1, "srun: error: Unable to confirm allocation for job: Invalid job id"
        environment = shims.environment({"HOME": str(self._home), processes.MARK: job.mark})
        process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", command, cwd=job.directory, env=environment,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = await process.communicate()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        return process.returncode or 0, errors.decode(errors="replace")

    async def details(self, number: int) -> dict[str, str] | None:
        """What `scontrol show job` would tell, as long as the scheduler remembers the job."""
        job = self.jobs[number]
        if job.ended is not None and job.ended < time.time() - self._rules.job_memory:
            return None
        request = job.request
        output = str(self.output_path(job))
        return {
            "JobId": str(job.id),
            "JobName": request.name,
            "JobState": job.state.value,
            "Reason": job.reason,
            "ExitCode": job.exit_text,
            "Partition": request.partition,
            "Account": request.account or "(null)",
            "QOS": request.qos or "normal",
            "Comment": request.comment,
            "TimeLimit": _clock(request.time_s),
            "RunTime": _clock((job.ended or time.time()) - (job.started or time.time())),
            "SubmitTime": _date(job.submitted),
            "StartTime": _date(job.started),
            "EndTime": _date(job.ended),
            "NumNodes": str(request.nodes),
            "NumCPUs": str(request.cpus),
            "NumTasks": str(request.tasks),
            "CPUs/Task": str(request.cpus_per_task),
            "MinMemoryNode": f"{request.memory_mib}M" if request.memory_mib else "0",
            "TresPerNode": f"gres:gpu:{request.gpus}" if request.gpus else "(null)",
            "Restarts": str(max(0, job.starts - 1)),
            "WorkDir": str(job.directory),
            "StdErr": str(self.error_path(job) or output),
            "StdIn": "/dev/null",
            "StdOut": output,
        }

    def _end(self, number: int, verdict: State) -> None:
        job = self.jobs.get(number)
        if job is None or job.state.final:
            return
        job.verdict = job.verdict or verdict
        if job.state is State.PENDING:
            self._set(job, job.verdict)
        elif job.pid is not None:
            loop, timing = asyncio.get_running_loop(), self._settings.timing
            if timing.signal_gap:
                told = (job.pid, signal.SIGTERM, timing.signal_gap)
                loop.run_in_executor(None, processes.signal_job, *told)
            else:
                processes.signal_job(job.pid, signal.SIGTERM)
            loop.call_later(timing.kill_wait, self._kill, job)

    def _kill(self, job: LocalJob) -> None:
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

    def _set(self, job: LocalJob, state: State) -> None:
        waited = job.state is State.PENDING
        job.state = state
        if state is State.FAILED and job.signal:
            job.reason = "JobLaunchFailure"  # whatever the signal was
        elif not (waited and state is State.CANCELLED):  # the reason for waiting stays
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

    async def _run(self, job: LocalJob) -> None:
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

    async def _execute(self, job: LocalJob) -> None:
        output, error = self.output_path(job), self.error_path(job)
        with output.open("wb") as out:
            err = error.open("wb") if error else None
            try:
                process = await asyncio.create_subprocess_exec(
                    str(job.copy),
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

    async def _enforce(self, job: LocalJob) -> None:
        """End the job when its walltime is over or it uses more memory than it asked for."""
        assert job.pid is not None
        deadline = time.monotonic() + job.request.time_s
        limit = job.request.memory_mib
        while (left := deadline - time.monotonic()) > 0:
            if limit is None:
                await asyncio.sleep(left)
                continue
            await asyncio.sleep(min(left, self._settings.timing.memory_interval))
            seen = await asyncio.to_thread(processes.processes)
            if sum(p.memory for p in processes.members(job.pid, seen)) > limit * 2**20:
                job.verdict = job.verdict or State.OUT_OF_MEMORY
                processes.signal_job(job.pid, signal.SIGKILL)
                return
        self._end(job.id, State.TIMEOUT)

    def output_path(self, job: LocalJob) -> Path:
        """Where a job's output goes."""
        return job.directory / self._expand(job.request.output, job)

    def error_path(self, job: LocalJob) -> Path | None:
        """Where a job's error output goes, None for the file of its output."""
        error = job.request.error
        return job.directory / self._expand(error, job) if error else None

    @staticmethod
    def _expand(name: str, job: LocalJob) -> str:
        return name.replace("%j", str(job.id)).replace("%x", job.request.name)

    def _environment(self, job: LocalJob) -> dict[str, str]:
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


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def _date(when: float | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(when)) if when else "Unknown"
