"""Batch scripts of submissions and paths for firecREST. Pure functions."""

import re
import shlex
from typing import Any, Final, Literal

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.jobs.paths import path_at_site
from snakemake_executor_plugin_mantik.jobs.resources import (
    JOB_NAME_LENGTH,
    after_directive,
    pbs_directives,
    slurm_directives,
)

from ..base import Submission, is_rest_safe

JOBS: Final = ".mantik/jobs"
"""Holds the scheduler's output of each job, `<id>.out`: mostly empty, else why it was killed."""
TRANSFERS: Final = ".mantik/transfers"
"""Holds parts of large files during their transfer."""

_ESCAPED: Final = frozenset("&<>")
"""firecREST HTML-escapes paths in the scripts of its transfer jobs (autoescape)."""


def is_expressible(path: str) -> bool:
    """Check whether firecREST can carry `path`, which is relative to the workspace.

    It puts paths between single quotes of a shell command, and lists names as C strings.
    """
    return is_rest_safe(path) and not {"", ".", ".."} & set(path.split("/"))


def is_transferable(path: str) -> bool:
    """Check whether firecREST's own transfer jobs find `path`."""
    return not _ESCAPED & set(path)


class WorkspacePaths:
    """Absolute paths below the workspace `root`."""

    def __init__(self, site: str, root: str) -> None:
        self._site = site
        self.root = root.rstrip("/")

    def absolute(self, path: str) -> str:
        """Return the absolute path of `path`; `.` is the workspace itself.

        Raises:
            SiteRejected: firecREST cannot carry the path.
        """
        return self.root if path in (".", "") else path_at_site(self.root, self._checked(path))

    def anywhere(self, path: str) -> str:
        """Return an absolute path, or that of `path` in the workspace. To read only.

        Raises:
            SiteRejected: firecREST cannot carry the path.
        """
        return f"/{self._checked(path[1:])}" if path.startswith("/") else self.absolute(path)

    def _checked(self, path: str) -> str:
        if not is_expressible(path):
            raise SiteRejected(
                f"firecREST cannot carry the path {path!r}",
                where=f"site {self._site}",
                do="Use names of ASCII characters without % ' $ ` \" and backslash",
            )
        return path


SchedulerName = Literal["slurm", "pbs"]

_TAG: Final = re.compile(r"[A-Za-z0-9-]{1,40}")


def submission_body(
    submission: Submission, scheduler: SchedulerName, workspace: str
) -> dict[str, Any]:
    """Make the body of `POST /compute/{system}/jobs` for a submission.

    All resources are requested in the script, because other fields would override it. `workspace`
    is an absolute path at the site.

    Raises:
        UserError: the scheduler does not support a resource.
        SiteRejected: there are commands for a login node, or the tag is not valid.
    """
    output = f"{workspace.rstrip('/')}/{JOBS}"
    return job_body(scheduler_script(submission, scheduler, output), workspace)


def job_body(script: str, directory: str) -> dict[str, Any]:
    """Make the body of the request that submits a batch script, run in `directory`."""
    return {"job": {"working_directory": directory, "script": script}}


def scheduler_script(submission: Submission, scheduler: SchedulerName, output: str) -> str:
    """Insert the scheduler's directives after the first line of a submission's script.

    `output` is the absolute path of the directory for the scheduler's output, `<id>.out`.

    Raises:
        UserError: the scheduler does not support a resource.
        SiteRejected: there are commands for a login node, or the tag is not valid.
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
    if not _TAG.fullmatch(tag):
        raise SiteRejected(f"{tag!r} cannot be a tag")
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_.")
    if not readable[:1].isalpha():
        readable = f"job_{readable}"  # PBS wants a letter first
    return f"{readable[: JOB_NAME_LENGTH - len(tag) - 1]}-{tag}"
