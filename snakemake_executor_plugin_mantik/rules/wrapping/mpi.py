"""MPI programs: who starts the tasks, the rule's command or the executor.

A command that begins `{resources.mpi} -n {resources.tasks} …` starts them itself. Without an image
that is all: the command runs once, on the first node, and its launcher reaches the others. The
image of a backend config is started with `srun`, once per task, so that MPI gets from its tasks to
the scheduler without having it inside; a launcher inside such a command would start all tasks once
more in each of them. A rule's own image is started once.
"""

import os
import re
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.context import RuleContext
from snakemake_executor_plugin_mantik.rules.resources import (
    choose_site,
    given_resources,
    split_undetermined,
)
from snakemake_executor_plugin_mantik.rules.wrapping.deployment import read_own

_LAUNCHER: Final = re.compile(r"(?<!\{)(?:\{\{)*\{resources(?:\.mpi|\[mpi\])[}:!]")


def has_launcher(job: Job) -> bool:
    """Whether a rule's command starts its tasks itself, with its resource `mpi`."""
    text = job.rule.shellcmd
    return bool(job.resources.get("mpi") and text and _LAUNCHER.search(text))


def launcher_mistake(job: Job, context: RuleContext) -> str | None:
    """Why a command does not find the launcher that it names, in words that follow "rule NAME"."""
    launcher = str(job.resources.get("mpi")).split()
    if not has_launcher(job) or not launcher or os.path.basename(launcher[0]) != "srun":
        return None
    own = read_own(job, context.deployment)
    boxed: object = own.container
    if not own:
        given, _ = split_undetermined(given_resources(job))
        try:
            site = choose_site(given, context.sites)
        except UserError:
            return None  # told with all that is wrong with resources
        boxed = context.sites[site].config.environment.apptainer
    if not boxed:
        return None
    return (
        "starts srun in an image, and srun is outside of it (leave {resources.mpi} and its options"
        " out of the command: the image of a backend config is started with srun, once for each of"
        " resources: tasks; or choose the image's own mpiexec, which reaches one node)"
    )
