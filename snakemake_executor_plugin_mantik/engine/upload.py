"""Upload bundles to one place, in parts, from this machine's files or from files of another place.

Nothing is written to this machine's disk. An upload that broke off, also by a `kill -9`, goes on
with the first part that the site has not acknowledged.

Large files of another place are imported where that is possible: the site's server fetches them
from the other site's. Imports go on while this machine is off; the journal knows them. A file that
no server can fetch, or does not, streams through this machine. The job that unpacks the bundle
compares its content with the checksum, as of all files of other places.
"""

import asyncio
import hashlib
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import Final

from ..common.errors import (
    MantikError,
    OutputsLost,
    SiteBusy,
    SiteError,
    SiteUnauthorized,
    SiteUnreachable,
    UserError,
)
from ..jobs.paths import KEPT, bundle_path, display_path, imported_path
from ..jobs.reasons import Reason
from ..sites.base import JobState, Phase, SharedFile
from ..staging.bundle import Bundle, ContentDiffers, Fetch, compress
from ..staging.local import LocalFile
from .site_retry import TRANSIENT
from .transfer_meter import WAYS, Direction
from .workflow_context import PlaceContext

IMPORT_BYTES: Final = 16 << 20
"""Size from which a file is imported: it may take a job at each of the two sites."""
_IMPORTS_AT_ONCE: Final = 4
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


def _is_large(file: LocalFile) -> bool:
    return file.size >= IMPORT_BYTES


def may_import(file: LocalFile, source_api: str, target_api: str) -> bool:
    """Return whether a site's server may be able to fetch a file from another's.

    The APIs are `unicore` or `firecrest`. A firecREST site needs an object store to let others read
    its files. Those of a UNICORE server only UNICORE servers can read that it trusts.
    """
    return _is_large(file) and (source_api == "firecrest" or target_api == "unicore")


class _ImportFailed(Exception):  # noqa: N818 - a plain name
    """The site's server did not bring the file; the message says why.

    `failures` is for how many it counts against imports from the same place.
    """

    def __init__(self, reason: str, failures: int = 1) -> None:
        super().__init__(reason)
        self.failures = failures


_PARTS_AT_ONCE: Final = 3
"""Parts that are uploaded to a place at once, each from memory."""
_PLAIN_SHARE: Final = 0.99
"""Size of a part before its compression, as a share of the largest upload: what does not shrink
becomes longer by headers."""
_ATTEMPTS: Final = 2
"""How often a file of another place must have the same wrong content before that is believed."""
_MOST_ATTEMPTS: Final = 5
"""How often files of another place are read at most, if they come with other contents each time."""

_PART: Final = "-of-"
_PART_DIGITS: Final = 7

_WORKER: Final = ThreadPoolExecutor(1, "mantik-compress")
"""One thread for all parts: the C library keeps the memory of each thread that held one."""


