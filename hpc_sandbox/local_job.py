"""A job of the local scheduler, its environment, and its fields in `scontrol show job`."""

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import processes, shims
from .batch import BatchJob, BatchState
from .sbatch import BatchRequest


@dataclass
class LocalJob(BatchJob):
    """A job of the local scheduler.

    Attributes:
        copy: the copy of the batch script that is run.
        directory: working directory.
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


def local_job_environment(
    job: LocalJob, settings: Mapping[str, str], home: Path, user: str
) -> dict[str, str]:
    """Return a job's environment; of ours it has only search path, language and time zone.

    The sandbox often has the user's credentials in its environment. Jobs must not see them, as they
    do not at a real site. `settings` are the variables of all jobs.
    """
    request = job.request
    node = os.uname().nodename
    found = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TZ") if name in os.environ}
    found |= {
        "HOME": str(home),
        "USER": user,
        "LOGNAME": user,
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
        found["SLURM_MEM_PER_NODE"] = str(request.memory_mib)
    given = dict(settings) | dict(job.environment)
    return shims.shim_environment(found) | given


def scontrol(job: LocalJob) -> dict[str, str]:
    """Return the fields of `scontrol show job`."""
    request = job.request
    output = str(job.output)
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
        "StdErr": str(job.stderr),
        "StdIn": "/dev/null",
        "StdOut": output,
    }


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def _date(when: float | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(when)) if when else "Unknown"
