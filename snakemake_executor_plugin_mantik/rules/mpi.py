"""MPI programs: who starts the tasks, the rule's command or the executor.

A command that begins `{resources.mpi} -n {resources.tasks} …` starts them itself. Without an image
that is all: the command runs once, on the first node, and its launcher reaches the others. An image
is started with `srun`, once per task, so that MPI gets from its tasks to the scheduler without
having it inside; a launcher inside such a command would start all tasks once more in each of them.
"""

import os
import re
from typing import Final

from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.errors import UserError
from snakemake_executor_plugin_mantik.rules import Job

_LAUNCHER: Final = re.compile(r"(?<!\{)(?:\{\{)*\{resources(?:\.mpi|\[mpi\])[}:!]")


def launches(job: Job) -> bool:
    """Whether a rule's command starts its tasks itself, with its resource `mpi`."""
    text = job.rule.shellcmd
    return bool(job.resources.get("mpi") and text and _LAUNCHER.search(text))


def check_launcher(job: Job, config: BackendConfig) -> None:
    """See to it that a command finds the launcher that it names.

    Raises:
        UserError: it would look for `srun` inside of a container.
    """
    if config.environment.apptainer is None or not launches(job):
        return
    launcher = str(job.resources.get("mpi")).split()
    if launcher and os.path.basename(launcher[0]) == "srun":
        raise UserError(
            "the command starts srun, but it runs in an image, and srun is outside of it",
            where=f"rule {job.rule.name}",
            do="Leave {resources.mpi} and its options out of the command: srun starts the image"
            " once for each of resources: tasks; or choose mpiexec of the image, on one node",
        )