class Uploader:
    """Uploads bundles to one place, and lets its site import. Belongs to the event loop's thread.

    Of the bundles that are larger than one part, one at a time is sent from this machine, and one
    from each other place.
    """

    def __init__(self, at: PlaceContext, fetch: Fetch, share: Share, limit: int) -> None:
        """Make it; see `Stager`."""
        self._place, self._site, self._retry = at.id, at.site, at.retry
        self._journal, self._ledger = at.workflow.journal, at.workflow.journal.files
        self._notify, self._meter = at.workflow.notify, at.workflow.meter
        self._fetch, self._share = fetch, share
        self._part_bytes = int(limit * _PLAIN_SHARE)
        self._slots = asyncio.Semaphore(_PARTS_AT_ONCE)
        # By place, as one that is away holds up no other.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._importing: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_IMPORTS_AT_ONCE)
        )
        # By place, the imports that failed since one succeeded. Paths and checksums of what was
        # imported in this run, and of that what a job did not find as it should be.
        self._failures: Counter[str] = Counter()
        self._imported: set[tuple[str, str]] = set()
        self._doubted: set[tuple[str, str]] = set()

    def begin(self, files: Sequence[LocalFile], *, keep: bool = False) -> str:
        """Return the bundle for `files`: one that is at the site in part already, or a new one.

        With `keep` it is one that stays until a job unpacks it, also when a run ends.
        """
        records = [file.record for file in files]
        contents = self._part_bytes, [(file.record, file.stored) for file in files]
        digest = hashlib.sha256(repr(contents).encode()).hexdigest()
        prefix = KEPT if keep else f"{self._journal.bucket(self._place)}/"
        bundle = self._ledger.find_begun(self._place, digest, KEPT if keep else "")
        bundle = bundle or f"{prefix}{uuid.uuid4()}"
        self._ledger.begin_bundle(self._place, bundle, digest, records)
        return bundle

    async def send(
        self, bundle: str, files: Sequence[LocalFile], report: Callable[[float], None] | None = None
    ) -> str:
        """Upload a bundle that has begun, of files all of this machine or all of one other place.

        Return the bundle. `report` is called with the share that has been uploaded, from 0 to 1,
        again and again.

        Raises:
            FileChanged: a local file has changed or vanished since it was examined.
            UserError: a local file cannot be read.
            OutputsLost: a file at the other place is not what the job made.
            SiteError: a site refuses a request.
        """
        found: Counter[tuple[str, str]] = Counter()
        while True:
            try:
                await self._attempt(bundle, files, report or (lambda _: None))
            except ContentDiffers as error:
                self._ledger.send_again(bundle)
                found[error.found] += 1
                if found[error.found] == _ATTEMPTS or found.total() == _MOST_ATTEMPTS:
                    raise OutputsLost(error.what, where=error.where, do=error.do) from error
            except OSError as error:
                raise UserError(
                    f"a file for a job cannot be read ({error.strerror or error})",
                    where=str(error.filename or files[0].local),
                    do="Check that it is readable and start again: running jobs are reattached",
                ) from error
            else:
                self._ledger.set_bundle(bundle, "uploaded")
                return bundle

    async def _attempt(
        self, bundle: str, files: Sequence[LocalFile], report: Callable[[float], None]
    ) -> None:
        path, source = bundle_path(bundle), files[0].stored
        # A directory has room for imports, and may be there even if none of them succeeds.
        whole_file = not source or not any(map(_is_large, files))
        imported = {} if whole_file else await self.bring(bundle, files)
        tar = await asyncio.to_thread(Bundle, files, imported)
        streamed = [file for file in files if file.path not in imported]
        report_all = partial(
            self._meter.report, streamed, self._site.name, Direction.MOVE, self._notify
        )
        if tar.size <= self._part_bytes and whole_file:
            with report_all():
                part = await _joined(tar.read(self._fetch)) if source else b""
                async with self._slots:  # a source may be away: that holds up nothing else
                    part = part or await _joined(tar.read(self._fetch))
                    await self._put(path, await _compressed(part))
            return
        async with self._turns[source]:
            count = -(-tar.size // self._part_bytes)
            sent = await self._sent(bundle, tar.size, count)
            with report_all(sent / count) as arrived:

                def landed(parts: int) -> None:
                    arrived(parts / count)
                    report(parts / count)
                    self._ledger.set_sent(bundle, tar.size, parts)

                landed(sent)
                parts = _cut(tar.read(self._fetch, sent * self._part_bytes), self._part_bytes)
                async with aclosing(parts):
                    await self._send_parts(parts, path, sent, count, landed)

    async def _sent(self, bundle: str, size: int, count: int) -> int:
        """Return how many of a bundle's parts are at the site; the rest is sent again.

        Remove the parts of an earlier attempt that imported other files.
        """
        begun, known = self._ledger.sent(bundle)
        if not begun:
            return 0
        path = bundle_path(bundle)
        there = await self._retry.listed(lambda: self._site.list(path))
        for name in there:
            if _PART in name and not name.endswith(_part_name(0, count)[-_PART_DIGITS:]):
                await self._retry(lambda name=name: self._site.remove(f"{path}/{name}"))  # type: ignore[misc]
        known = known if begun == size else 0
        gone = (n for n in range(known) if _part_name(n, count) not in there)
        return next(gone, known)

    async def _send_parts(
        self,
        parts: AsyncIterator[bytearray],
        directory: str,
        first: int,
        count: int,
        landed: Callable[[int], None],
    ) -> None:
        """Upload parts; call `landed` with the number of those that are there without a gap."""
        there: set[int] = set()
        complete = first

        async def put(number: int, content: bytes) -> None:
            nonlocal complete
            await self._put(f"{directory}/{_part_name(number, count)}", content)
            there.add(number)
            if number == complete:
                while complete in there:
                    complete += 1
                landed(complete)

        number = first
        running: list[asyncio.Task[None]] = []
        try:
            async for part in parts:
                content = await _compressed(part)
                await self._slots.acquire()
                task = asyncio.create_task(put(number, content))
                task.add_done_callback(lambda _: self._slots.release())
                running.append(task)
                number += 1
                for task in [task for task in running if task.done()]:
                    running.remove(task)
                    task.result()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _put(self, path: str, content: bytes) -> None:
        await self._retry.found(lambda: self._site.put(path, content))

    # Imports

    async def bring(self, bundle: str, files: Sequence[LocalFile]) -> dict[str, str]:
        """Import the large ones of `files`, all of one other place, into a bundle's directory.

        Return the names of those that are there, by path.
        """
        large = [*filter(_is_large, files)]
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
        async with self._importing[file.stored]:
            begun = self._ledger.imports(bundle, self._site.name).get(file.path)
            if begun is None and self._failures[file.stored] >= _MOST_FAILURES:
                return ""
            try:
                begun = begun or await self._begin_import(bundle, file)
                if begun is None:
                    self._failures[file.stored] = _MOST_FAILURES
                    return ""
                await self._finish(bundle, file, *begun)
            except (_ImportFailed, MantikError) as error:
                if isinstance(error, _ImportFailed):
                    self._failures[file.stored] += error.failures
                self._ledger.set_import(bundle, file.path)
                self._notify(
                    f"Site {self._site.name} cannot fetch {display_path(file.path)} from the other"
                    f" site's server; it comes {WAYS[Direction.MOVE]}. {str(error).rstrip('.')}."
                )
                return ""
        self._failures[file.stored] = 0
        self._imported.add((file.path, file.sha256))
        return begun[0]

    async def end_imports(self, bundle: str) -> None:
        """End the imports to a bundle that nobody needs any more, as far as the site answers."""
        for _, import_id in self._ledger.imports(bundle, self._site.name).values():
            with suppress(SiteError):
                if import_id:
                    await self._site.end_import(import_id)

    async def _begin_import(self, bundle: str, file: LocalFile) -> tuple[str, str] | None:
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
            self._ledger.set_import(bundle, file.path)
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
        path, failed = imported_path(bundle, name), None
        there = await self._size(path) / file.size
        with self._meter.report(
            [file], self._site.name, Direction.IMPORT, self._notify, there
        ) as arrived:
            try:
                await self._wait(import_id, path, file, arrived)
            except _ImportFailed as error:
                failed = error
        with suppress(SiteError):
            if import_id:
                await self._site.end_import(import_id)
        if failed is not None:
            with suppress(SiteError):
                await self._site.remove(path)
            raise failed

    async def _wait(
        self, import_id: str, path: str, file: LocalFile, arrived: Callable[[float], None]
    ) -> None:
        """Wait until all of an imported file is there.

        Raises:
            _ImportFailed: the import has ended without that, or does not go on any more.
        """
        clock = asyncio.get_running_loop().time
        pause, size, since, over = _FIRST_LOOK_S, 0, clock(), False
        while True:
            await asyncio.sleep(pause)
            state = JobState(Phase.UNKNOWN)
            if import_id and not over:
                try:
                    state = await self._site.import_state(import_id)
                except TRANSIENT:  # what has come counts
                    state = JobState(Phase.RUNNING)
            if state.phase is Phase.ENDED:
                if state.reason is not Reason.SUCCESS:
                    raise _ImportFailed(state.detail)
                over, since = True, clock()  # the file system may show it late
            if (now := await self._size(path)) > size:
                size, since = now, clock()
                arrived(min(size / file.size, 1.0))
            unknown = over or state.phase is Phase.UNKNOWN
            if unknown and now == file.size:
                return
            still = clock() - since
            if unknown and still > (_VISIBLE_S if over else _UNSEEN_S):
                raise _ImportFailed("Not all of it is there")
            if still > _STALLED_S:  # to wait for another one would take as long
                reason = f"Nothing of it has come for {_STALLED_S:.0f} s"
                raise _ImportFailed(reason, _MOST_FAILURES)
            pause = _FIRST_LOOK_S if over else min(pause * 1.5, _LONGEST_LOOK_S)

    async def _size(self, path: str) -> int:
        entry = await self._retry(lambda: self._site.stat(path))
        return 0 if entry is None else entry.size


def _part_name(number: int, count: int) -> str:
    """Return the name of a part; the script counts them by it (`inputs.sh`)."""
    return f"{number + 1:0{_PART_DIGITS}}{_PART}{count:0{_PART_DIGITS}}"


async def _compressed(part: bytes | bytearray) -> bytes:
    return await asyncio.get_running_loop().run_in_executor(_WORKER, compress, part)


async def _joined(chunks: AsyncGenerator[bytes, None]) -> bytes:
    async with aclosing(chunks):
        return b"".join([chunk async for chunk in chunks])


async def _cut(chunks: AsyncGenerator[bytes, None], size: int) -> AsyncGenerator[bytearray, None]:
    """Yield the same bytes in parts of `size`."""
    part = bytearray()
    async with aclosing(chunks):
        async for chunk in chunks:
            begin = 0
            while len(chunk) - begin >= size - len(part):
                end = begin + size - len(part)
                part += chunk[begin:end]
                yield part
                part, begin = bytearray(), end
            part += chunk[begin:]
    if part:
        yield part
