"""Files of the workspace through firecREST's file API: each request is a command over ssh."""

import asyncio
import re
import stat
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import (
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.paths import OURS, ROOT

from ..answers import MALFORMED
from ..base import Entry
from ..request_policy import repeat_request
from .answers import COMMAND_TIMEOUT, TOO_LARGE, malformed_answer
from .connection import FirecrestConnection
from .opening import FirecrestSystem, local_time, zone_offset
from .script import JOBS, WorkspacePaths, parent_directory
from .transfers import FirecrestTransfers

_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


class FirecrestFiles:
    """The workspace's files."""

    def __init__(
        self,
        connection: FirecrestConnection,
        system: FirecrestSystem,
        paths: WorkspacePaths,
        transfers: FirecrestTransfers,
    ) -> None:
        self._connection = connection
        self._system = system
        self._paths = paths
        self._transfers = transfers
        self._where = f"site {connection.site}"
        self._zone = 0.0
        self._made: set[str] = set()
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Downloads are base64 in a buffer of the size that uploaded files may have.
        self._down_bytes = system.direct_bytes * 3 // 4 - 3

    async def make_workspace(self, *, shared: bool) -> None:
        """Make the workspace unless it exists, open to its group if `shared`.

        In a directory that the user made, only our own subdirectory is closed to others.
        """
        known = await self._stat(JOBS)
        new = known is None and await self._stat(ROOT) is None
        answer = await self._mkdir(JOBS)
        if known is None:
            await self._protect(ROOT if new else OURS, "750" if shared else "700")
        known = known or await self._stat(JOBS)
        try:
            self._zone = zone_offset(
                str(answer["lastModified"]), int(known["mtime"]) if known else 0
            )
        except MALFORMED as error:
            raise malformed_answer("mkdir", self._connection.site) from error

    async def put(self, path: str, content: bytes, *, private: bool) -> None:
        """See `Site.put`; a private file is created with a newline, protected, and then filled.

        It is not created empty, because a server waits 5 s for the end of an empty file.
        """
        self._paths.absolute(path)
        if private:
            await self._store(path, b"\n")
            await self._protect(path, "600")
        await self._store(path, content)

    async def _store(self, path: str, content: bytes) -> None:
        """Write a file directly; make its directory unless it is known to exist."""
        directory, name = parent_directory(path), path.rpartition("/")[2]
        where = self._paths.absolute(directory)
        self._paths.absolute(path)

        async def act() -> None:
            await self._make(directory)
            try:
                await self._connection.once(
                    "upload",
                    lambda c: c.store(self._system.name, where, name, content),
                    size=len(content),
                )
            except SiteNotFound as error:
                # The directory was removed: repeat, and make it again.
                self._made.discard(directory)
                raise SiteUnreachable(error.what, where=error.where, status=error.status) from error
            except SiteUnreachable as error:
                if not content and error.status == COMMAND_TIMEOUT and await self._is_empty(path):
                    return
                # If the directory is missing, a server answers so, or that its input broke.
                self._made.discard(directory)
                raise

        await repeat_request(act)

    async def _is_empty(self, path: str) -> bool:
        """Check for an empty file, which a server creates although it answers with a time-out."""
        entry = await self.stat(path)
        return entry is not None and not entry.directory and entry.size == 0

    async def _protect(self, path: str, mode: str) -> None:
        target = self._paths.absolute(path)
        await self._connection.ask("chmod", lambda c: c.chmod(self._system.name, target, mode))

    async def get(
        self, path: str, offset: int, size: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """See `Site.get`; a file that the server does not return directly needs a transfer.

        The way is chosen by the size before the file is requested: beyond its limit a server may
        refuse at once (413), or only after a deadlock with its own process (408 and 500). A small
        file of known size is one request. The server cannot return bytes from the middle: its
        `view` decodes them as text, and replaces invalid bytes.
        """
        entry = None
        if offset or size is None or size > self._down_bytes:
            entry = await self._reachable(path, offset)
            size = entry.size
            if size == offset:
                return
        if size <= self._down_bytes:
            content = await self._direct(path)
            if content is not None:
                if len(content) > offset:
                    yield content[offset:]
                return
            entry = None  # it has grown
        entry = entry or await self._reachable(path, offset)
        async with aclosing(self._transfers.download(path, entry, offset, self)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _direct(self, path: str) -> bytes | None:
        """Return the bytes of a presumably small file; None if it has become too large."""
        target = self._paths.absolute(path)

        async def act() -> bytes | None:
            try:
                return await self._connection.once(
                    "download",
                    lambda c: c.load(self._system.name, target),
                    size=self._down_bytes,
                )
            except (SiteRejected, SiteUnreachable) as error:
                if error.status not in TOO_LARGE or not await self._is_large(path):
                    raise
                return None

        return await repeat_request(act)

    async def _is_large(self, path: str) -> bool:
        entry = await self.stat(path)
        return entry is not None and entry.size > self._down_bytes

    async def _reachable(self, path: str, offset: int) -> Entry:
        entry = await self.stat(path)
        if entry is None:
            raise SiteNotFound(f"there is no file {path}", where=self._where)
        if entry.directory:
            raise SiteRejected(f"{path} is a directory", where=self._where)
        if offset > entry.size:
            raise SiteRejected(
                f"{path} has {entry.size} bytes, less than {offset}", where=self._where
            )
        return entry

    async def share(self, path: str) -> str | None:
        """Return a URL that grants access to a file, or None if the site has no object store."""
        return await self._transfers.share(path, await self._reachable(path, 0), self)

    async def list(self, path: str) -> dict[str, Entry]:
        # With a slash, `ls` lists a directory's entries, also behind a link, and refuses a file.
        target = f"{self._paths.anywhere(path)}/"
        try:
            answer = await self._connection.ask(
                "list", lambda c: c.list_files(self._system.name, target, show_hidden=True)
            )
        except SiteRejected as error:
            if "Not a directory" in error.what:
                raise SiteNotFound(f"{path} is not a directory", where=self._where) from error
            raise
        try:
            entries = [self._entry(found) for found in answer]
        except MALFORMED as error:
            raise malformed_answer("ls", self._connection.site) from error
        if any("/" in entry.name for entry in entries):
            raise SiteNotFound(f"{path} is not a directory", where=self._where)
        return {entry.name: entry for entry in entries}

    def _entry(self, found: Any) -> Entry:
        directory = found["type"] == "d"
        modified = local_time(str(found["lastModified"])) - self._zone
        name = _unescaped(str(found["name"]))
        size = 0 if directory else int(found["size"])
        return Entry(name, size, directory, modified, link=found["type"] == "l")

    async def stat(self, path: str) -> Entry | None:
        found = await self._stat(path)
        if found is None:
            return None
        try:
            directory = stat.S_ISDIR(int(found["mode"]))
            size, modified = int(found["size"]), float(found["mtime"])
        except MALFORMED as error:
            raise malformed_answer("stat", self._connection.site) from error
        return Entry(path.rsplit("/", 1)[-1], 0 if directory else size, directory, modified)

    async def _stat(self, path: str) -> dict[str, Any] | None:
        target = self._paths.absolute(path)
        try:
            answer = await self._connection.ask(
                "stat", lambda c: c.stat(self._system.name, target, dereference=True)
            )
        except SiteNotFound:
            return None
        except SiteRejected as error:
            if "Not a directory" in error.what:  # something above it is a file
                return None
            raise
        if not isinstance(answer, dict):
            raise malformed_answer("stat", self._connection.site)
        return answer

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        await self._mkdir(path)
        if private:
            await self._protect(path, "700")

    async def _mkdir(self, path: str) -> dict[str, Any]:
        target = self._paths.absolute(path)
        answer = await self._connection.ask(
            "mkdir", lambda c: c.mkdir(self._system.name, target, create_parents=True)
        )
        self._made.add(path)
        return answer if isinstance(answer, dict) else {}

    async def _make(self, directory: str) -> None:
        """Make a directory unless we have made it before; concurrent calls make it once."""
        if directory in self._made:
            return
        async with self._making[directory]:
            if directory not in self._made:
                await self._mkdir(directory)

    async def remove(self, path: str) -> None:
        target = self._paths.absolute(path)
        if target == self._paths.root:
            raise SiteRejected("the workspace itself cannot be removed", where=self._where)
        self._made = {d for d in self._made if d != path and not d.startswith(f"{path}/")}
        try:
            job = await self._connection.ask(
                "remove",
                lambda c: c.rm(
                    self._system.name, target, account=self._transfers.account, blocking=False
                ),
            )
        except SiteNotFound:
            return
        if job is not None:
            await self._transfers.finish(job)


def _unescaped(name: str) -> str:
    """Restore a name: `ls` in the C locale prints non-ASCII bytes as octal numbers."""
    if "\\" not in name:
        return name
    raw = name.encode("utf-8", "surrogateescape")
    raw = _OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), raw)
    return raw.decode("utf-8", "surrogateescape")
