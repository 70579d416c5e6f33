"""Show a job's output, or its rule's own log file: what is here, else what grows at the site.

A log at a site is read by its new bytes: one request for its size and one for the rest. The pause
between two reads grows while nothing is new.
"""

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteError, SiteNotFound, UserError
from snakemake_executor_plugin_mantik.jobs.markers import MarkerInvalid, read_marker
from snakemake_executor_plugin_mantik.jobs.paths import (
    display_path,
    local_path,
    parse_marker_name,
)
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site, is_rest_safe
from snakemake_executor_plugin_mantik.staging.transfers import read_file

LOOK_S: Final = 0.5
"""Seconds between two reads of a growing log on this machine."""

_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 30.0
"""Seconds between two reads of a log at a site, after news and after a while without any."""

PIECE: Final = 1 << 16
"""Bytes, or characters, that are copied at a time."""


@dataclass(frozen=True)
class JobLog:
    """The log of a job.

    Attributes:
        workdir: the workflow's directory.
        record: returns the try whose log to show now; None if there is none yet.
        visit: opens the site of a try.
        is_controlled: returns whether a controller runs, which downloads the log in the end.
        is_over: returns whether nothing can follow any more.
        file: the rule's own log file to show, as a path in the workspace; by default the output.
    """

    workdir: Path
    record: Callable[[], TryRecord | None]
    visit: Callable[[TryRecord], AbstractAsyncContextManager[Site]]
    is_controlled: Callable[[], bool]
    is_over: Callable[[], bool]
    file: str = ""

    async def copy(self, write: Callable[[str], None], *, follow: bool) -> bool:
        """Write the log as text.

        With `follow`, continue until the job is over, or has ended at its site with no controller
        to fetch its results. If it is tried again meanwhile, the log of the new try follows.

        Returns:
            Whether the job has been submitted, so that it may have had output.

        Raises:
            MantikError: the log is at the site and cannot be read there. With `follow`, a failed
                read is repeated.
        """
        last, shown, decoder = "", 0, codecs.getincrementaldecoder("utf-8")("replace")
        pause = LOOK_S
        async with AsyncExitStack() as stack:
            site: Site | None = None
            while True:
                over = not follow or self.is_over()  # before reading: the rest is read after it
                record = self.record()
                if record is not None and record.id != last:
                    last, shown = record.id, 0
                before = shown
                if record is None:
                    pass
                elif (log := self._here(record)) is not None:
                    for piece in _rest(log, shown):
                        shown += len(piece)
                        write(decoder.decode(piece))
                elif record.may_run:
                    if site is None:
                        site = await stack.enter_async_context(self.visit(record))
                        pause = _FIRST_PAUSE_S
                    async for piece in self._there(site, record, shown, patient=follow):
                        shown += len(piece)
                        write(decoder.decode(piece))
                    if shown == before and not self.is_controlled():
                        end = await _end(site, record, patient=follow)
                        if end is not None and not self.file and not shown:
                            write(end.decode(errors="replace"))
                        over = over or end is not None
                if over:
                    return bool(last)
                await asyncio.sleep(pause)
                if site is not None:
                    grown = shown > before
                    pause = _FIRST_PAUSE_S if grown else min(1.5 * pause, _LONGEST_PAUSE_S)

    def _here(self, record: TryRecord) -> Path | None:
        """Return the log of a job that has ended on this machine; None if it is not here."""
        if not self.file:
            path = self.workdir / record.log
            return path if record.log and path.is_file() else None
        path = local_path(self.file, self.workdir)
        return path if record.outcome and path.is_file() else None

    async def _there(
        self, site: Site, record: TryRecord, shown: int, *, patient: bool
    ) -> AsyncIterator[bytes]:
        """Yield what a log has beyond `shown`; if `patient`, nothing if the site does not answer.

        A log that does not exist yet yields nothing, either.
        """
        if self.file and not is_rest_safe(self.file):
            raise UserError(
                "the APIs of sites cannot carry its name",
                where=display_path(self.file),
                do="Wait until the job has ended: its log is downloaded then",
            )
        path = self.file or record.paths.log
        try:
            if self.file and record.started is None:
                # A log of an earlier try lies there until the job starts.
                claim = await site.stat(record.paths.claim)
                if claim is None or claim.directory:
                    return
            entry = await site.stat(path)
            if entry is not None and entry.size > shown:
                async for piece in site.get(path, offset=shown, size=entry.size):
                    yield piece
        except SiteNotFound:
            return
        except SiteError:
            if not patient:
                raise


def _rest(log: Path, shown: int) -> Iterator[bytes]:
    with log.open("rb") as file:
        file.seek(shown)
        while piece := file.read(PIECE):
            yield piece


async def _end(site: Site, record: TryRecord, *, patient: bool) -> bytes | None:
    """Return the end of the output in a try's marker; None if the try has not ended."""
    try:
        entries = await site.list(record.paths.tries)
        codes = dict(filter(None, map(parse_marker_name, entries)))
        if record.id not in codes:
            return None
        content = await read_file(site, record.paths.marker(codes[record.id]))
        with suppress(MarkerInvalid):
            return read_marker(content, try_id=record.id, exit_code=codes[record.id]).log
        return b""
    except SiteNotFound:
        return None
    except SiteError:
        if not patient:
            raise
        return None
