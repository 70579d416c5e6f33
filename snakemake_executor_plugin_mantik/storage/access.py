"""Reach the places where outputs are stored.

Snakemake asks for remote outputs while it builds its graph of jobs, before there is an engine, and
in runs that need none.
"""

import asyncio
import fnmatch
import os
import posixpath
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..common.errors import MantikError, SiteNotFound, UserError
from ..common.state_directory import STATE
from ..connections.connect import find_config, open_site_again
from ..engine.compare import MOST_DIRECTORIES, Looks, Sight, list_targets
from ..engine.messages import lost_error
from ..engine.place import make_retry
from ..jobs.paths import OURS
from ..journal import FileRecord, RemoteOutput, SiteRecord, content_name, read_stored
from ..sites.base import Entry, is_rest_safe
from ..sites.credentials import find_account
from ..staging.transfers import download_file
from .paths import workspace_path

if TYPE_CHECKING:
    from ..engine.core import Engine

_T = TypeVar("_T")


class Access:
    """Connections to places, made when they are first needed. Safe to use from any thread.

    While an engine runs in this process, its event loop and clients serve all places that it has
    opened.
    """

    def __init__(self, workdir: Path, notify: Callable[[str], None]) -> None:
        """Make it for the workflow in `workdir`, whose journal knows the places.

        `notify` writes a line to the user's log.
        """
        self.workdir = workdir
        self.notify = notify
        self._known_sites: dict[str, SiteRecord] = {}
        self._opening: dict[str, asyncio.Task[Looks]] = {}
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def use(self, engine: "Engine | None") -> None:
        """Reach the places that an engine has opened through it from now on, or no longer."""
        self._engine = engine

    def list(self, place: str, directory: str, paths: Iterable[str] = ()) -> dict[str, Entry]:
        """Return the entries of a directory at a place by name; none if it does not exist.

        Of those `paths` in it that are symbolic links, return their targets' entries.
        """

        async def act(there: Looks) -> dict[str, Entry]:
            return await there.retry.listed(lambda: list_targets(there.site, directory, paths))

        return self._at(place, act)

    def look(self, place: str, directory: str, files: Sequence[FileRecord]) -> Sight | None:
        """Look at stored files in a directory of a place; see `engine.compare.Looks.at`."""
        return self._at(place, lambda there: there.at(directory, files))

    def uncarried(self, output: RemoteOutput) -> Sequence[str]:
        """Return the paths of those files of an output that the API of its site cannot carry."""
        odd = [f.path for f in output.files if f.sha256 and not is_rest_safe(f.path)]

        async def act(there: Looks) -> Sequence[str]:
            return [path for path in odd if not there.site.can_carry(path)]

        return self._at(output.place, act) if odd else odd

    def remove(self, place: str, path: str) -> None:
        self._at(place, lambda there: there.retry(lambda: there.site.remove(path)))

    def download(
        self, place: str, files: Iterable[tuple[str, Path, int, str]], came: Callable[[int], object]
    ) -> None:
        """Download files: the path at the place, the local path, the size and the checksum of each.

        `came` is called with the number of bytes that have come since the last call.

        Raises:
            MantikError: a file is not there any more, or another one.
            OSError: a file cannot be written here.
        """

        async def one(there: Looks, path: str, target: Path, size: int, sha256: str) -> None:
            here = 0

            def arrived(now: int) -> None:
                nonlocal here
                came(now - here)
                here = now

            try:
                await download_file(
                    there.site, path, target, size=size, sha256=sha256,
                    repeat=there.retry.insist, arrived=arrived,
                )  # fmt: skip
            except SiteNotFound as error:
                raise lost_error(path, f"site {there.site.name}") from error

        async def act(there: Looks) -> None:
            await asyncio.gather(*(one(there, *file) for file in files))

        self._at(place, act)

    def name(self, place: str) -> str:
        """Return the name of the site at which a place was last used; its identity if unknown."""
        sites = self._sites(lambda known: any(site.place == place for site in known.values()))
        return next((site.site for site in sites.values() if site.place == place), place)

    def place(self, name: str) -> str | None:
        """Return the place that a site was last used with; None if no run has used it."""
        site = self._sites(lambda known: name in known).get(name)
        return site.place if site is not None else None

    def places(self, name: str = "") -> Sequence[str]:
        """Return the places that runs have used, or that of one site.

        Raises:
            UserError: no run has used the site.
        """
        sites = self._sites(bool)
        if name and name not in sites:
            raise UserError(
                f"no job was submitted to a site named {name}",
                where="--site",
                do=f"Use one of the workflow's sites: {', '.join(sites) or 'none'}",
            )
        used = [site for site in sites.values() if name in ("", site.site)]
        return tuple(dict.fromkeys(site.place for site in used if site.place))

    def _sites(self, suffice: Callable[[Mapping[str, SiteRecord]], bool]) -> dict[str, SiteRecord]:
        """Return the sites that runs have used; read them again unless the known ones suffice."""
        if not suffice(self._known_sites):
            self._known_sites = dict(read_stored(self.workdir / STATE).sites)
        return self._known_sites

    def close(self) -> None:
        """Close the connections that the engine has not made."""
        if self._loop is None:
            return
        opening, self._opening = self._opening, {}

        async def close() -> None:
            for task in opening.values():
                if task.done() and task.exception() is None:
                    await task.result().site.close()

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def _at(self, identity: str, act: Callable[[Looks], Coroutine[Any, Any, _T]]) -> _T:
        """Return the result of `act` at a place."""
        engine = self._engine
        place = engine.places.known(identity) if engine is not None else None
        if engine is not None and place is not None:
            return engine.run(act(place.looks))

        async def acted() -> _T:
            return await act(await self._reach(identity))

        return self._run(acted())

    def _run(self, what: Coroutine[Any, Any, _T]) -> _T:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    async def _reach(self, place: str) -> Looks:
        known = self._opening.get(place)
        if known is None or (known.done() and known.exception() is not None):
            known = self._opening[place] = asyncio.create_task(self._open(place))
        return await known

    async def _open(self, place: str) -> Looks:
        known = await asyncio.to_thread(lambda: read_stored(self.workdir / STATE))
        failed: MantikError | None = None
        for record in known.sites.values():
            if record.place == place and Path(record.config).is_file():
                name = record.site
                try:
                    loaded = await asyncio.to_thread(find_config, record, name)
                    account = find_account(name, os.environ)
                    site = await open_site_again(name, loaded, self.workdir, account)
                    return Looks(site, place, make_retry(site, self.notify), MOST_DIRECTORIES)
                except MantikError as error:  # another site may see the same place
                    failed = failed or error
        raise failed or UserError(
            "no backend config is known for the place of a remote output",
            where=str(self.workdir),
            do="Run the workflow with the backend config of its site",
        )


