"""Files of the workspace through UNICORE's storage API, and its storages."""

import asyncio
import io
import posixpath
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

from ...common.errors import SiteError, SiteNotFound, SiteRejected, SiteUnreachable, one_line
from ...jobs.paths import OURS, ROOT, is_at
from ...jobs.reasons import Reason
from ..base import Entry, JobState, Phase, SharedFile
from ..http import shorten
from ..rest import repeat_request
from .connection import UnicoreConnection, files_url, last_part, parse_server_time, urls_in
from .jobs import UnicoreJobs

API: Final = "unicore"

LISTING_LIMIT: Final = 10_000
"""Entries to ask for in one request: the most that a server lists of a storage's root.

Elsewhere it lists as many as it is asked for; nothing reads its setting `sms.lsLimit` (unicorex
2.4.0 to 3.1.0, `rest/Files.java`)."""
_WHOLE_PAGE: Final = 100
"""Entries that any server should list at once: the least default of a list in UNICORE's API."""
_MOST_ENTRIES: Final = 1_000_000
"""Maximum number of entries of a directory that are listed, page by page."""

_PIECE_BYTES: Final = 1 << 16
_PRIVATE_FILE: Final = "rw-------"
_PRIVATE_DIRECTORY: Final = "rwx------"
_SHARED_DIRECTORY: Final = "rwxr-x---"
_OCTETS: Final = {"Content-Type": "application/octet-stream"}


_MOST_STORAGES: Final = 200
"""Maximum number of storages searched for the workspace's."""

_QUERY: Final = re.compile(r"(\?|%3[Ff]|;)\S+")
"""The end of a URL, which may grant access to a file."""

_PHASES: Final = {
    "CREATED": Phase.WAITING,
    "RUNNING": Phase.RUNNING,
    "DONE": Phase.ENDED,
    "FAILED": Phase.ENDED,
    "ABORTED": Phase.ENDED,
}


def _hidden(text: str, url: str) -> str:
    """Return a server's text without what grants access to the file at `url`."""
    return _QUERY.sub("?…", text.replace(url, url.partition("?")[0]) if url else text)


