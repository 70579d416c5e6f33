"""A job's files on this machine: before it is submitted, and when it has succeeded."""

from pathlib import Path
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.adapter.future_inputs import refuse_future_inputs
from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.engine.messages import describe_os_error
from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.paths import storage
from snakemake_executor_plugin_mantik.rules.units import list_members
from snakemake_executor_plugin_mantik.storage.catalog import catalog_of
from snakemake_executor_plugin_mantik.storage.paths import storable_path, uses_provider


async def prepare_files(workflow: Any, job: Job) -> None:
    """Do what `job.prepare` does for a local job. Snakemake skips it for a remote one."""
    from snakemake.io import is_flagged

    if job.is_group():
        for member in list_members(job):
            await prepare_files(workflow, member)
        return
    await job.check_protected_output()
    refuse_future_inputs([job])
    if uses_provider(workflow):
        catalog_of(Path.cwd()).forget(filter(None, map(storable_path, job.output)))
    if storage.files_stay(workflow):
        return  # the job itself does the rest at its site
    await job.remove_existing_output()
    for output in job.output:
        if is_flagged(output, "update") and await output.exists():
            workflow.persistence.backup_output(Path(output))
        if not is_flagged(output, "pipe"):  # a pipe is created where the job runs
            output.prepare()
    for path in [*job.log, *([job.benchmark] if job.benchmark is not None else [])]:
        path.prepare()


async def note_outputs(dag: Any, job: Job, outcome: Outcome) -> str:
    """Note where the outputs of a job lie, if they may stay. Return an error, or ''."""
    if not uses_provider(dag.workflow):
        return ""
    catalog = catalog_of(Path.cwd())
    catalog.add(outcome.stored)
    try:
        for member in list_members(job):
            for output in member.output:
                path = storable_path(output)
                if path is not None and catalog.find(path) is None:
                    catalog.note_here(path, touch=bool(output.flags.get("touch")))
                if path is not None and output.flags.get("protected"):
                    prefix = output.storage_object.provider.local_prefix
                    catalog.link_here(path, Path(output), prefix)
                    output.protect()
            stored = [output for output in member.output if storable_path(output) is not None]
            await dag.handle_ensure(member, stored)
            for log in member.log:  # as Snakemake does for a local job
                if (path := storable_path(log)) is not None:
                    catalog.home(path).parent.mkdir(parents=True, exist_ok=True)
                    catalog.home(path).touch()
    except OSError as error:
        trouble = f"its outputs cannot be written here ({describe_os_error(error)})\n"
    except (MantikError, WorkflowError) as error:
        trouble = f"{error}\n"
    else:
        return ""
    catalog.discard(outcome.stored)
    return trouble