_OWN = frozenset({OURS, ".snakemake"})
_MOST_DIRECTORIES = 200
"""Most directories of a place that are listed to find files."""


def find_workspace_files(access: Access, name: str, site: str = "") -> list[RemoteOutput]:
    """Return the files at `name`, or in the directory `name`, in all workspaces or one site's.

    The last part of `name` may be a pattern of the shell. Each file is returned in the form of an
    output without a checksum.

    Raises:
        UserError: the path is one of the executor's own, leads out of the workspace, or stands for
            too many directories.
        SiteError: a site does not answer.
    """
    path = workspace_path(name, access.workdir)
    if path.split("/")[0] in _OWN and name == path:
        raise UserError(
            f"{name} is no file of the workflow", where="smk-mantik get",
            do="Name files below the working directory, relative to it",
        )  # fmt: skip
    return [file for place in access.places(site) for file in _find_at(access, place, path)]


def _find_at(access: Access, place: str, path: str) -> Iterator[RemoteOutput]:
    """Yield the files at `path`, or below it, at one place."""
    folder, last = posixpath.split(path)
    entries = access.list(place, folder or ".", [path])
    exact = entries.get(last)
    like = [e for e in entries.values() if fnmatch.fnmatchcase(e.name, last) and e.name[:1] != "."]
    found = [exact] if exact is not None else like
    waiting = [(folder, entry) for entry in found]
    listed = 0
    while waiting:
        folder, entry = waiting.pop()
        below = posixpath.join(folder, entry.name)
        if not entry.directory:
            yield as_output(folder, entry, place)
        elif entry.name not in _OWN and not entry.link:
            listed += 1
            if listed > _MOST_DIRECTORIES:
                raise UserError(
                    f"there are more than {_MOST_DIRECTORIES} directories below {path}",
                    where=f"site {access.name(place)}",
                    do="Name one of them",
                )
            inside = access.list(place, below)
            waiting += [(below, inside[name]) for name in sorted(inside, reverse=True)]


def as_output(folder: str, entry: Entry, place: str) -> RemoteOutput:
    """Return a file in a directory of a place in the form of an output without a checksum."""
    path = posixpath.join(folder, entry.name)
    name = content_name("", entry.size, entry.modified)
    record = FileRecord(path, entry.size, name, modified=entry.modified or 1.0, mode=0o644)
    return RemoteOutput(path, place, False, entry.modified, "", (record,))
