"""What runs for one Snakemake job at a site: a text for a shell, and the files that it needs.

Each kind of rule makes its text in a module of its own (`command` for `shell:`). What a directive
of the rule puts around the command, whatever the kind (its environment, its shadow directory), is
text around that text: it composes, and the job script knows nothing of it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.preview import WORKSPACE
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.rules import Job, sourcefiles
from snakemake_executor_plugin_mantik.rules.command import command, executable_of
from snakemake_executor_plugin_mantik.rules.options import Options
from snakemake_executor_plugin_mantik.rules.places import places_of


@dataclass(frozen=True)
class Context:
    """What is the same for all jobs of a run.

    Attributes:
        sites: the known sites' configs by name; the first one serves where a rule names none.
        workdir: the workflow's working directory.
        workspace: tells the absolute path of the workspace at a site; opens the site if need be.
        options: what options of the `snakemake` command ask of each job.
    """

    sites: Mapping[str, LoadedConfig]
    workdir: Path
    workspace: Callable[[str], str] = lambda _: WORKSPACE
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Payload:
    """What runs, and what it needs beside the rule's inputs.

    Attributes:
        command: what the shell is given after `-c`.
        shell: base name of the shell.
        uploads: files that are made for it, or lie outside of the workflow's directory.
        inputs: further files of the workflow's directory.
    """

    command: str
    shell: str = "bash"
    uploads: tuple[Upload, ...] = ()
    inputs: tuple[str, ...] = ()


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
    shell = os.path.basename(executable_of(job) or "bash")
    places = places_of(job, context)
    text = command(job, places, tmpdir, iteration)
    text, uploads = sourcefiles.in_command(job, text, lambda: places.workspace)
    if context.options.precommand:
        # As between Snakemake's own precommand and command: a failure ends the job.
        text = f"{{ {context.options.precommand}\n}} || exit\n{text}"
    return Payload(text, shell, uploads)
