"""Files of the workspace through UNICORE's storage API."""

import io
from collections.abc import AsyncIterator
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import (
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.paths import OURS, ROOT

from ..answers import MALFORMED
from ..base import Entry
from .connection import UnicoreConnection
from .opening import parse_server_time, read_mounts
from .paths import StoragePaths, find_storage

LISTING_LIMIT: Final = 10_000
"""Entries that a server returns in one answer, unless its SMS_LS_LIMIT is another one."""
_WHOLE_PAGE: Final = 100
"""Entries that any server returns in one answer: the least default of a list in UNICORE's API."""
_MOST_ENTRIES: Final = 1_000_000
"""Maximum number of entries of a directory that are listed, page by page."""

_PIECE_BYTES: Final = 1 << 16
_PRIVATE_FILE: Final = "rw-------"
_PRIVATE_DIRECTORY: Final = "rwx------"
_SHARED_DIRECTORY: Final = "rwxr-x---"
_OCTETS: Final = {"Content-Type": "application/octet-stream"}


class UnicoreFiles:
    """The workspace's files."""

    def __init__(self, connection: UnicoreConnection, paths: StoragePaths, site: str) -> None:
        self._connection = connection
        self._paths = paths
        self._site = site
        self._mounts: dict[str, str] | None = None
        # Answers with fewer entries were seen to be whole, whatever the server's limit is.
        self._whole = _WHOLE_PAGE

    async def put(self, path: str, content: bytes, *, private: bool) -> None:
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
        url, size = self._paths.url(path), len(content)
        headers = {**_OCTETS, "Content-Length": str(size)}
        with io.BytesIO(content) as file:
            body = _Pieces(file)
            await self._connection.repeat(
                lambda: self._connection.once(
                    "upload", "PUT", url, size=size, content=body, headers=dict(headers)
                )
            )

    async def _protect(self, path: str, permissions: str) -> None:
        answer = await self._connection.ask(
            "chmod", "PUT", self._paths.url(path), json={"unixPermissions": permissions}
        )
        result = self._connection.json_of(answer).get("permissions")
        if result != "OK":
            raise SiteRejected(
                f"{path} could not be closed to others: {result}", where=f"site {self._site}"
            )

    async def make_workspace(self, *, shared: bool) -> None:
        """Make the workspace unless it exists, open to its group if `shared`.

        In a directory that the user made, only our own subdirectory is closed to others.
        """
        for path, made in ((ROOT, "."), (OURS, OURS)):
            if await self.stat(path) is None:
                await self.make_directory(made)
                await self._protect(path, _SHARED_DIRECTORY if shared else _PRIVATE_DIRECTORY)
                return

    async def get(self, path: str, offset: int) -> AsyncIterator[bytes]:
        """See `Site.get`.

        A server may loop for ever if a request starts beyond a file's end, so the size is checked
        first if `offset` is not 0.
        """
        if offset:
            entry = await self.stat(path)
            if entry is None:
                raise SiteNotFound(f"there is no file {path}", where=f"site {self._site}")
            if offset > entry.size:
                raise SiteRejected(
                    f"{path} has {entry.size} bytes, less than {offset}",
                    where=f"site {self._site}",
                )
            if offset == entry.size:
                return
        async with self._connection.download(self._paths.url(path), offset) as (response, chunks):
            if response.status_code != (206 if offset else 200):
                raise SiteUnreachable(
                    f"{path}: status {response.status_code} instead of its bytes from {offset} on",
                    where=f"site {self._site}",
                    status=response.status_code,
                )
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
                raise SiteRejected(
                    f"{path} has more than {_MOST_ENTRIES} entries",
                    where=f"site {self._site}",
                    do="Spread them over several directories",
                )
        if len(entries) == known and len(page) == LISTING_LIMIT:
            raise SiteRejected(
                f"{path} has more entries than the site lists: {len(page)}",
                where=f"site {self._site}",
                do="Use a directory below it",
            )
        return entries

    async def _anywhere(self, path: str) -> str:
        """Return the URL path of an absolute path in any storage, or of one in the workspace."""
        if not path.startswith("/"):
            return self._paths.url(path)
        if self._mounts is None:
            self._mounts = await read_mounts(self._connection)
        found = find_storage(self._mounts, path)
        if found is None:
            raise SiteRejected(f"no storage of the site holds {path}", where=f"site {self._site}")
        storage, below = found
        return StoragePaths(self._site, storage, "").url(below)

    async def _page(self, path: str, offset: int) -> dict[str, Entry]:
        url = await self._anywhere(path)
        params = {"offset": offset, "num": LISTING_LIMIT}
        answer = await self._connection.get("list", url, params)
        if answer.get("isDirectory") is False:
            raise SiteNotFound(f"{path} is not a directory", where=f"site {self._site}")
        content = answer.get("content")
        if not isinstance(content, dict):
            raise self._connection.nonsense(url)
        return {name: self._entry(name, found) for name, found in _named(content)}

    async def stat(self, path: str) -> Entry | None:
        try:
            # The answer for a directory lists its entries: one is enough here.
            answer = await self._connection.get("stat", self._paths.url(path), {"num": 1})
        except SiteNotFound:
            return None
        return self._entry(path.rsplit("/", 1)[-1], answer)

    def _entry(self, name: str, found: Any) -> Entry:
        try:
            directory = bool(found["isDirectory"])
            size = 0 if directory else int(found["size"])
            return Entry(name, size, directory, parse_server_time(found["lastAccessed"]))
        except MALFORMED as error:
            raise self._connection.nonsense(name) from error

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        """See `Site.make_directory`.

        After a failure the directory itself is checked, not the server's text: it is "file exists!"
        or the output of `mkdir` in the server's language. If the name has a blank or the like, the
        server makes the directory but fails to build its URL (500, URISyntaxException).
        """
        await self._connection.repeat(lambda: self._make_directory(path))
        if private:
            await self._protect(path, _PRIVATE_DIRECTORY)

    async def _make_directory(self, path: str) -> None:
        try:
            await self._connection.once("mkdir", "POST", self._paths.url(path), json={})
        except (SiteRejected, SiteUnreachable) as error:
            if error.status is None or (entry := await self.stat(path)) is None:
                raise
            if not entry.directory:
                raise SiteRejected(
                    f"{path} is a file, so no directory can be made there",
                    where=f"site {self._site}",
                    status=error.status,
                ) from error

    async def remove(self, path: str) -> None:
        try:
            await self._connection.repeat(lambda: self._remove(path))
        except SiteNotFound:
            return

    async def _remove(self, path: str) -> None:
        try:
            await self._connection.once("remove", "DELETE", self._paths.url(path))
        except SiteUnreachable as error:
            if error.status is None or await self.stat(path) is not None:
                raise


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


def _named(content: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return a listing's entries by bare name; UNICORE's are paths, with a slash if directories."""
    return [(path.rstrip("/").rsplit("/", 1)[-1], found) for path, found in content.items()]
