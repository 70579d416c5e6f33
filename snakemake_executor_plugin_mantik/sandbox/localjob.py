"""A job of the local scheduler: what it is, what it finds, and what `scontrol` tells of it."""

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from snakemake_executor_plugin_mantik.sandbox import processes, shims
from snakemake_executor_plugin_mantik.sandbox.batch import BatchJob, BatchState
from snakemake_executor_plugin_mantik.sandbox.sbatch import BatchRequest


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
        over_memory: whether it was ended for its memory.
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
        """Where its output goes."""
        return self.directory / self._expand(self.request.output)

    @property
    def error(self) -> Path | None:
        """Where its error output goes, None for the file of its output."""
        return self.directory / self._expand(self.request.error) if self.request.error else None

    @property
    def stderr(self) -> Path:
        """The file that its error output ends up in."""
        return self.error or self.output

    def _expand(self, name: str) -> str:
        return name.replace("%j", str(self.id)).replace("%x", self.request.name)


def local_job_environment(
    job: LocalJob, settings: Mapping[str, str], home: Path, user: str
) -> dict[str, str]:
    """A job's environment: nothing of ours but the search path and the language.

    The sandbox often runs with the user's credentials in its environment; they must not be
    seen by jobs, as they are not at a real site. `settings` are the variables of all jobs.
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
    """What `scontrol show job` tells of a job."""
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
