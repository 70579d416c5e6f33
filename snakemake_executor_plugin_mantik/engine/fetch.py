"""Stage out: download an attempt's marker, log and outputs, verify and move them into place."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..common.errors import OutputMissing, OutputsLost, SiteNotFound
from ..jobs.markers import Marker, OutputEntry, read_marker
from ..jobs.paths import display_path
from ..jobs.spec import OutputFile
from ..journal import AttemptRecord, FileRecord
from ..sites.base import Site, is_rest_safe
from ..staging.transfers import OutputStaging, Repeat, download_file, read_file
from .evidence import Evidence
from .plan import through_links
from .site_retry import SiteRetry
from .transfer_meter import Direction
from .workflow_context import WorkflowContext

_LOG_ALONE_BYTES = 64 << 20
"""Largest log that is downloaded whole. Of a larger one only the end in the marker is kept; without
a marker, only its first part, as much as `read_file` reads."""


def log_path(logs: Path, record: AttemptRecord) -> Path:
    """Return the local path of an attempt's log, below the directory `logs`."""
    readable = re.sub(r"[^\w=.,+-]+", "_", record.name)[:100]
    return logs / f"{readable}.{record.id[:8]}.log"


class Fetcher:
    """Download from one site to one workflow's directory."""

    def __init__(
        self,
        site: Site,
        retry: SiteRetry,
        workflow: WorkflowContext,
        scratch: Path,
    ) -> None:
        """Make a fetcher; `scratch` is a local directory for archives."""
        self._site = site
        self._ledger = workflow.journal.files
        self._meter = workflow.meter
        self._retry = retry
        self._workdir = workflow.workdir
        self._scratch = scratch

    async def marker(self, record: AttemptRecord, end: Evidence) -> Marker:
        """Return the marker of an ended attempt; read it again if only half of it shows yet.

        The requests are repeated for as long as those for outputs: the marker may say that the job
        must be submitted again.

        Raises:
            MarkerInvalid: it is not this attempt's, or is damaged for good.
            SiteError: the site does not return it.
        """
        assert end.exit_code is not None
        code, path = end.exit_code, record.paths.marker(end.exit_code)

        async def read() -> Marker:
            content = await read_file(self._site, path, size=end.size)
            return await asyncio.to_thread(
                read_marker, content, attempt_id=record.id, exit_code=code
            )

        return await self._retry.insist(read)

    async def outputs(
        self, record: AttemptRecord, marker: Marker, declared: Sequence[OutputFile]
    ) -> tuple[FileRecord, ...]:
        """Download all outputs of a job and move them into place, or none on an error.

        Return their records in the workspace.

        Raises:
            OutputMissing: the job succeeded without one of its outputs.
            OutputsLost: an output is gone at the site, was changed there, or is none of the rule's;
                or the site had no room for the list of outputs or for an archive.
            TransferError, SiteRejected: a download kept failing, but may succeed later.
            OSError: an output cannot be written here.
        """
        if marker.bare:
            raise OutputsLost(
                "the site had no room for the job's list of outputs",
                where=f"{record.name} at {record.site}",
                do="Free space or quota there and run the rule again",
            )
        if marker.missing_outputs:
            raise OutputMissing(
                "the command ended with 0 but did not make "
                + ", ".join(map(display_path, marker.missing_outputs)),
                where=f"{record.name} at {record.site}",
                do="Correct the paths that it writes to, relative to the working directory",
            )
        landing = OutputStaging(
            self._workdir, record.id, [o.path for o in declared if not o.stored]
        )
        whole = marker
        marker = whole.without(whole.at(*(o.path for o in declared if o.stored)))
        links = [(e.path, e.target) for e in marker.files if e.type == "l"]
        try:
            await self._collect(record, marker, landing)
            if links:  # recorded before they are made here
                self._ledger.set_links(links)
            await asyncio.to_thread(landing.settle, marker.files)
        except SiteNotFound as error:
            raise OutputsLost(
                f"an output is no longer there ({error.what})",
                where=f"site {record.site}, {record.name}",
                do="Something removed it at the site; run the rule again",
            ) from error
        finally:
            if not landing.settled:
                await asyncio.to_thread(landing.clear)
        files = [FileRecord(e.path, e.size, e.sha256) for e in whole.files if e.type == "f"]
        # A job that reads the directory gets the files under the links' paths, too: these are not
        # uploaded to the site where the files were made.
        came = {file.path: file for file in files}
        linked = through_links([e.path for e in marker.files if e.type == "f"], dict(links))
        return (*files, *(replace(came[path], path=at) for at, path in linked))

    async def _collect(self, record: AttemptRecord, marker: Marker, landing: OutputStaging) -> None:
        def begin() -> None:
            for entry in marker.files:
                if entry.type == "d":
                    landing.write(entry)
            for entry, content in marker.small_outputs():
                landing.write(entry, [content])

        await asyncio.to_thread(begin)
        archived = [e for e in marker.files if e.place == "archive" and e.type == "f"]
        if archived:
            await self._archive(record, marker, landing, archived)
        alone = [e for e in marker.files if e.place == "alone" and e.type == "f"]
        repeat = self._repeat(marker)
        downloads = [asyncio.create_task(self._alone(entry, landing, repeat)) for entry in alone]
        try:
            await asyncio.gather(*downloads)
        finally:
            # A failed download ends the others: nothing may be written after this returns.
            for task in downloads:
                task.cancel()
            await asyncio.gather(*downloads, return_exceptions=True)

    async def _archive(
        self,
        record: AttemptRecord,
        marker: Marker,
        landing: OutputStaging,
        entries: list[OutputEntry],
    ) -> None:
        local = self._scratch / f"{record.id}.tar"
        try:
            await self._download(
                f"outputs of {record.name}", record.paths.archive, local,
                size=marker.archive_size, sha256=marker.archive_sha256,
                repeat=self._repeat(marker),
            )  # fmt: skip
            await asyncio.to_thread(landing.unpack, local, entries)
        finally:
            local.unlink(missing_ok=True)

    def _repeat(self, marker: Marker) -> Repeat:
        # The outputs of a failed job are not worth insisting on.
        return self._retry.insist if marker.exit_code == 0 else self._retry.found

    async def _alone(self, entry: OutputEntry, landing: OutputStaging, repeat: Repeat) -> None:
        if not is_rest_safe(entry.path):
            # The job puts such names into an archive, unless it had no room to make one.
            raise OutputsLost(
                "the site's file API cannot carry the name, and it had no room for an archive",
                where=f"site {self._site.name}, file {entry.path!r}",
                do="Free space or quota there and run the rule again",
            )
        what, target = display_path(entry.path), landing.place(entry)
        await self._download(
            what, entry.path, target, size=entry.size, sha256=entry.sha256, repeat=repeat
        )

    async def _download(
        self, what: str, path: str, target: Path, *, size: int, sha256: str, repeat: Repeat
    ) -> None:
        with self._meter.measure(Direction.DOWNLOAD, self._site.name, what, size) as transfer:
            await download_file(
                self._site, path, target, size=size, sha256=sha256, repeat=repeat,
                arrived=transfer.arrived,
            )  # fmt: skip

    async def log(self, record: AttemptRecord, marker: Marker | None, target: Path) -> bytes:
        """Write the job's log to the local path `target`, and return what was written.

        If the marker holds only the log's end, download the log itself, unless it is too large
        (`_LOG_ALONE_BYTES`): then the end is all. If no marker holds any of it, download the log,
        or its first part if it is large. If there is none (the job never started), or if it is
        empty, the result is empty and no file is made.
        """
        tail = marker.log if marker is not None else b""
        if marker is None or marker.bare or _LOG_ALONE_BYTES >= marker.log_bytes > len(tail):
            tail = await self._whole_log(record) or tail
        elif marker.log_bytes > len(tail):
            note = f"[the first {marker.log_bytes - len(tail)} bytes are left out here]\n"
            tail = note.encode() + tail
        if tail:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(tail)
        return tail

    async def _whole_log(self, record: AttemptRecord) -> bytes:
        try:
            return await self._retry.found(
                lambda: read_file(self._site, record.paths.log), at_once=True
            )
        except SiteNotFound:
            return b""
