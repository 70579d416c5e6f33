"""Make the command that runs for one Snakemake job at a site, and list the files that it needs.

Each kind of rule renders its command in a module of its own: `shell_command` for `shell:`,
`scripts` for `script:` and `notebook:`, `full_jobs` for rules that need a Snakemake at the site.
Directives that apply to any kind (environment, shadow directory) wrap that text in more text. So
wrappers compose, and the job script need not know them.
"""

import os
import shlex
from dataclasses import replace

from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.jobs.script import COMMAND_BYTES

from . import Job
from .context import Payload, RuleContext
from .kinds import full_jobs
from .kinds.shell_command import shell_command, shell_executable, use_node_tmpdir, wrap_shell
from .paths import path_rewriting, source_files, storage
from .paths.job_paths import find_job_paths
from .resources import choose_site, given_resources
from .secret_uploads import refuse_secret_code
from .wrapping.deployment import wrap_deployment
from .wrapping.shadow import shadow_payload


def why_full_job(job: Job) -> str | None:
    """Return why a job needs a Snakemake at its site, as words after "has"; None for thin jobs."""
    if storage.jobs_use_storage(job.rule.workflow):
        return storage.WORDS
    if job.rule.is_script or job.rule.is_notebook:
        # Imported here because it imports Snakemake's support for languages and notebooks.
        from .kinds.scripts import needs_snakemake

        imported = needs_snakemake(job)
        return f"a script that imports {', '.join(imported)}" if imported else None
    return full_jobs.full_job_directive(job)


def make_payload(job: Job, context: RuleContext, iteration: int | None = None) -> Payload:
    """Make the payload of a single job, accepted by `preflight.refuse_jobs`.

    `iteration` is the number of the benchmark's repetition, from 0.

    Raises:
        UserError: a value in the command is not determined before the job runs, a script's files
            are too large, or a file of the script or of its environment is not available.
    """
    if why_full_job(job) is not None:
        # The Snakemake at the site sets up environment and shadow directory itself.
        site = choose_site(given_resources(job), context.sites)
        text, uploads, inputs = full_jobs.full_job_command(
            job, context.workdir, site, context.sites[site].config,
            context.deployment,
        )  # fmt: skip
        payload = Payload(text, uploads=uploads, inputs=inputs, full=True)
        refuse_secret_code(job, payload, context.sites[site].config)
    else:
        payload = _thin(job, context, iteration)
        payload = shadow_payload(
            wrap_deployment(payload, job, context), job, iteration, also=payload.inputs
        )
    if context.options.precommand:
        # As in Snakemake's own job scripts, a failure of the precommand ends the job.
        before = f"{{ {context.options.precommand}\n}} || exit\n"
        payload = replace(payload, command=before + payload.command)
    return _shortened(payload)


def _shortened(payload: Payload) -> Payload:
    """Return a payload whose long command travels as a file: schedulers limit scripts to 4 MiB."""
    content = payload.command.encode("utf-8", "surrogateescape")
    if len(content) <= COMMAND_BYTES:
        return payload
    file = Upload(file_path(content, "command"), content=content)
    command = f". ./{shlex.quote(file.path)}"
    return replace(payload, command=command, uploads=(*payload.uploads, file))


def _thin(job: Job, context: RuleContext, iteration: int | None) -> Payload:
    """Make the payload of a thin job, without environment and shadow directory."""
    shell = os.path.basename(shell_executable(job) or "bash")
    places = find_job_paths(job, context)
    config = context.sites[choose_site(given_resources(job), context.sites)].config
    if job.rule.is_script or job.rule.is_notebook:
        # Imported here because it imports Snakemake's support for languages and notebooks.
        from .kinds.script_file import find_script_file
        from .kinds.scripts import script_command

        text, uploads = script_command(job, places, iteration, config)
        payload = Payload(wrap_shell(job, text), shell, uploads)
        refuse_secret_code(job, payload, config, str(find_script_file(job).path))
        return payload
    text = shell_command(job, places, iteration)
    text, uploads = source_files.upload_source_files(job, text, lambda: places.workspace)
    text, beside = path_rewriting.upload_siblings(job, text, places, config)
    text, shell = use_node_tmpdir(text, shell)
    payload = Payload(text, shell, (*uploads, *beside))
    refuse_secret_code(job, payload, config)
    return payload
