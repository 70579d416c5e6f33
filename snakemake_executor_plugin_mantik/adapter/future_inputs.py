"""Inputs that are dated in the future.

Snakemake (9.27) dates a job's outputs when it accepts them. It refuses those that are then older
than an input (`DAG.check_output_mtime`), and makes those again that are older than the script
(`Job.outputs_older_than_script_or_notebook`), at each start. So a date that is only a little ahead
is waited for, and others are named before anything is submitted.
"""

import os
import shlex
import stat
import time
from collections.abc import Iterable, Iterator
from typing import Any

from snakemake.sourcecache import LocalSourceFile

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.journal import TIMESTAMP
from snakemake_executor_plugin_mantik.rules.paths.workflow_code import resolve_source
from snakemake_executor_plugin_mantik.rules.units import list_members
from snakemake_executor_plugin_mantik.storage.paths import home_of, storable_path

_WAITED_S = 60.0
"""Seconds by which clocks of file servers are off without anybody's mistake."""
_NAMED = 5
"""Files that a message names, at most."""


def refuse_future_inputs(jobs: Iterable[Any]) -> None:
    """Check the dates of files that exist before the run, and that `jobs` do not make themselves.

    Raises:
        UserError: some are in the future.
    """
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
    now = time.time()
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
