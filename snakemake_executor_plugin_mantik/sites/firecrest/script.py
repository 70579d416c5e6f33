"""Batch scripts of submissions and of transfers for firecREST. Pure functions."""

import re
import shlex
from collections.abc import Sequence
from typing import Any, Final, Literal

from ...common.errors import SiteRejected
from ...jobs.resources import JOB_NAME_LENGTH, after_directive, pbs_directives, slurm_directives
from ..base import Submission

JOBS: Final = ".mantik/jobs"
"""Holds the scheduler's output of each job, `<id>.out`: mostly empty, else why it was killed."""
TRANSFERS: Final = ".mantik/transfers"
"""Holds parts of large files during their transfer."""

SchedulerName = Literal["slurm", "pbs"]


def job_body(script: str, workspace: str) -> dict[str, Any]:
    """Make the body of `POST /compute/{system}/jobs`.

    All resources are requested in the script, because other fields would override it.
    """
    return {"job": {"working_directory": workspace, "script": script}}


def scheduler_script(submission: Submission, scheduler: SchedulerName, workspace: str) -> str:
    """Insert the scheduler's directives after the first line of a submission's script.

    `workspace` is an absolute path at the site.

    Raises:
        UserError: the scheduler does not support a resource.
        SiteRejected: there are commands for a login node.
    """
    if submission.before_on_login or submission.after_on_login:
        raise SiteRejected(
            "firecREST cannot run commands on a login node",
            do="Use PreRunCommandOnComputeNode and PostRunCommandOnComputeNode",
        )
    if submission.slurm_options and scheduler != "slurm":
        raise SiteRejected(
            f"the site's scheduler is {scheduler}, which does not know uenv",
            do="Remove Environment: Uenv from the backend config",
        )
    name = scheduler_job_name(submission.name, submission.tag)
    output = f"{workspace.rstrip('/')}/{JOBS}"
    if scheduler == "slurm":
        prefix = "#SBATCH "
        lines = [
            *slurm_directives(submission.resources, name),
            *submission.slurm_options,
            f'--output="{output}/%j.out"',
        ]
        # The job script removes it after a success (`jobs/bash/main.sh`).
        variables = [f"_m_scheduler_output={shlex.quote(output)}/$SLURM_JOB_ID.out"]
    else:
        prefix = "#PBS "
        directives = pbs_directives(submission.resources, name, longest_name=JOB_NAME_LENGTH)
        lines = [*directives, f'-o "{output}/"', "-j oe"]
        variables = []  # PBS writes it after the end of the job
    lines += after_directive(scheduler, submission.after)
    first, _, rest = submission.script.partition("\n")
    if not first.startswith("#!"):
        first, rest = "#!/bin/bash", submission.script
    if submission.login_shell:
        first = "#!/bin/bash -l"
    return "\n".join([first, *(f"{prefix}{line}" for line in lines), *variables, rest])


def scheduler_job_name(name: str, tag: str) -> str:
    """Return the job's name at the site: readable, with `tag` at its end to find it in lists."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_.")
    if not readable[:1].isalpha():
        readable = f"job_{readable}"  # PBS wants a letter first
    return f"{readable[: JOB_NAME_LENGTH - len(tag) - 1]}-{tag}"


def transfer_script(
    scheduler: SchedulerName,
    directives: Sequence[str],
    output: str,
    account: str | None,
    commands: str,
) -> str:
    """Make a batch script that runs `commands`, with the directives of the site's transfer jobs.

    Raises:
        SiteRejected: the directives need an account and there is none.
    """
    lines = "\n".join(directives)
    if "{account}" in lines:
        if not account:
            raise SiteRejected(
                "large files are transferred by jobs at this site, which need an account",
                do="Set MANTIK_COMPUTE_BUDGET_ACCOUNT",
            )
        lines = lines.replace("{account}", account)
    own = (
        ("#SBATCH --job-name=mantik-transfer", f'#SBATCH --output="{output}/%j.out"')
        if scheduler == "slurm"
        else ("#PBS -S /bin/bash", "#PBS -N mantik-transfer", f'#PBS -o "{output}/"', "#PBS -j oe")
    )
    return "\n".join(["#!/bin/bash", *own, lines, "set -e", commands, ""])
