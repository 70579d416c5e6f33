"""What all kinds of rules share: the context of a run, and the payload that each kind makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from snakemake.logging import logger
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.preview import WORKSPACE
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.jobs.script import COMMAND_BYTES
from snakemake_executor_plugin_mantik.rules.options import WorkflowOptions


@dataclass(frozen=True)
class RuleContext:
    """What is the same for all jobs of a run.

    Attributes:
        sites: the known sites' configs by name; the first one serves where a rule names none.
        workdir: the workflow's working directory.
        deployment: what of the rules' own environments is deployed at the sites.
        workspace: tells the absolute path of the workspace at a site; opens the site if need be.
        options: what options of the `snakemake` command ask of each job.
    """

    sites: Mapping[str, LoadedConfig]
    workdir: Path
    deployment: frozenset[DeploymentMethod] = frozenset()
    workspace: Callable[[str], str] = lambda _: WORKSPACE
    options: WorkflowOptions = field(default_factory=WorkflowOptions)


@dataclass(frozen=True)
class Payload:
    """What runs, and what it needs beside the rule's inputs.

    Attributes:
        command: what the shell is given after `-c`.
        shell: base name of the shell.
        uploads: files that are made for it, or lie outside of the workflow's directory.
        inputs: further files of the workflow's directory.
        own_environment: whether it makes its environment itself, so that the backend config's
            image is not used.
        full: whether it runs a Snakemake at the site, which writes the benchmark file as well.
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
        """The payload that runs `command`, a text for bash which runs this one's in the end."""
        return Payload(
            command,
            "bash",
            (*self.uploads, *uploads),
            (*self.inputs, *inputs),
            self.own_environment,
            self.full,
        )


def start_words(payload: Payload) -> tuple[list[str], tuple[Upload, ...]]:
    """The words that start the payload's shell, and a file for a command that is no word."""
    content = f"{payload.command}\n".encode("utf-8", "surrogateescape")
    if len(content) <= COMMAND_BYTES:
        return [payload.shell, "-c", payload.command], ()
    upload = Upload(file_path(content, "command"), content=content)
    return [payload.shell, upload.path], (upload,)


@cache
def report_withheld(directory: str, withheld: str) -> None:
    """Warn that files of a directory stay here; the same again is not repeated.

    Args:
        directory: where they lie.
        withheld: which, why, and what to do (`Sources.withheld`); nothing is reported if empty.
    """
    if withheld:
        logger.warning(f"Files of {directory}: {withheld}.")
