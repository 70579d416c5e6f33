"""What runs for one Snakemake job at a site: a text for a shell, and the files that it needs.

Each kind of rule makes its text in a module of its own (`command` for `shell:`). What a directive
of the rule puts around the command, whatever the kind (its environment, its shadow directory), is
text around that text: it composes, and the job script knows nothing of it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.command import command, executable_of


@dataclass(frozen=True)
class Context:
    """What is the same for all jobs of a run.

    Attributes:
        sites: the known sites' configs by name; the first one serves where a rule names none.
        workdir: the workflow's working directory.
    """

    sites: Mapping[str, LoadedConfig]
    workdir: Path


@dataclass(frozen=True)
class Payload:
    """What runs, and what it needs beside the rule's inputs.

    Attributes:
        command: what the shell is given after `-c`.
        shell: base name of the shell.
        uploads: files that are made for it, or lie outside of the workflow's directory.
        inputs: further files of the workflow's directory.
        full: whether it runs a Snakemake at the site.
    """

    command: str
    shell: str = "bash"
    uploads: tuple[Upload, ...] = ()
    inputs: tuple[str, ...] = ()
    full: bool = False


def payload_of(job: Job, context: Context, tmpdir: str, iteration: int | None = None) -> Payload:
    """What runs for `job`, a single job that nothing stands in the way of.

    Args:
        job: the Snakemake job.
        context: of the run.
        tmpdir: its directory for temporary files, `command.NODE_TMPDIR` for the node's.
        iteration: which run of a command that is measured it is, from 0.

    Raises:
        UserError: a value in it is not determined before the job runs.
    """
    del context
    shell = os.path.basename(executable_of(job) or "bash")
    return Payload(command(job, tmpdir, iteration), shell)
