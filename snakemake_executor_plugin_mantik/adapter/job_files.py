"""A job's files on this machine: before it is submitted, and when it has succeeded.

Inputs may be dated in the future. Snakemake (9.27) dates a job's outputs when it accepts them. It
refuses those that are then older than an input (`DAG.check_output_mtime`), and makes those again
that are older than the script (`Job.outputs_older_than_script_or_notebook`), at each start. So a
date that is only a little ahead is waited for, and others are named before anything is submitted.
"""

import os
import shlex
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from snakemake.benchmark import BenchmarkRecord, write_benchmark_records
from snakemake.exceptions import CacheMissException
from snakemake.io import is_flagged
from snakemake.sourcecache import LocalSourceFile
from snakemake_interface_common.exceptions import WorkflowError

from ..common.errors import MantikError, UserError
from ..common.humanize import humanize_duration
from ..engine.messages import describe_os_error
from ..engine.request import Outcome
from ..jobs.paths import local_path
from ..journal import TIMESTAMP
from ..rules import Job
from ..rules.paths import storage
from ..rules.paths.workflow_code import resolve_source
from ..rules.units import list_members
from ..staging.project_files import MIB
from ..storage.catalog import catalog_of
from ..storage.paths import home_of, storable_path, uses_provider


async def prepare_files(workflow: Any, job: Job) -> None:
    """Do what `job.prepare` does for a local job. Snakemake skips it for a remote one."""
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
    for path in filter(None, (*job.log, job.benchmark)):
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
        trouble = f"its outputs cannot be written on this machine ({describe_os_error(error)})\n"
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
    if job.is_group() or not is_cached(workflow, job):
        return False
    try:
        await job.rule.cache.fetch(job)
    except CacheMissException:
        return False
    return True


async def store_cached(workflow: Any, job: Job) -> str:
    """Store the outputs of a job, or of each job of a group, in the cache if its rule says so.

    Return an error, or ''.
    """
    try:
        for member in list_members(job):
            if is_cached(workflow, member) and not await member.rule.cache.exists(member):
                await member.rule.cache.store(member)
    except (WorkflowError, OSError) as error:
        return f"the outputs could not be stored in Snakemake's cache (--cache): {error}\n"
    return ""


def is_cached(workflow: Any, job: Job) -> bool:
    """Return whether Snakemake's cache serves a job."""
    # Jobs that use the storage themselves, or whose files stay, leave no outputs here. Without a
    # location for the cache, Snakemake reports that it runs without one, and `rule.cache.fetch`
    # would raise.
    enabled = workflow.output_file_cache is not None and not (
        storage.jobs_use_storage(workflow) or uses_provider(workflow)
    )
    return bool(enabled and job.rule.cache and job.rule.cache.output)


def write_benchmark(job: Any, measured: Path, *, extended: bool) -> None:
    """Write a job's benchmark file, with the columns of `--benchmark-extended` if `extended`.

    The file `measured` has a line for each run of the command (`jobs/bash/benchmark.sh`).

    Raises:
        MantikError: the measurements are missing or incomplete, or the file cannot be written.
    """
    try:
        records = [_record(line) for line in measured.read_text().splitlines()]
        for record in records:
            record.rule_name = job.rule.name
            for name in ("jobid", "wildcards", "params", "resources", "input", "threads"):
                setattr(record, name, getattr(job, name))
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
    rss, vms, uss, pss, read, written = (size / MIB for size in sizes)
    record.max_rss, record.max_vms, record.max_uss, record.max_pss = rss, vms, uss, pss
    record.io_in, record.io_out = read, written
    record.cpu_time = ticks / ticks_per_second
    record.cpu_usage = 100 * record.cpu_time
    record.data_collected = True
    return record


_WAITED_S = 60.0
"""Seconds by which clocks of file servers are off without anybody's mistake."""
_TICK_S = 0.02
"""Seconds by which the kernel's dates of files are behind the clock: its tick, and some more."""
_NAMED = 5
"""Files that a message names, at most."""


def refuse_future_inputs(jobs: Iterable[Any]) -> None:
    """Check the dates of files that exist before the run, and that `jobs` do not make."""
    jobs = list(jobs)
    made = {str(path) for job in jobs for path in job.output}
    readers: dict[str, Any] = {}
    for job in jobs:
        for path in _read_files(job, made):
            readers.setdefault(path, job)
    now = time.time()
    ahead = {path: _date(path) - now for path in readers}
    late = {path: seconds for path, seconds in ahead.items() if seconds > _WAITED_S}
    if late:
        named = sorted(late)[:_NAMED]
        links = [path for path in named if os.path.islink(path)]
        told = ", ".join(
            f"{path} (by {humanize_duration(late[path])}, rule {readers[path].rule.name})"
            for path in named
        )
        raise UserError(
            "inputs are dated in the future (nothing submitted), so Snakemake would refuse what"
            f" jobs make of them: {told}{', …' * (len(late) > _NAMED)}",
            do=f"Correct the clock of this machine, or the dates: touch {shlex.join(named)}"
            + f"; touch -h {shlex.join(links)}" * bool(links),
        )


def is_ahead_of_time(unit: Any) -> bool:
    """Return whether an input of a job or group is dated a little in the future."""
    now = time.time() - _TICK_S  # a file that is written now may be dated so much earlier
    paths = (path for job in list_members(unit) for path in _read_files(job))
    return any(now < _date(path) <= now + _WAITED_S for path in paths)


def _read_files(job: Any, made: Iterable[str] = ()) -> Iterator[str]:
    """Yield the paths of a job's inputs and script on this machine, without those that are made."""
    for path in job.input:
        if str(path) not in made:
            stays = storable_path(path) is not None
            yield home_of(path.storage_object.query) if stays else str(path)
    written = job.rule.script or job.rule.notebook
    if written and "{" not in str(written):
        source = resolve_source(written, job)
        if isinstance(source, LocalSourceFile):
            yield os.path.relpath(source.path)


def _date(path: str) -> float:
    """Return the date of a file as Snakemake takes it, in seconds since the epoch; 0 if missing.

    Of a link and its target the newer one counts, and of a directory its timestamp.
    """
    try:
        own = os.lstat(path)
        timestamp = os.path.join(path, TIMESTAMP)
        target = os.stat(timestamp if os.path.exists(timestamp) else path)
    except OSError:
        return 0.0
    return max(target.st_mtime, own.st_mtime if stat.S_ISLNK(own.st_mode) else 0.0)
