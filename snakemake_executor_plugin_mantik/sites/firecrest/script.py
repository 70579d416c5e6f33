"""Submissions as batch scripts with the scheduler's own directives: pure functions."""

import re
from typing import Final, Literal

from snakemake_executor_plugin_mantik.errors import SiteRejected, UserError
from snakemake_executor_plugin_mantik.jobs.resources import JOB_NAME_LENGTH, slurm_directives
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import Submission

Scheduler = Literal["slurm", "pbs"]

SCRIPT_BYTES: Final = 4_000_000
"""Largest script that is sent; Slurm's limit is 4 MiB by default (`max_script_size`)."""

_TAG: Final = re.compile(r"[A-Za-z0-9-]{1,40}")


def batch_script(submission: Submission, scheduler: Scheduler, output: str) -> str:
    """The script of `submission` with the scheduler's directives behind its first line.

    Args:
        submission: the job.
        scheduler: whose directives they are.
        output: absolute path of what the scheduler writes of the job, without the id and `.out`.

    Raises:
        UserError: for resources that the scheduler cannot be asked for.
        SiteRejected: for what firecREST cannot do.
    """
    if submission.before_on_login or submission.after_on_login:
        raise SiteRejected(
            "firecREST runs nothing on a login node",
            do="Use PreRunCommandOnComputeNode and PostRunCommandOnComputeNode",
        )
    name = job_name(submission.name, submission.tag)
    if scheduler == "slurm":
        prefix = "#SBATCH "
        lines = [
            *slurm_directives(submission.resources, name),
            f'--output="{output}/%j.out"',
        ]
    else:
        prefix = "#PBS "
        lines = [*pbs_directives(submission.resources, name), f'-o "{output}/"', "-j oe"]
    first, _, rest = submission.script.partition("\n")
    if not first.startswith("#!"):
        first, rest = "#!/bin/bash", submission.script
    if submission.login_shell:
        first = "#!/bin/bash -l"
    script = "\n".join([first, *(f"{prefix}{line}" for line in lines), rest])
    if len(script.encode()) > SCRIPT_BYTES:
        raise SiteRejected(
            f"the job's script has more than {SCRIPT_BYTES} bytes, which no Slurm takes",
            do="Lower Site.InlineLimit in the backend config",
        )
    return script


def job_name(name: str, tag: str) -> str:
    """The job's name at the site: readable, and ends with `tag`, which lists of jobs then tell."""
    if not _TAG.fullmatch(tag):
        raise SiteRejected(f"{tag!r} cannot be a tag")
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_.")
    if not readable[:1].isalpha():
        readable = f"job_{readable}"  # PBS wants a letter first
    return f"{readable[: JOB_NAME_LENGTH - len(tag) - 1]}-{tag}"


def has_tag(name: str, tag: str) -> bool:
    """Whether `job_name` made `name` with `tag`."""
    return name.endswith(f"-{tag}")


def pbs_directives(resources: Resources, name: str) -> tuple[str, ...]:
    """The options of qsub for a job, in the form `-o value`, without `#PBS `.

    The nodes are chunks of `select`; without tasks each has one that gets all the CPUs.

    Raises:
        UserError: for what PBS cannot be asked for in this form.
    """
    for field in ("qos", "constraint"):
        if getattr(resources, field):
            raise UserError(f"PBS knows no {field}", do="Ask for a queue instead")
    # A reservation of PBS is a queue of its own.
    queue = resources.reservation or resources.queue
    options = [
        ("-S", "/bin/bash"),
        ("-N", name),
        ("-q", queue),
        ("-P", resources.account),
        ("-r", "n"),
        ("-l", _walltime(resources.runtime_s)),
        ("-l", _select(resources)),
    ]
    return tuple(f"{option} {_word(value)}" for option, value in options if value)


def _walltime(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"walltime={hours:02}:{minute:02}:{second:02}"


def _select(resources: Resources) -> str | None:
    nodes = resources.nodes or 1
    tasks, rest = divmod(resources.tasks or nodes, nodes)
    if rest:
        raise UserError(
            f"{resources.tasks} tasks cannot be divided among {nodes} nodes",
            do="Make tasks a multiple of nodes",
        )
    cpus = resources.cpus_per_task and resources.cpus_per_task * tasks
    if cpus is None and resources.total_cpus is not None:
        cpus, rest = divmod(resources.total_cpus, nodes)
        if rest:
            raise UserError(
                f"{resources.total_cpus} CPUs cannot be divided among {nodes} nodes",
                do="Ask for the CPUs of each node instead",
            )
    memory = resources.memory_mib_per_node
    if memory is None and resources.memory_mib_per_cpu is not None:
        memory = resources.memory_mib_per_cpu * (cpus or tasks)
    wanted = {
        "ncpus": cpus,
        "mpiprocs": tasks if resources.tasks else None,
        "ngpus": resources.gpus_per_node,
        "mem": memory and f"{memory}mb",
    }
    asked = "".join(f":{key}={value}" for key, value in wanted.items() if value)
    return f"select={nodes}{asked}" if asked or resources.nodes else None


def _word(value: str) -> str:
    if not value.isprintable() or set(value) & set(" '\"\\#,"):
        raise UserError(
            f"{value!r} cannot be sent to PBS",
            do="Use no blanks, commas, quotes, backslashes, # or control characters",
        )
    return value
