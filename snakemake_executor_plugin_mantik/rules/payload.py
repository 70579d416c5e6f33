"""What runs for one Snakemake job at a site: a text for a shell, and the files that it needs.

Each kind of rule makes its text in a module of its own: `command` for `shell:`, `scripts` for
`script:` and `notebook:`, `nested` for what needs a Snakemake at the site. What a directive
of the rule puts around the command, whatever the kind (its environment, its shadow directory), is
text around that text: it composes, and the job script knows nothing of it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.rules import Job, nested
from snakemake_executor_plugin_mantik.rules.command import command, executable_of, in_shell
from snakemake_executor_plugin_mantik.rules.deployment import deployed
from snakemake_executor_plugin_mantik.rules.resources import given_resources, site_of
from snakemake_executor_plugin_mantik.rules.shadow import shadowed


@dataclass(frozen=True)
class Context:
    """What is the same for all jobs of a run.

    Attributes:
        sites: the known sites' configs by name; the first one serves where a rule names none.
        workdir: the workflow's working directory.
        deployment: what of the rules' own environments is deployed at the sites.
    """

    sites: Mapping[str, LoadedConfig]
    workdir: Path
    deployment: frozenset[DeploymentMethod] = frozenset()


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
        measures: whether it writes the job's benchmark file itself.
    """

    command: str
    shell: str = "bash"
    uploads: tuple[Upload, ...] = ()
    inputs: tuple[str, ...] = ()
    own_environment: bool = False

    measures: bool = False

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
            self.measures,
        )


def full(job: Job) -> str | None:
    """The directive for which a job needs a Snakemake at its site; None for a thin job."""
    return nested.directive(job)


def payload_of(job: Job, context: Context, tmpdir: str, iteration: int | None = None) -> Payload:
    """What runs for `job`, a single job that nothing stands in the way of.

    Args:
        job: the Snakemake job.
        context: of the run.
        tmpdir: its directory for temporary files, `command.NODE_TMPDIR` for the node's.
        iteration: which run of a command that is measured it is, from 0.

    Raises:
        UserError: a value in it is not determined before the job runs, a script's files are too
            large, or a file of it or of its environment is not to be had.
    """
    if full(job) is not None:
        # The Snakemake there makes the job's environment and shadow directory as well.
        site = site_of(given_resources(job), context.sites)
        text, uploads, inputs = nested.command(
            job, context.workdir, site, context.sites[site].config, context.deployment
        )
        return Payload(text, uploads=uploads, inputs=inputs, measures=True)
    payload = _thin(job, context, tmpdir, iteration)
    return shadowed(deployed(payload, job, context), job, iteration, also=payload.inputs)


def _thin(job: Job, context: Context, tmpdir: str, iteration: int | None) -> Payload:
    """What its kind of rule runs, without its environment and shadow directory."""
    shell = os.path.basename(executable_of(job) or "bash")
    if job.rule.is_script or job.rule.is_notebook:
        # It imports the parts of Snakemake that know languages and notebooks.
        from snakemake_executor_plugin_mantik.rules.scripts import script

        site = context.sites[site_of(given_resources(job), context.sites)].config.site
        limits = site.source_file_limit_bytes, site.sources_limit_bytes
        text, uploads = script(job, tmpdir, iteration, *limits)
        return Payload(in_shell(job, text), shell, uploads)
    return Payload(command(job, tmpdir, iteration), shell)
