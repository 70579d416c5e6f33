"""Show the output of a run's job, read from the site while it runs, and of its controller."""

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteError, SiteNotFound
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.config.reading import read_config_named
from snakemake_executor_plugin_mantik.connections.connect import (
    find_site_credentials,
    make_sites,
    workspace_name,
)
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.journal.database import JournalCopy
from snakemake_executor_plugin_mantik.runs import controller
from snakemake_executor_plugin_mantik.runs.local_runs import LocalRun
from snakemake_executor_plugin_mantik.sites.base import Site

_LOOK_S: Final = 0.5
"""Seconds between two reads of a growing log on this machine."""

_LOOK_THERE_S: Final = 5.0
"""Seconds between two reads of a log at a site; each takes one or two requests."""

_PIECE: Final = 1 << 16

_Write = Callable[[str], None]


def write_controller_log(run: LocalRun, write: _Write, *, follow: bool) -> None:
    """Write the output of a run's controller and Snakemake.

    With `follow`, continue with new output until the controller ends.
    """
    with run.directory.log.open(errors="replace") as file:
        while True:
            # Check before reading: the next round reads what is written after the check.
            alive = follow and controller.is_alive(run.directory)
            while text := file.read(_PIECE):
                write(text)
            if not alive:
                return
            time.sleep(_LOOK_S)


def write_job_log(run: LocalRun, write: _Write, *, follow: bool) -> bool:
    """Write the output of a run's job, read from the site until it has been downloaded.

    With `follow`, continue with new output until the controller ends.

    Returns:
        Whether the run had a job, which may have had output.

    Raises:
        MantikError: the output is at the site and cannot be read there. With `follow`, a failed
            read is repeated.
    """
    return asyncio.run(_of_job(run, write, follow=follow))


async def _of_job(run: LocalRun, write: _Write, *, follow: bool) -> bool:
    last, shown, decoder = "", 0, codecs.getincrementaldecoder("utf-8")("replace")
    async with AsyncExitStack() as stack:
        site: Site | None = None
        while True:
            alive = controller.is_alive(run.directory)
            record = next(reversed(run.tries), None)
            if record is not None and record.id != last:  # it was tried again
                last, shown = record.id, 0
            if record is not None and (log := _here(run, record)) is not None:
                shown += _rest(log, shown, write, decoder)
            elif record is not None and record.site_jobs:
                if site is None:
                    site = await stack.enter_async_context(_site(run, record))
                async for piece in _there(site, record.paths.log, shown, patient=follow):
                    shown += len(piece)
                    write(decoder.decode(piece))
            if not (follow and alive):
                return bool(last)
            await asyncio.sleep(_LOOK_THERE_S if site is not None else _LOOK_S)


def _here(run: LocalRun, record: TryRecord) -> Path | None:
    """Return the downloaded output of a job that has ended, if there is one."""
    path = run.workdir / record.log
    return path if record.log and path.is_file() else None


def _rest(log: Path, shown: int, write: _Write, told: codecs.IncrementalDecoder) -> int:
    size = 0
    with log.open("rb") as file:
        file.seek(shown)
        while piece := file.read(_PIECE):
            size += len(piece)
            write(told.decode(piece))
    return size


async def _there(site: Site, path: str, shown: int, *, patient: bool) -> AsyncIterator[bytes]:
    """Yield what a log has beyond `shown`; if `patient`, nothing if the site does not answer.

    A log that does not exist yet yields nothing, either.
    """
    try:
        entry = await site.stat(path)
        if entry is not None and entry.size > shown:
            async for piece in site.get(path, offset=shown, size=entry.size):
                yield piece
    except SiteNotFound:
        return
    except SiteError:
        if not patient:
            raise


@asynccontextmanager
async def _site(run: LocalRun, record: TryRecord) -> AsyncIterator[Site]:
    """Connect to the site of a try, independently of the controller."""
    path = str(run.directory.path / run.request.config)
    configs = {record.site: read_config_named(record.site, path, run.workdir, project=None)}
    credentials = find_site_credentials(configs, run.workdir)
    for credential in credentials.values():
        credential.login()
    config = configs[record.site].config
    planners = {record.site: Planner(config, run.request.account or None, run.workdir)}
    copy = JournalCopy(run.workdir / STATE)
    workflow = copy.db.execute("SELECT id FROM workflow").fetchone()["id"]
    copy.db.close()
    sites = make_sites(configs, credentials, planners, workspace_name(run.workdir, workflow))
    site, _ = sites[record.site]
    try:
        await site.open()
        yield site
    finally:
        await site.close()
