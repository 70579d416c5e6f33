"""Write `benchmark:` files with Snakemake's own code, from what was measured at the site."""

from pathlib import Path
from typing import Any

from snakemake.benchmark import BenchmarkRecord, write_benchmark_records

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.jobs.paths import local_path
from snakemake_executor_plugin_mantik.storage.paths import storable_path

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
