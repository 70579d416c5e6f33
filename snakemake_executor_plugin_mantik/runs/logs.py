"""Show the output of a run's job, read from the site while it runs, and of its controller."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from snakemake_executor_plugin_mantik.config.reading import read_config_named
from snakemake_executor_plugin_mantik.connections.visit import visit_site
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.runs import controller
from snakemake_executor_plugin_mantik.runs.local_runs import LocalRun
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.watching.job_log import LOOK_S, PIECE, LogSource, copy_log
from snakemake_executor_plugin_mantik.watching.overview import present_tries

_Write = Callable[[str], None]


def write_controller_log(run: LocalRun, write: _Write, *, follow: bool) -> None:
    """Write the output of a run's controller and Snakemake.

    With `follow`, continue with new output until the controller ends.
    """
    with run.directory.log.open(errors="replace") as file:
        while True:
            # Check before reading: the next round reads what is written after the check.
            alive = follow and controller.is_alive(run.directory)
            while text := file.read(PIECE):
                write(text)
            if not alive:
                return
            time.sleep(LOOK_S)


def write_job_log(run: LocalRun, write: _Write, *, follow: bool) -> bool:
    """Write the output of a run's job, read from the site until it has been downloaded.

    With `follow`, continue with new output until the controller ends.

    Returns:
        Whether the run had a job, which may have had output.

    Raises:
        MantikError: the output is at the site and cannot be read there. With `follow`, a failed
            read is repeated.
    """
    source = LogSource(
        run.workdir,
        lambda: next(reversed(present_tries(run.tries)), None),
        lambda record: _site(run, record),
        is_controlled=lambda: controller.is_alive(run.directory),
        is_over=lambda: not controller.is_alive(run.directory),
    )
    return asyncio.run(copy_log(source, write, follow=follow))


def _site(run: LocalRun, record: TryRecord) -> AbstractAsyncContextManager[Site]:
    """Connect to the site of a try, independently of the controller."""
    path = str(run.directory.path / run.request.config)
    loaded = read_config_named(record.site, path, run.workdir, project=None)
    return visit_site(record.site, loaded, run.workdir, run.request.account or None)