class UnicoreFiles(UnicoreJobs):
    """The part of a site that deals with the workspace's files."""

    # Measured: `%`, backslash, newline and tab are refused, a name with a single quote can be
    # written and not read, `$HOME` and `$USER` are replaced.
    refused = re.compile(r"[%'\\$\x00-\x1f\x7f]")
    plain = "Use names without % ' $ backslash and control characters"
    _mounts: dict[str, str] | None = None
    _whole = _WHOLE_PAGE
    """Answers with fewer entries are whole: the server has given as many at once."""

    def _url(self, path: str) -> str:
        return files_url(self._open.storage, self._at(path))

    async def put(self, path: str, content: bytes, *, private: bool = False) -> None:
        """See `Site.put`; a private file is created empty, protected, and then filled.

        A TSI opens it to its group again with each upload (`IO.put_file_chunk`), so it is protected
        once more. Until then a closed directory keeps others out.
        """
        if private:
            await self._upload(path, b"")
            await self._protect(path, _PRIVATE_FILE)
        await self._upload(path, content)
        if private:
            await self._protect(path, _PRIVATE_FILE)

    async def _upload(self, path: str, content: bytes) -> None:
        url, size = self._url(path), len(content)
        headers = {**_OCTETS, "Content-Length": str(size)}
        with io.BytesIO(content) as file:
            await self._connection.ask(
                "upload", "PUT", url, size=size, content=_Pieces(file), headers=headers
            )

    async def _protect(self, path: str, permissions: str) -> None:
        answer = await self._connection.ask(
            "chmod", "PUT", self._url(path), json={"unixPermissions": permissions}
        )
        result = self._connection.json_of(answer).get("permissions")
        if result != "OK":
            raise self._connection.refusal(f"{path} could not be closed to others: {result}")

    async def make_workspace(self) -> None:
        """Make the workspace unless it exists, open to its group if the config says so.

        In a directory that the user made, only our own subdirectory is closed to others.
        """
        for path, made in ((ROOT, "."), (OURS, OURS)):
            if await self.stat(path) is None:
                await self.make_directory(made)
                await self._protect(
                    path,
                    _SHARED_DIRECTORY if self._settings.sharing == "group" else _PRIVATE_DIRECTORY,
                )
                return

    async def get(
        self,
        path: str,
        *,
        offset: int = 0,
        size: int | None = None,  # noqa: ARG002 - one way
    ) -> AsyncIterator[bytes]:
        """See `Site.get`.

        A server may loop for ever if a request starts beyond a file's end, so the size is checked
        first if `offset` is not 0.
        """
        if offset:
            entry = await self._reachable(path, offset)
            if offset == entry.size:
                return
        async with self._connection.download(self._url(path), offset) as (response, chunks):
            self._connection.check_range(response, path, offset)
            async for chunk in chunks:
                yield chunk

    async def list(self, path: str) -> dict[str, Entry]:
        """See `Site.list`: a server says nothing of the entries that it has left out."""
        entries: dict[str, Entry] = {}
        while True:
            page = await self._page(path, len(entries))
            known = len(entries)
            entries.update(page)
            if len(page) < self._whole or len(entries) == known:
                break
            self._whole = len(page)
            if len(entries) > _MOST_ENTRIES:
                raise self._connection.refusal(
                    f"{path} has more than {_MOST_ENTRIES} entries",
                    "Spread them over several directories",
                )
        if len(entries) == known and len(page) == LISTING_LIMIT:
            raise self._connection.refusal(
                f"{path} has more entries than the site lists: {len(page)}",
                "Use a directory below it",
            )
        return entries

    async def _anywhere(self, path: str) -> str:
        """Return the URL path of an absolute path in any storage, or of one in the workspace."""
        if not path.startswith("/"):
            return self._url(path)
        if self._mounts is None:
            self._mounts = await read_mounts(self._connection)
        found = find_storage(self._mounts, path)
        if found is None:
            raise self._connection.refusal(f"no storage of the site holds {path}")
        storage, below = found
        return files_url(storage, below and self._checked(below))

    async def _page(self, path: str, offset: int) -> dict[str, Entry]:
        url = await self._anywhere(path)
        params = {"offset": offset, "num": LISTING_LIMIT}
        answer = await self._connection.get("list", url, params)
        if answer.get("isDirectory") is False:
            raise SiteNotFound(f"{path} is not a directory", where=self._where)
        content = answer.get("content")
        if not isinstance(content, dict):
            raise self._connection.nonsense(url)
        # Its keys are paths, with a slash if directories.
        return {
            (name := last_part(key)): self._entry(name, found) for key, found in content.items()
        }

    async def stat(self, path: str) -> Entry | None:
        try:
            # The answer for a directory lists its entries: one is enough here.
            answer = await self._connection.get("stat", self._url(path), {"num": 1})
        except SiteNotFound:
            return None
        return self._entry(last_part(path), answer)

    def _entry(self, name: str, found: Any) -> Entry:
        with self._connection.parsing(name):
            directory = bool(found["isDirectory"])
            size = 0 if directory else int(found["size"])
            return Entry(name, size, directory, parse_server_time(found["lastAccessed"]))

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        """See `Site.make_directory`.

        After a failure the directory itself is checked, not the server's text: it is "file exists!"
        or the output of `mkdir` in the server's language. If the name has a blank or the like, the
        server makes the directory but fails to build its URL (500, URISyntaxException).
        """
        await repeat_request(lambda: self._make_directory(path))
        if private:
            await self._protect(path, _PRIVATE_DIRECTORY)

    async def _make_directory(self, path: str) -> None:
        try:
            await self._connection.once("mkdir", "POST", self._url(path), json={})
        except (SiteRejected, SiteUnreachable) as error:
            if error.status is None or (entry := await self.stat(path)) is None:
                raise
            if not entry.directory:
                raise self._connection.refusal(
                    f"{path} is a file, so no directory can be made there"
                ) from error

    async def remove(self, path: str) -> None:
        with suppress(SiteNotFound):
            await repeat_request(lambda: self._remove(path))

    async def _remove(self, path: str) -> None:
        try:
            await self._connection.once("remove", "DELETE", self._url(path))
        except SiteUnreachable as error:
            if error.status is None or await self.stat(path) is not None:
                raise

    async def share(self, path: str) -> SharedFile:
        return SharedFile(f"{self._connection.base}{self._url(path)}", API)

    async def start_import(self, source: SharedFile, path: str) -> str:
        body = {"file": self._at(path), "source": source.url}
        url = f"/storages/{quote(self._open.storage, safe='')}/transfers"
        try:
            answer = await self._connection.once("import", "POST", url, json=body)
        except SiteError as error:  # the server may repeat the address
            error.what = _hidden(error.what, source.url)
            raise
        import_id = last_part(answer.headers.get("Location", ""))
        if not import_id:
            raise self._connection.nonsense(url)
        return import_id

    async def import_state(self, import_id: str) -> JobState:
        url = f"/transfers/{import_id}"
        try:
            found = await self._connection.get("import state", url)
        except SiteNotFound:
            return JobState(Phase.UNKNOWN)
        phase = _PHASES.get(str(found.get("status")))
        if phase is None:
            raise self._connection.nonsense(url)
        if phase is not Phase.ENDED:
            return JobState(phase)
        done = found["status"] == "DONE"
        message = str(found.get("statusMessage") or "").removeprefix("NOT_SUCCESSFUL").strip()
        message = shorten(one_line(_hidden(message, str(found.get("source") or ""))))
        return JobState(phase, Reason.SUCCESS if done else Reason.UNKNOWN, message)

    async def end_import(self, import_id: str) -> None:
        with suppress(SiteNotFound):
            await self._connection.ask("end import", "DELETE", f"/transfers/{import_id}")


