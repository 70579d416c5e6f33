"""A job's files on this machine: before it is submitted, and when it has succeeded."""

from pathlib import Path
from typing import Any

from snakemake.benchmark import BenchmarkRecord, write_benchmark_records
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.engine.messages import describe_os_error
from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.jobs.paths import local_path
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.paths import storage
from snakemake_executor_plugin_mantik.rules.units import list_members
from snakemake_executor_plugin_mantik.storage.catalog import catalog_of
from snakemake_executor_plugin_mantik.storage.paths import storable_path, uses_provider

from .future_inputs import refuse_future_inputs


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


async def fetch_cached(workflow: Any, job: Job) -> bool:
    """Restore a job's outputs, but not a group's, from the cache; return whether they were there.

    Raises:
        WorkflowError: the cache cannot be read.
    """
    from snakemake.exceptions import CacheMissException

    if job.is_group() or not is_cached(workflow, job):
        return False
    try:
        await job.rule.cache.fetch(job)
    except CacheMissException:
        return False
    return True


async def store_cached(workflow: Any, job: Job) -> None:
    """Store the outputs of a job, or of each job of a group, in the cache if its rule says so.

    Raises:
        WorkflowError: the cache cannot be written.
    """
    for member in job.jobs if job.is_group() else (job,):
        if is_cached(workflow, member) and not await member.rule.cache.exists(member):
            await member.rule.cache.store(member)


def is_cached(workflow: Any, job: Job) -> bool:
    """Return whether Snakemake's cache serves a job."""
    from snakemake_executor_plugin_mantik.rules.paths.storage import jobs_use_storage
    from snakemake_executor_plugin_mantik.storage.paths import uses_provider

    # Jobs that use the storage themselves, or whose files stay, leave no outputs here. Without a
    # location for the cache, Snakemake reports that it runs without one, and `rule.cache.fetch`
    # would raise.
    enabled = workflow.output_file_cache is not None and not (
        jobs_use_storage(workflow) or uses_provider(workflow)
    )
    return bool(enabled and job.rule.cache and job.rule.cache.output)


_MIB = 1024 * 1024


def write_benchmark(job: Any, measured: Path, *, extended: bool) -> None:
    """Write a job's benchmark file, with the columns of `--benchmark-extended` if `extended`.

    The file `measured` has a line for each run of the command (`jobs/bash/benchmark.sh.j2`).

    Raises:
        MantikError: the measurements are missing or incomplete, or the file cannot be written.
    """
    try:
        lines = measured.read_text().splitlines()
        records = [_record(line) for line in lines]
        for record in records:
            record.jobid, record.rule_name, record.wildcards = (
                job.jobid,
                job.rule.name,
                job.wildcards,
            )
            record.params, record.resources = job.params, job.resources
            record.input, record.threads = job.input, job.threads
        path = storable_path(job.benchmark)
        target = str(job.benchmark) if path is None else str(local_path(path, Path.cwd()))
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        write_benchmark_records(records, target, extended)
    except (OSError, ValueError) as error:
        raise MantikError(
            f"the benchmark file could not be written ({error})",
            where=f"rule {job.rule.name}, {job.benchmark}",
            do="Check that there is disk space, and start again: the job itself succeeded",
        ) from error


def _record(line: str) -> BenchmarkRecord:
    begin, end, *sample = line.split()
    record = BenchmarkRecord(running_time=float(end) - float(begin))
    if not sample:
        record.process_gone = True  # it ended before the first measurement
        return record
    *sizes, ticks, ticks_per_second = map(int, sample)
    rss, vms, uss, pss, read, written = (size / _MIB for size in sizes)
    record.max_rss, record.max_vms, record.max_uss, record.max_pss = rss, vms, uss, pss
    record.io_in, record.io_out = read, written
    record.cpu_time = ticks / ticks_per_second
    record.cpu_usage = 100 * record.cpu_time
    record.data_collected = True
    return record
