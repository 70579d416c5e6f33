"""Types that all kinds of rules share: the context of a run, and the payload of a job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from snakemake.logging import logger
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.forecast import WORKSPACE
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.jobs.script import COMMAND_BYTES

from .options import WorkflowOptions

Method: TypeAlias = DeploymentMethod | Literal["venv"]
"""A way to deploy environments at a site: Snakemake's, and virtual environments of projects."""


@dataclass(frozen=True)
class RuleContext:
    """Values that are the same for all jobs of a run.

    Attributes:
        sites: the sites' configs by name. The first site is the default.
        workdir: the workflow's working directory.
        deployment: which kinds of rules' own environments are deployed at the sites.
        workspace: returns the absolute path of the workspace at a site, and opens the site if
            necessary; before the run has started, a placeholder.
        options: options of the `snakemake` command that apply to each job.
    """

    sites: Mapping[str, LoadedConfig]
    workdir: Path
    deployment: frozenset[Method] = frozenset()
    workspace: Callable[[str], str] = lambda _: WORKSPACE
    options: WorkflowOptions = field(default_factory=WorkflowOptions)


@dataclass(frozen=True)
class Payload:
    """A command, and the files that it needs in addition to the rule's inputs.

    Attributes:
        command: the shell's argument after `-c`.
        shell: base name of the shell.
        uploads: files generated for the command, or from outside the workflow's directory.
        inputs: further files of the workflow's directory.
        own_environment: whether the rule's own environment applies, so that the backend config's
            image is not used.
        full: whether the command runs a Snakemake at the site, which also writes the benchmark
            file.
    """

    command: str
    shell: str = "bash"
    uploads: tuple[Upload, ...] = ()
    inputs: tuple[str, ...] = ()
    own_environment: bool = False
    full: bool = False

    def around(
        self, command: str, uploads: tuple[Upload, ...] = (), inputs: tuple[str, ...] = ()
    ) -> "Payload":
        """Return a payload with `command`, a bash text that wraps this payload's command."""
        return Payload(
            command,
            "bash",
            (*self.uploads, *uploads),
            (*self.inputs, *inputs),
            self.own_environment,
            self.full,
        )


def start_words(payload: Payload) -> tuple[list[str], tuple[Upload, ...]]:
    """Return the words that start the payload's shell, and a file if the command is too long."""
    content = f"{payload.command}\n".encode("utf-8", "surrogateescape")
    if len(content) <= COMMAND_BYTES:
        return [payload.shell, "-c", payload.command], ()
    upload = Upload(file_path(content, "command"), content=content)
    return [payload.shell, upload.path], (upload,)


@cache
def report_withheld(directory: str, withheld: str) -> None:
    """Warn once that files of a directory are not uploaded, unless `withheld` is empty.

    `withheld` says which files, why, and what to do, as `Sources.withheld` does.
    """
    if withheld:
        logger.warning(f"Files of {directory}: {withheld}.")