class _Pieces:
    """A content that is sent piece by piece, each time from its beginning.

    Sent at once, it would be copied several times. Its file is closed afterwards, because requests
    are part of cycles, and live on for long.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._file.seek(0)
        while piece := self._file.read(_PIECE_BYTES):
            yield piece


async def read_mounts(connection: UnicoreConnection) -> dict[str, str]:
    """Return the mount points of the storages that have one."""
    answer = await connection.get("storages", "/storages", {"num": _MOST_STORAGES})
    names = [last_part(url) for url in urls_in(answer, "storages")]
    answers = await asyncio.gather(*(read_storage(connection, name) for name in names))
    return {
        name: mount_of(connection, found)
        for name, found in zip(names, answers, strict=True)
        if str(found.get("mountPoint", "")).startswith("/")
    }


async def read_storage(
    connection: UnicoreConnection, name: str, fields: str = "mountPoint,resourceStatus"
) -> dict[str, Any]:
    """Return properties of a storage."""
    path = f"/storages/{quote(name, safe='')}"
    return await connection.get("storages", path, {"fields": fields})


def mount_of(connection: UnicoreConnection, answer: Mapping[str, Any]) -> str:
    """Return the mount point in a storage's properties."""
    mount = answer.get("mountPoint")
    if not isinstance(mount, str) or not mount.startswith("/"):
        raise connection.nonsense("a storage")
    return mount


def find_storage(mounts: Mapping[str, str], workspace: str) -> tuple[str, str] | None:
    """Find the storage that holds the absolute path `workspace`, and the path below its mount.

    `mounts` has the absolute mount points by storage. Returns None if no storage holds the
    workspace; of several, the one mounted deepest, but rather above the workspace than at it.
    """
    workspace = posixpath.normpath(workspace)
    roots = {storage: posixpath.normpath(mount) for storage, mount in mounts.items()}
    holding = [name for name, root in roots.items() if is_at(workspace, root.rstrip("/"))]
    if not holding:
        return None
    storage = max(holding, key=lambda each: (roots[each] != workspace, len(roots[each])))
    return storage, workspace.removeprefix(roots[storage]).strip("/")
