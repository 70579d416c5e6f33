"""Decide whether the rule's command or the executor starts the tasks of an MPI program.

A command that begins with `{resources.mpi} -n {resources.tasks} …` starts the tasks itself. Without
an image, the command runs once, on the first node, and its launcher reaches the other nodes. The
image of a backend config is started with `srun`, once per task, so that MPI reaches the scheduler
from the tasks without a scheduler inside the image. A launcher inside such a command would start
all tasks again in each task, so with one the image is started only once, on the first node. A
rule's own image is always started once.
"""

import os
import re
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError

from . import Job
from .context import RuleContext
from .deployment import read_own
from .resources import config_environment

_LAUNCHER: Final = re.compile(r"(?<!\{)(?:\{\{)*\{resources(?:\.mpi|\[mpi\])[}:!]")


def has_launcher(job: Job) -> bool:
    """Return whether a rule's command starts its tasks itself, with its resource `mpi`."""
    text = job.rule.shellcmd
    return bool(job.resources.get("mpi") and text and _LAUNCHER.search(text))


def launcher_mistake(job: Job, context: RuleContext) -> str | None:
    """Return why a command cannot find its launcher, as words that follow "rule NAME", or None.

    Only `srun` is checked: an image does not contain it.
    """
    launcher = str(job.resources.get("mpi")).split()
    if not has_launcher(job) or not launcher or os.path.basename(launcher[0]) != "srun":
        return None
    own = read_own(job, context.deployment)
    boxed: object = own.container
    if not own:
        try:
            environment = config_environment(job, context.sites)
        except UserError:
            return None  # reported with all other mistakes in resources
        boxed = environment.apptainer or environment.container_engine or environment.pyxis
    if not boxed:
        return None
    return (
        "starts srun in an image, which does not contain it (remove {resources.mpi} and its options"
        " from the command: srun starts the image of a backend config, once for each of resources:"
        " tasks; or use the image's own mpiexec, which reaches one node)"
    )
