"""Files of the workspace through firecREST's file API: each request is a command over ssh."""

import asyncio
import io
import re
import stat
from collections import defaultdict
from typing import Any, Final

import httpx

from snakemake_executor_plugin_mantik.common.errors import (
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.paths import OURS, ROOT

from ..base import Entry
from ..rest import repeat_request
from .connection import local_time, zone_offset
from .jobs import FirecrestJobs
from .script import JOBS

_COMMAND_TIMEOUT: Final = 408
"""A command at the site took longer than the server's time-out (5 s by default)."""
_TOO_LARGE: Final = frozenset((413, _COMMAND_TIMEOUT, 500))
"""Statuses of a download that is larger than the server's `max_ops_file_size`: the server stops
reading at its limit and waits for the command, which waits for the rest to be read."""
_OCTETS: Final = "application/octet-stream"
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


class FirecrestFiles(FirecrestJobs):
    """The part of a site that deals with files that travel directly."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._zone = 0.0
        self._made: set[str] = set()
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def _down_bytes(self) -> int:
        """Largest file that is downloaded directly.

        It comes as base64 in a buffer of the size that uploaded files may have.
        """
        return self._open.system.direct_bytes * 3 // 4 - 3

    def _absolute(self, path: str) -> str:
        return self._open.paths.absolute(path)

    def _files_path(self, name: str) -> str:
        return f"/filesystem/{self._open.system.name}/{name}"

    async def _output(self, kind: str, method: str, name: str, **arguments: Any) -> Any:
        """Run a command at the site, repeatedly where that may help; return its output."""

        async def act() -> Any:
            path = self._files_path(f"ops/{name}")
            answer = await self._connection.once(kind, method, path, **arguments)
            with self._connection.parsing(name):
                return self._connection.json_of(answer)["output"]

        return await repeat_request(act)

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
        with self._connection.parsing("mkdir"):
            self._zone = zone_offset(
                str(answer["lastModified"]), int(known["mtime"]) if known else 0
            )

    async def put(self, path: str, content: bytes, *, private: bool = False) -> None:
        """See `Site.put`; a private file is created with a newline, protected, and then filled.

        It is not created empty, because a server waits 5 s for the end of an empty file.
        """
        if private:
            await self._store(path, b"\n")
            await self._protect(path, "600")
        await self._store(path, content)

    async def _store(self, path: str, content: bytes) -> None:
        """Write a file directly; make its directory unless it is known to exist."""
        self._absolute(path)  # which checks it
        directory, _, name = path.rpartition("/")
        directory = directory or "."
        params = {"path": self._absolute(directory)}

        async def act() -> None:
            await self._make(directory)
            try:
                # Sent piece by piece, and closed: requests are part of cycles that live long.
                with io.BytesIO(content) as file:
                    await self._connection.once(
                        "upload",
                        "POST",
                        self._files_path("ops/upload"),
                        size=len(content),
                        params=params,
                        files={"file": (name, file)},
                    )
            except SiteNotFound as error:
                # The directory was removed: repeat, and make it again.
                self._made.discard(directory)
                raise SiteUnreachable(error.what, where=error.where, status=error.status) from error
            except SiteUnreachable as error:
                if not content and error.status == _COMMAND_TIMEOUT and await self._is_empty(path):
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
        await self._output(
            "chmod", "PUT", "chmod", json={"path": self._absolute(path), "mode": mode}
        )

    async def _load(self, path: str) -> bytes | None:
        """Return the bytes of a presumably small file; None if it has become too large."""
        params = {"path": self._absolute(path)}

        async def act() -> bytes | None:
            try:
                answer = await self._connection.once(
                    "download",
                    "GET",
                    self._files_path("ops/download"),
                    size=self._down_bytes,
                    params=params,
                )
            except (SiteRejected, SiteUnreachable) as error:
                if error.status not in _TOO_LARGE:
                    raise
                entry = await self.stat(path)
                if entry is None or entry.size <= self._down_bytes:
                    raise
                return None
            if not str(answer.headers.get("Content-Type", "")).startswith(_OCTETS):
                raise self._connection.nonsense("a download")
            return answer.content

        return await repeat_request(act)

    async def list(self, path: str) -> dict[str, Entry]:
        # With a slash, `ls` lists a directory's entries, also behind a link, and refuses a file.
        params = {"path": f"{self._open.paths.anywhere(path)}/", "showHidden": True}
        try:
            answer = await self._output("list", "GET", "ls", params=params)
        except SiteRejected as error:
            if "Not a directory" in error.what:
                raise SiteNotFound(f"{path} is not a directory", where=self._where) from error
            raise
        with self._connection.parsing("ls"):
            entries = [self._entry(found) for found in answer]
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
        with self._connection.parsing("stat"):
            directory = stat.S_ISDIR(int(found["mode"]))
            size, modified = int(found["size"]), float(found["mtime"])
        return Entry(path.rpartition("/")[2], 0 if directory else size, directory, modified)

    async def _stat(self, path: str) -> dict[str, Any] | None:
        params = {"path": self._absolute(path), "dereference": True}
        try:
            answer = await self._output("stat", "GET", "stat", params=params)
        except SiteNotFound:
            return None
        except SiteRejected as error:
            if "Not a directory" in error.what:  # something above it is a file
                return None
            raise
        if not isinstance(answer, dict):
            raise self._connection.nonsense("stat")
        return answer

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        await self._mkdir(path)
        if private:
            await self._protect(path, "700")

    async def _mkdir(self, path: str) -> dict[str, Any]:
        body = {"sourcePath": self._absolute(path), "parent": True}
        answer = await self._output("mkdir", "POST", "mkdir", json=body)
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
        """See `Site.remove`; what takes long is removed by a job of the site's."""
        params = {"path": self._absolute(path)}
        if params["path"] == self._open.paths.root:
            raise self._connection.refusal("the workspace itself cannot be removed")
        self._made = {d for d in self._made if d != path and not d.startswith(f"{path}/")}

        async def act(name: str) -> httpx.Response:
            return await self._connection.once(
                "remove", "DELETE", self._files_path(name), params=params
            )

        async def remove() -> httpx.Response:
            try:
                return await act("ops/rm")
            except SiteUnreachable as error:
                if error.status != _COMMAND_TIMEOUT and "exit status:124" not in error.what:
                    raise
            if self._open.account:
                params["account"] = self._open.account
            return await act("transfer/rm")

        try:
            answer = await repeat_request(remove)
        except SiteNotFound:
            return
        if answer.status_code != httpx.codes.NO_CONTENT:
            await self._wait(self._job_of(self._connection.json_of(answer)))


def _unescaped(name: str) -> str:
    """Restore a name: `ls` in the C locale prints non-ASCII bytes as octal numbers."""
    if "\\" not in name:
        return name
    raw = name.encode("utf-8", "surrogateescape")
    raw = _OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), raw)
    return raw.decode("utf-8", "surrogateescape")
