"""Stage in: upload what a job needs and the workspace lacks; large files only once."""

import asyncio
import posixpath
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..common.errors import SiteNotFound, SiteRejected, UserError
from ..jobs.paths import KEPT, bundle_path, display_path, nearest, number_path
from ..jobs.spec import InputFile
from ..journal import MADE, FileLedger, FileRecord, WriteConflict, is_checksum
from ..sites.base import is_rest_safe
from ..staging.bundle import Fetch, FileChanged, pack
from ..staging.local import LocalFile, LocalFiles
from ..staging.transfers import read_file
from .compare import Looks, by_directory
from .leases import latest_term
from .messages import lost_error, stays_message
from .upload import Share, Uploader
from .workflow_context import PlaceContext

_NUMBERS = 10**9
"""Size of the range of content numbers of each term."""
_NUMBER_BYTES = 64
_MOST_LOOKED_AT = 100
"""Most inputs that a job has missed whose numbers are read at once."""
UNSTEADY = 3
"""How often a project file may change during its upload before it is left out."""
_COMPRESSION = 4
"""Highest expected compression ratio; files that are too large even so are not packed inline."""


@dataclass(frozen=True)
class Staged:
    """The files that a job's script unpacks and checks before its command starts.

    Attributes:
        bundles: uploaded bundles that the job unpacks unless another job already has.
        inline: a bundle inside the script.
        carried: the files in `inline`.
        inputs: the files that must be in the workspace after unpacking.
        numbers: by path, the numbers of the contents in `bundles` and `inline` that have one.
    """

    bundles: tuple[str, ...]
    inline: bytes
    carried: tuple[FileRecord, ...]
    inputs: tuple[InputFile, ...]
    numbers: Mapping[str, int] = field(default_factory=dict)


class Holdings:
    """What one place holds, as far as the journal knows: files, and bundles to be unpacked."""

    def __init__(self, place: str, ledger: FileLedger) -> None:
        self._place = place
        self._ledger = ledger
        self._uploads: dict[str, asyncio.Task[str]] = {}

    def lacking(self, files: Iterable[LocalFile]) -> list[LocalFile]:
        """Return those of `files` that neither the place nor a bundle there has."""
        return self._split_pending(self._missing(files))[1]

    def _missing(self, files: Iterable[LocalFile]) -> list[LocalFile]:
        """Return the files that the place lacks, and those that a job may still overwrite there."""
        return [
            f
            for f in files
            if f.stored != self._place and (not self._there(f) or self.conflicts(f.path, f.sha256))
        ]

    def _there(self, file: LocalFile) -> bool:
        known = self._ledger.remote_file(self._place, file.path)
        return known is not None and (known.size, known.sha256) == (file.size, file.sha256)

    def conflicts(self, path: str, sha256: str = MADE) -> list[WriteConflict]:
        return self._ledger.conflicts(self._place, path, sha256)

    def _split_pending(self, missing: Sequence[LocalFile]) -> tuple[list[str], list[LocalFile]]:
        """Return the pending bundles that hold some of the missing files, and the other files."""
        bundles, fresh = [], []
        for file in missing:
            for bundle, uploaded in self._ledger.bundles_with(self._place, file.path, file.sha256):
                if uploaded or bundle in self._uploads:
                    bundles.append(bundle)
                    break
            else:
                fresh.append(file)
        return bundles, fresh


