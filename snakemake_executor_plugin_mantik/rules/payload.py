"""What runs for one Snakemake job at a site: a text for a shell, and the files that it needs.

Each kind of rule makes its text in a module of its own: `command` for `shell:`, `scripts` for
`script:` and `notebook:`, `nested` for what only a Snakemake at the site can run. What a directive
of the rule puts around the command, whatever the kind (its environment, its shadow directory), is
text around that text: it composes, and the job script knows nothing of it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.preview import WORKSPACE
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.kinds import full_jobs
from snakemake_executor_plugin_mantik.rules.kinds.shell_command import (
    command,
    executable_of,
    in_shell,
    on_node,
)
from snakemake_executor_plugin_mantik.rules.options import Options
from snakemake_executor_plugin_mantik.rules.paths import snakefile_siblings, source_files, storage
from snakemake_executor_plugin_mantik.rules.paths.job_paths import places_of
from snakemake_executor_plugin_mantik.rules.resources import given_resources, site_of
from snakemake_executor_plugin_mantik.rules.wrapping.deployment import deployed
from snakemake_executor_plugin_mantik.rules.wrapping.shadow import shadowed


@dataclass(frozen=True)
class Context:
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
    options: Options = field(default_factory=Options)


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


def full(job: Job) -> str | None:
    """Why a job needs a Snakemake at its site, in words that follow "has"; None for a thin job."""
    if storage.by_jobs(job.rule.workflow):
        return storage.WORDS
    if job.rule.is_script or job.rule.is_notebook:
        # It imports the parts of Snakemake that know languages and notebooks.
        from snakemake_executor_plugin_mantik.rules.kinds.scripts import needs_snakemake

        imported = needs_snakemake(job)
        return f"a script that imports {', '.join(imported)}" if imported else None
    return full_jobs.directive(job)


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
        # That Snakemake makes environment and shadow directory itself.
        site = site_of(given_resources(job), context.sites)
        text, uploads, inputs = full_jobs.command(
            job, context.workdir, site, context.sites[site].config,
            context.deployment,
        )  # fmt: skip
        payload = Payload(text, uploads=uploads, inputs=inputs, full=True)
    else:
        payload = _thin(job, context, tmpdir, iteration)
        payload = shadowed(deployed(payload, job, context), job, iteration, also=payload.inputs)
    if context.options.precommand:
        # As between Snakemake's own precommand and command: a failure ends the job.
        before = f"{{ {context.options.precommand}\n}} || exit\n"
        payload = replace(payload, command=before + payload.command)
    return payload


def _thin(job: Job, context: Context, tmpdir: str, iteration: int | None) -> Payload:
    """What its kind of rule runs, without its environment and shadow directory."""
    shell = os.path.basename(executable_of(job) or "bash")
    places = places_of(job, context)
    config = context.sites[site_of(given_resources(job), context.sites)].config
    if job.rule.is_script or job.rule.is_notebook:
        # It imports the parts of Snakemake that know languages and notebooks.
        from snakemake_executor_plugin_mantik.rules.kinds.scripts import script

        text, uploads = script(job, places, tmpdir, iteration, config)
        return Payload(in_shell(job, text), shell, uploads)
    text = command(job, places, tmpdir, iteration)
    text, uploads = source_files.in_command(job, text, lambda: places.workspace)
    text, beside = snakefile_siblings.in_command(job, text, places, config)
    text, shell = on_node(text, shell)
    return Payload(text, shell, (*uploads, *beside))
