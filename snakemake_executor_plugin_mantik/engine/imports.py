"""Imports: files that a site's server fetches from another site's, without this machine.

They go on while this machine is off; the journal knows them. A file that no server can fetch, or
does not, streams through this machine instead (`engine/upload.py`). The job that unpacks the bundle
compares its content with the checksum, as of all files of other places.
"""

import asyncio
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import (
    MantikError,
    SiteBusy,
    SiteError,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.paths import display_path, imported_path
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import FileLedger
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, SharedFile, Site
from snakemake_executor_plugin_mantik.staging.local import LocalFile

from .site_retry import TRANSIENT, SiteRetry
from .transfer_meter import TransferMeter, TransferProgress, Way

IMPORT_BYTES: Final = 16 << 20
"""Size from which a file is imported: it may take a job at each of the two sites."""
_AT_ONCE: Final = 4
"""Imports from one place to another at the same time."""
_FIRST_LOOK_S: Final = 0.5
"""Wait before the first look at an import; each further wait is 1.5 times longer."""
_LONGEST_LOOK_S: Final = 15.0
_STALLED_S: Final = 600.0
"""Seconds without a new byte, in a queue or not, after which an import is given up."""
_UNSEEN_S: Final = 120.0
"""Seconds without a new byte for which a site may not know an import."""
_MOST_FAILURES: Final = 2
"""Imports from a place that may fail one after the other; then its files come in another way."""
_VISIBLE_S: Final = 30.0
"""Seconds that a site's file system may take to show the whole of an imported file."""

Share = Callable[[LocalFile], Awaitable[SharedFile | None]]
"""Lets servers read a file of another place; None if its site has no way to."""


def may_import(size: int, source_api: str, target_api: str) -> bool:
    """Return whether a site's server may be able to fetch a file of `size` bytes from another's.

    The APIs are `unicore` or `firecrest`. A firecREST site needs an object store to let others read
    its files. Those of a UNICORE server only UNICORE servers can read that it trusts.
    """
    return size >= IMPORT_BYTES and (source_api == "firecrest" or target_api == "unicore")


class _ImportFailed(Exception):  # noqa: N818 - a plain name
    """The site's server did not bring the file; the message says why.

    `failures` is for how many it counts against imports from the same place.
    """

    def __init__(self, reason: str, failures: int = 1) -> None:
        super().__init__(reason)
        self.failures = failures


class Importer:
    """Lets the site of one place import files. Belongs to the event loop's thread."""

    def __init__(
        self,
        site: Site,
        ledger: FileLedger,
        retry: SiteRetry,
        *,
        share: Share,
        notify: Callable[[str], None],
        meter: TransferMeter,
    ) -> None:
        self._site = site
        self._ledger = ledger
        self._retry = retry
        self._share = share
        self._notify = notify
        self._meter = meter
        # By place: one that is away holds up no other.
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_AT_ONCE)
        )
        # By place, the imports that failed since one succeeded. Paths and checksums of what was
        # imported in this run, and of that what a job did not find as it should be.
        self._failures: Counter[str] = Counter()
        self._imported: set[tuple[str, str]] = set()
        self._doubted: set[tuple[str, str]] = set()

    async def bring(self, bundle: str, files: Sequence[LocalFile]) -> dict[str, str]:
        """Import the large ones of `files`, all of one other place, into a bundle's directory.

        Return the names of those that are there, by path.
        """
        large = [file for file in files if file.size >= IMPORT_BYTES]
        names = await asyncio.gather(*(self._bring(bundle, file) for file in large))
        return {file.path: name for file, name in zip(large, names, strict=True) if name}

    def doubt(self, paths: Collection[str]) -> None:
        """Import the present contents of these paths no more: a job has not found them.

        They may be others at their place: streaming finds out where they changed.
        """
        self._doubted |= {content for content in self._imported if content[0] in paths}

    async def _bring(self, bundle: str, file: LocalFile) -> str:
        """Return the name of an imported file; empty if it must come in another way."""
        if (file.path, file.sha256) in self._doubted:
            return ""
        async with self._slots[file.stored]:
            begun = self._ledger.find_import(bundle, file.path, self._site.name)
            if begun is None and self._failures[file.stored] >= _MOST_FAILURES:
                return ""
            try:
                begun = begun or await self._begin(bundle, file)
                if begun is None:
                    self._failures[file.stored] = _MOST_FAILURES
                    return ""
                await self._finish(bundle, file, *begun)
            except (_ImportFailed, MantikError) as error:
                if isinstance(error, _ImportFailed):
                    self._failures[file.stored] += error.failures
                self._ledger.forget_import(bundle, file.path)
                self._notify(
                    f"Site {self._site.name} cannot fetch {display_path(file.path)} from the other"
                    f" site's server; it comes {Way.STREAM}. {str(error).rstrip('.')}."
                )
                return ""
        self._failures[file.stored] = 0
        self._imported.add((file.path, file.sha256))
        return begun[0]

    async def end(self, bundle: str) -> None:
        """End the imports to a bundle that nobody needs any more, as far as the site answers."""
        for import_id in self._ledger.import_ids(bundle, self._site.name):
            with suppress(SiteError):
                await self._site.end_import(import_id)

    async def _begin(self, bundle: str, file: LocalFile) -> tuple[str, str] | None:
        """Begin an import; return the file's name and the import's id, or None if there is no way.

        The id is empty if the site's answer was lost: the import may have begun.

        Raises:
            _ImportFailed: the site refuses it.
            MantikError: the file, or a directory for it, cannot be had.
        """
        shared = await self._share(file)
        if shared is None:
            return None
        name = str(uuid.uuid4())
        path = imported_path(bundle, name)
        await self._retry(lambda: self._site.make_directory(path.rpartition("/")[0]))
        self._ledger.set_import(bundle, file.path, name, self._site.name, "")
        try:
            import_id = await self._retry(
                lambda: self._site.start_import(shared, path), (SiteBusy, SiteUnauthorized)
            )
        except SiteUnreachable:
            return name, ""
        except SiteError as error:
            raise _ImportFailed(str(error)) from error
        if import_id is None:
            self._ledger.forget_import(bundle, file.path)
            return None
        self._ledger.set_import(bundle, file.path, name, self._site.name, import_id)
        return name, import_id

    async def _finish(self, bundle: str, file: LocalFile, name: str, import_id: str) -> None:
        """Wait until an import has brought the whole file.

        If this is cancelled, the import goes on, and the next run finds it.

        Raises:
            _ImportFailed: it has not.
            MantikError: the site refuses to say.
        """
        path = imported_path(bundle, name)
        with TransferProgress(
            [file], self._site.name, self._notify, self._meter, Way.IMPORT
        ) as progress:
            progress.begin(await self._size(path) / file.size)
            state = await self._end_of(import_id, path, file, progress)
        if import_id:
            with suppress(SiteError):
                await self._site.end_import(import_id)
        if state.phase is Phase.UNKNOWN or state.reason is Reason.SUCCESS:
            if await self._is_whole(path, file):
                return
            failed = _ImportFailed("Not all of it is there")
        elif state.phase is Phase.ENDED:
            failed = _ImportFailed(state.detail)
        else:  # to wait for another one would take as long
            reason = f"Nothing of it has come for {_STALLED_S:.0f} s"
            failed = _ImportFailed(reason, _MOST_FAILURES)
        with suppress(SiteError):
            await self._site.remove(path)
        raise failed

    async def _end_of(
        self, import_id: str, path: str, file: LocalFile, progress: TransferProgress
    ) -> JobState:
        """Return the state of an import that has ended, is unknown, or does not go on any more."""
        clock = asyncio.get_running_loop().time
        pause, size, since = _FIRST_LOOK_S, 0, clock()
        while True:
            await asyncio.sleep(pause)
            state = JobState(Phase.UNKNOWN)
            if import_id:
                try:
                    state = await self._site.import_state(import_id)
                except TRANSIENT:  # what has come counts
                    state = JobState(Phase.RUNNING)
            if state.phase is Phase.ENDED:
                return state
            if (now := await self._size(path)) > size:
                size, since = now, clock()
                progress.report(min(size / file.size, 1.0))
            still = clock() - since
            if state.phase is Phase.UNKNOWN and (size >= file.size or still > _UNSEEN_S):
                return state
            if still > _STALLED_S:
                return state
            pause = min(pause * 1.5, _LONGEST_LOOK_S)

    async def _is_whole(self, path: str, file: LocalFile) -> bool:
        """Check the size of an imported file, which a file system may show late."""
        clock = asyncio.get_running_loop().time
        until = clock() + _VISIBLE_S
        while await self._size(path) != file.size:
            if clock() > until:
                return False
            await asyncio.sleep(_FIRST_LOOK_S)
        return True

    async def _size(self, path: str) -> int:
        entry = await self._retry(lambda: self._site.stat(path))
        return 0 if entry is None else entry.size