class Stager(Holdings):
    """Upload the files that one place lacks.

    A file counts as present when a job has reported unpacking or making it. Until then, small
    files travel in the script of each job that needs them, and large ones in one uploaded bundle
    that each such job names.

    Attributes:
        uploader: uploads bundles to the place.
        project_files: those that it has uploaded, by path.
    """

    def __init__(
        self,
        at: PlaceContext,
        local: LocalFiles,
        *,
        fetch: Fetch,
        share: Share,
        limit: int,
        term: int = 1,
    ) -> None:
        """Make it for a controller that leads the place for the `term`-th time.

        `fetch` reads files that are stored at other places, `share` lets the site fetch large ones
        of these itself, and `limit` is the most bytes that the site takes in one request.
        """
        super().__init__(at.id, at.workflow.journal.files)
        # Numbers given in earlier terms are unknown: start above them.
        self._floor = _NUMBERS * (term - 1)
        self._local = local
        self._site, self._retry = at.site, at.retry
        self._uses, self._notify = at.workflow.journal.uses, at.workflow.notify
        self.uploader = Uploader(at, fetch, share, limit)
        self._old: dict[str, list[FileRecord]] = {}
        self._comparing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._distrust()
        self.project_files: dict[str, LocalFile] = {}
        self._project_file_bundles: set[str] = set()
        self._project_files_lost = False
        self._numbered: dict[str, dict[str, int]] = {}
        self._sending = asyncio.Lock()

    def _distrust(self) -> None:
        """Require that each record of the manifest is compared with the site before it counts."""
        self._old = by_directory(self._ledger.remote_files(self._place))
        self._looks = Looks(self._site, self._place, self._retry)

    async def send_project_files(self, paths: Iterable[str]) -> None:
        """Upload the project files; keep those uploaded for other site names.

        `paths` are relative to the working directory.

        Raises:
            MantikError: they cannot be uploaded.
        """
        async with self._sending:
            wanted = dict.fromkeys([*self.project_files, *paths])
            if not self.project_files or len(wanted) > len(self.project_files):
                await self._send_project_files(wanted)

    async def look_again(self, path: str) -> None:
        """Read a project file again that may have changed: jobs that name it bring it anew."""
        if path in self.project_files:
            with suppress(UserError):  # it is gone
                for file in await self._local.look_at([(path, None)], project=True):
                    self.project_files[file.path] = file

    async def _send_project_files(self, paths: Iterable[str]) -> None:
        """Upload the project files, except those that keep changing, such as logs."""
        left = dict.fromkeys(paths, UNSTEADY)
        while True:
            files = await self._local.look_at([(path, None) for path in left], project=True)
            try:
                return await self._send(files)
            except FileChanged as error:
                left[error.path] -= 1
                if not left[error.path]:
                    del left[error.path]
                    self._notify(
                        f"Not uploading {display_path(error.path)}, which changes all the"
                        " time; add it to Exclude in the backend config to silence this line."
                    )

    async def _send(self, project_files: Sequence[LocalFile]) -> None:
        """Upload new project files in one bundle.

        Remove those that no longer exist here from the site, so that no job imports them, and
        bundles with outdated ones. One that the command of an open attempt names stays.
        """
        # Where an output stays at a place, what lies here under its name is no project file.
        project_files = [f for f in project_files if not self._ledger.is_stored(f.path, here=False)]
        here = {file.path: file.sha256 for file in project_files}
        await self._withdraw(
            bundle
            for bundle, files in self._ledger.uploaded_bundles(self._place).items()
            if any(file.project and here.get(file.path) != file.sha256 for file in files)
        )
        known = self._ledger.remote_files(self._place)
        gone = [file.path for file in known if file.project and file.path not in here]
        for path in [path for path in gone if (users := self._uses.of(self._place, path))]:
            gone.remove(path)
            stays = stays_message(self._site.name, users)
            self._notify(
                f"Project files: {display_path(path)} is gone on this machine, but {stays}"
            )
        for path in gone:
            if is_rest_safe(path):
                await self._retry(lambda path=path: self._site.remove(path))  # type: ignore[misc]
        self._ledger.forget_remote_files(self._place, gone)
        await self.compare(project_files)
        missing = [file for file in project_files if not self._there(file)]
        pending, fresh = self._split_pending(missing)
        self._project_file_bundles = set(pending)
        if fresh:
            self._project_file_bundles.add(await self._upload(fresh))
        self.project_files = {file.path: file for file in project_files}
        self._project_files_lost = False

    async def stage(
        self,
        files: Sequence[LocalFile],
        named: Sequence[str],
        makes: Iterable[str] = (),
        own: Sequence[LocalFile] = (),
        *,
        inline_limit: int,
        free: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> Staged:
        """Upload those of `files` that are missing, or pack them for the script.

        Args:
            files: all files that the job needs, directories already walked; also those that are
                stored at this place, or at another one, from which they are brought.
            named: the inputs' paths as the rule names them, directories included.
            makes: paths of the job's outputs, or of the directories that it writes to.
            own: small files for the script that only this attempt needs.
            inline_limit: largest packed bundle for the script, in bytes.
            free: returns when nobody uses some paths any more, so that they can be removed; None to
                leave what is in use.
        """
        async with self._sending:
            if self._project_files_lost:
                await self._send_project_files(self.project_files)
        await self._withdraw(self._outdated_bundles(files, makes))
        await self.compare(files)
        await self._clear(files, named, free)
        self._require_stored(files)
        missing = self._missing(files)
        bundles, fresh = await self._send_moved(missing)
        inline, carried = b"", tuple[FileRecord, ...]()
        if fresh and sum(file.size for file in fresh) <= _COMPRESSION * inline_limit:
            packed = await asyncio.to_thread(pack, [*fresh, *own])
            if len(packed) <= inline_limit:
                inline, carried = packed, tuple(file.record for file in fresh)
            else:
                # Another job may have begun to upload some of them during the packing.
                bundles, fresh = await self._send_moved(missing)
        if fresh and not inline:
            bundles.append(await self._upload(fresh))
        if own and not inline:
            inline = pack(own)  # in memory already
        needed = tuple(dict.fromkeys([*sorted(self._project_file_bundles), *bundles]))
        await asyncio.gather(*(self._uploads[b] for b in needed if b in self._uploads))
        return Staged(
            needed, inline, carried, _checks([*files, *own], named, makes, self._place),
            self._numbers(carried, needed),
        )  # fmt: skip

    async def find_lacking(self, files: Sequence[LocalFile]) -> list[LocalFile]:
        """Return those of `files` that neither the place nor a bundle there has.

        Remove bundles with other contents of `files`.
        """
        await self._withdraw(self._outdated_bundles(files, ()))
        await self._find_kept()
        await self.compare(files)
        return self.lacking(files)

    async def keep(self, files: Sequence[LocalFile], report: Callable[[float], None]) -> None:
        """Upload files in a bundle that stays until a job unpacks it; see `Uploader.send`."""
        await self._upload(files, report, keep=True)

    async def _find_kept(self) -> None:
        """Compare the kept bundles of earlier runs with the site: centres purge scratch."""
        kept = [b for b in self._ledger.uploaded_bundles(self._place) if b.startswith(KEPT)]
        if kept:
            directory = posixpath.dirname(bundle_path(kept[0]))
            there = await self._retry.listed(lambda: self._site.list(directory))
            self.gone([b for b in kept if posixpath.basename(bundle_path(b)) not in there])

    async def _send_moved(self, missing: Sequence[LocalFile]) -> tuple[list[str], list[LocalFile]]:
        """Upload what comes from other places; return the bundles, and the files of this machine.

        The bundles include pending ones that hold some of these.
        """
        bundles, fresh = self._split_pending(missing)
        moved: dict[str, list[LocalFile]] = defaultdict(list)
        for file in fresh:
            if file.stored:
                moved[file.stored].append(file)
        bundles += await asyncio.gather(*map(self._upload, moved.values()))
        return bundles, [file for file in fresh if not file.stored]

    def _require_stored(self, files: Iterable[LocalFile]) -> None:
        """Check that the remote outputs among `files` are still there."""
        for file in files:
            if file.stored == self._place and not self._there(file):
                raise lost_error(file.path, f"site {self._site.name}")

    def _numbers(self, carried: Iterable[FileRecord], bundles: Iterable[str]) -> dict[str, int]:
        """Return the numbers of a job's contents by path, for those that have one."""
        numbers: dict[str, int] = {}
        for bundle in bundles:
            if bundle not in self._numbered:
                self._numbered[bundle] = self._number(self._ledger.bundle_files(bundle))
            numbers |= self._numbered[bundle]
        return numbers | self._number(carried)

    def _number(self, files: Iterable[FileRecord]) -> dict[str, int]:
        number = self._ledger.number
        numbers = {f.path: number(self._place, f.path, f.sha256, self._floor) for f in files}
        return {path: number for path, number in numbers.items() if number}

    async def _clear(
        self,
        files: Sequence[LocalFile],
        named: Sequence[str],
        free: Callable[[Sequence[str]], Awaitable[None]] | None,
    ) -> None:
        """Remove files that no longer exist here from directories that a job reads."""
        here = {file.path for file in files}
        gone: list[str] = []
        links: set[str] = set()
        for directory in named:
            if directory not in here:
                known = self._ledger.remote_files(self._place, below=directory)
                gone += [
                    f.path
                    for f in known
                    if f.path not in here and not f.stored and is_rest_safe(f.path)
                ]
                links.update(self._ledger.links(directory))
        # A job's link, or behind one: its target must stay.
        removed = [path for path in gone if nearest(path, links) is None]
        if free is not None:
            await free(removed)
        else:
            held = {path for path in removed if self._uses.of(self._place, path)}
            removed, gone = ([p for p in paths if p not in held] for paths in (removed, gone))
        for path in removed:
            await self._retry(lambda path=path: self._site.remove(path))  # type: ignore[misc]
        self._ledger.forget_remote_files(self._place, gone)

    def _outdated_bundles(self, files: Sequence[LocalFile], makes: Iterable[str]) -> Iterator[str]:
        """Yield pending bundles with other contents of `files`, or with outputs of the job."""
        contents = dict.fromkeys(makes, MADE) | {f.path: f.sha256 for f in files}
        for path, sha256 in contents.items():
            yield from (conflict.id for conflict in self.conflicts(path, sha256) if conflict.bundle)

    def confirm(self, staged: Staged) -> None:
        """Record that a job has unpacked `staged`."""
        files = list(staged.carried)
        for bundle in staged.bundles:
            if held := self._ledger.bundle_files(bundle):
                files += held
                self._ledger.set_bundle(bundle, "unpacked")
            self._project_file_bundles.discard(bundle)
        # The job skipped files of which the workspace had newer contents.
        files = [f for f in files if not self._ledger.superseded(self._place, f)]
        self._ledger.set_remote_files(self._place, files)

    def gone(self, bundles: Sequence[str]) -> None:
        """Record that bundles are gone; their files are uploaded again."""
        for bundle in bundles:
            if bundle in self._project_file_bundles:
                self._project_file_bundles.discard(bundle)
                self._project_files_lost = True
            self._ledger.set_bundle(bundle, "unpacked")

    def purged(self) -> None:
        """Note that the workspace has lost files.

        Records are compared with the site again before they count; what pending bundles hold, and
        the project files, are uploaded again.
        """
        self._distrust()
        self.gone(list(self._ledger.uploaded_bundles(self._place)))
        self._project_files_lost = True

    async def missed(self, paths: Sequence[str]) -> None:
        """Note inputs that a job has not found with their contents, although these were sent.

        Another content may lie there with a greater number: a controller of which nothing is known
        any more has sent it.
        """
        looked = paths[:_MOST_LOOKED_AT]
        floors = await asyncio.gather(*map(self._number_there, looked))
        self._ledger.outnumber(self._place, dict(zip(looked, floors, strict=True)))
        self._numbered.clear()
        self.lost(paths)

    async def _number_there(self, path: str) -> int:
        """Return the number of the content that lies there, or a greater one; 0 if it has none."""
        mark = number_path(path)
        with suppress(SiteRejected):
            if is_rest_safe(path):
                try:
                    return int(
                        await self._retry(lambda: read_file(self._site, mark, _NUMBER_BYTES))
                    )
                except (SiteNotFound, ValueError):
                    return 0
        return _NUMBERS * latest_term()

    def lost(self, paths: Sequence[str]) -> None:
        """Forget the records of these paths and of all paths below them.

        No bundle brings the paths themselves any more, either: one that held them is unpacked.
        """
        self.uploader.doubt(paths)
        there = self._ledger.remote_files_at(self._place, paths)
        self._ledger.forget_remote_files(self._place, [file.path for file in there])
        self._ledger.forget_bundled_files(self._place, paths)

    async def _withdraw(self, bundles: Iterable[str]) -> None:
        """Remove bundles that hold outdated contents.

        A job that unpacked one late would overwrite the new content with the old one. A waiting job
        that needs the bundle finds it gone, and is submitted again.
        """
        for bundle in dict.fromkeys(bundles):
            if bundle in self._uploads:  # what has not come cannot be removed
                await asyncio.wait([self._uploads[bundle]])
            await self.uploader.end_imports(bundle)
            self._ledger.landed(bundle)
            self.gone([bundle])
            path = bundle_path(bundle)
            await self._retry(lambda path=path: self._site.remove(path))  # type: ignore[misc]

    def _upload(
        self,
        files: Sequence[LocalFile],
        report: Callable[[float], None] | None = None,
        *,
        keep: bool = False,
    ) -> asyncio.Task[str]:
        """Begin to upload one bundle of `files`: other jobs that need it wait for the task."""
        bundle = self.uploader.begin(files, keep=keep)
        task = asyncio.create_task(self.uploader.send(bundle, files, report))
        self._uploads[bundle] = task
        task.add_done_callback(lambda _: self._uploads.pop(bundle, None))
        return task

    async def compare(self, files: Sequence[LocalFile]) -> None:
        """Compare the manifest's records from earlier runs with the site, once per directory.

        Centres purge scratch. Records below directories whose names the file API cannot carry are
        dropped.
        """
        named = dict.fromkeys(posixpath.dirname(file.path) for file in files)
        await asyncio.gather(*(self._compare(each) for each in named if each in self._old))

    async def _compare(self, directory: str) -> None:
        async with self._comparing[directory]:  # of many jobs the first one does it
            if (files := self._old.get(directory)) is None:
                return
            sight = None
            with suppress(SiteRejected):
                sight = await self._looks.at(directory, files)
            lost = [
                file.path
                for file in files
                # Without a look, the scripts of jobs that read remote outputs compare them.
                if (not file.stored if sight is None else sight.lacks(file))
                # A file that a job of this run made meanwhile has a newer record.
                and (now := self._ledger.remote_file(self._place, file.path)) == file
                and now.modified == file.modified
            ]
            self._ledger.forget_remote_files(self._place, lost)
            if self._old.get(directory) is files:
                del self._old[directory]


def _checks(
    files: Sequence[LocalFile], named: Sequence[str], makes: Iterable[str], place: str
) -> tuple[InputFile, ...]:
    """Return the inputs that a job at `place` checks before its command starts.

    `changed` marks inputs that the job itself may change.
    """
    made = dict.fromkeys(makes)
    contents = {file.path: file for file in files if not file.directory}
    checks = [
        InputFile(
            path,
            file.size,
            sha256=file.sha256 if is_checksum(file.sha256) else "",
            changed=nearest(path, made) is not None,
            moved=file.stored not in ("", place),
        )
        for path, file in contents.items()
    ]
    checks += [InputFile(path, directory=True) for path in named if path not in contents]
    return tuple(checks)
