"""Read and change the files of a storage: UNICORE's REST resource `storages/X/files`.

It imitates a server with the TSI on a Slurm login node, not the embedded TSI: unix permissions, an
`rm -rf` that ignores missing files, failures with single quotes and `$HOME`. The number of
exchanges with the TSI per request was measured.
"""

import asyncio
import grp
import os
import pwd
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .answers import date, empty, failure
from .tsi import Tsi, TsiError

_MAX_ENTRIES = 10_000
"""Largest number of entries in a listing."""

_CHUNK = 1 << 18
_DOWNLOAD_EXCHANGES = 3
_NO_URI = frozenset(' "<>[]\\^`{|}')
"""Characters that break the server's answer to a new directory (java.net.URI)."""
_URL_CHARACTERS = "/:#?%;=+&@,~!*()'$"
_XML_FAULT = (
    '<ns1:XMLFault xmlns:ns1="http://cxf.apache.org/bindings/xformat"><ns1:faultstring '
    'xmlns:ns1="http://cxf.apache.org/bindings/xformat">{}</ns1:faultstring></ns1:XMLFault>'
)
_FORBIDDEN = ("%25", "%5c", "%2f", "//", "%7f", *(f"%{code:02x}" for code in range(32)))


class _BadPath(Exception):  # noqa: N818
    """The server refuses the path before it checks the file: 400 and an empty body."""


def decode_path(raw: str) -> str:
    """Decode the end of a URL to a path with a leading `/`.

    Raises:
        _BadPath: for a path that the real server answers with 400: an encoded percent sign, slash,
            backslash or control character, an empty segment, `..` above the root, or bytes that
            are not UTF-8.
    """
    lowered = raw.lower()
    if any(text in lowered for text in _FORBIDDEN):
        raise _BadPath(raw)
    # A bare `;` starts a matrix parameter, which is dropped.
    segments: list[str] = []
    for segment in raw.split("/"):
        name = segment.partition(";")[0]
        if name == "..":
            if not segments:
                raise _BadPath(raw)
            segments.pop()
        elif name not in ("", "."):
            segments.append(name)
    try:
        return "/" + unquote_to_bytes("/".join(segments)).decode()
    except UnicodeDecodeError as error:
        raise _BadPath(raw) from error


@cache
def owner_name(uid: int) -> str:
    """Return the login name of a user, or the number if there is none."""
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


@cache
def group_name(gid: int) -> str:
    """Return the name of a group, or the number if there is none."""
    with suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def _properties(status: os.stat_result) -> dict[str, Any]:
    return {
        "isDirectory": stat.S_ISDIR(status.st_mode), "size": status.st_size,
        "lastAccessed": date(status.st_mtime), "owner": owner_name(status.st_uid),
        "group": group_name(status.st_gid), "permissions": stat.filemode(status.st_mode)[1:],
    }  # fmt: skip


_Answer = Callable[[Request, str, Path], Awaitable[Response]]


class SandboxFiles:
    """The files below one directory, under one storage URL."""

    def __init__(self, root: Path, url: str, tsi: Tsi) -> None:
        """Serve the files below `root` through `tsi`; `url` is the storage's URL."""
        self._root = root
        self._url = url
        self._tsi = tsi

    async def handle(self, request: Request, raw_path: str) -> Response:
        """Answer a request for `raw_path`, the encoded path below `files`."""
        try:
            path = decode_path(raw_path)
        except _BadPath:
            return empty(400)
        local, below = self._root / path.lstrip("/"), path.lstrip("/")
        kind = request.headers.get("content-type", "")
        answer: _Answer
        match request.method:
            case "GET" | "HEAD" if "application/json" in request.headers.get("accept", ""):
                doing, answer = f"Error listing '{path}'", self._show
            case "GET" | "HEAD":
                doing, answer = f"Error downloading from '{path}'", self._download
            case "PUT" if not kind:
                return empty(415)
            case "PUT" if kind.startswith("application/json"):
                doing, answer = "", self._change
            case "PUT":
                doing, answer = f"Error uploading to '{path}'", self._put
            case "POST":
                doing, answer = f"Cannot create directory <{below}>", self._make_directory
            case "DELETE":
                doing, answer = f"Cannot delete <{below or '/'}>", self._remove
            case _:
                return empty(405)
        try:
            await self._tsi.exchange()
            return await answer(request, path, local)
        except TsiError as error:
            return failure(500, f"{doing}: {error}")

    async def _show(self, request: Request, path: str, local: Path) -> Response:
        if not _may_read(path, local):
            return empty(404)
        status = local.stat()
        links = {"parentStorage": {"href": self._url, "description": "Parent Storage"}}
        shown = _properties(status) | {"metadata": {}, "_links": links}
        if not shown["isDirectory"]:
            return JSONResponse(shown, headers={"Accept-Ranges": "bytes"})
        await self._tsi.exchange()
        # The root of a storage is always listed from the start.
        asked: Mapping[str, str] = {} if path == "/" else request.query_params
        offset = int(asked.get("offset", "0"))
        most = min(int(asked.get("num", _MAX_ENTRIES)), _MAX_ENTRIES)
        content = await asyncio.to_thread(self._list, path, local, offset, most)
        number = len(content)
        for name, start in (("self", offset), ("next", offset + number)):
            links[name] = {"href": f"{self._url}/files?offset={start}&num={number}"}
        return JSONResponse(shown | {"content": content})

    @staticmethod
    def _list(path: str, local: Path, offset: int, number: int) -> dict[str, Any]:
        content: dict[str, Any] = {}
        base = "" if path == "/" else path
        if not os.access(local, os.R_OK):  # the TSI reports no error
            return content
        with os.scandir(local) as entries:
            for entry in islice(entries, offset, None):
                if len(content) == number:
                    break
                try:
                    status = entry.stat()
                except OSError:  # removed meanwhile, or a broken link
                    continue
                name = os.fsencode(entry.name).decode(errors="replace")
                properties = _properties(status)
                content[f"{base}/{name}{'/' if properties['isDirectory'] else ''}"] = properties
        return content

    async def _download(self, request: Request, path: str, local: Path) -> Response:
        if not _may_read(path, local):
            return empty(404)
        if local.is_dir():
            return empty(406)
        await self._tsi.exchange(_DOWNLOAD_EXCHANGES - 1)
        wanted = request.headers.get("range")
        try:
            size = local.stat().st_size
            local.open("rb").close()
            start, length = _range(wanted, size) if wanted else (0, size)
        except ValueError as error:
            return failure(416, f"Range header '{wanted}' cannot be parsed: {error}")
        except OSError:
            fault = _XML_FAULT.format("java.io.IOException: Error reading from TSI")
            return Response(fault, 500, media_type="application/octet-stream")
        return StreamingResponse(
            _content(local, start, length),
            status_code=206 if wanted else 200,
            media_type="application/octet-stream",
            headers={"Content-Length": str(length)},
        )

    async def _put(self, request: Request, _: str, local: Path) -> Response:
        above = next(parent for parent in local.parents if _is_there(parent))
        if not above.is_dir():
            shown = f"/{local.parent.relative_to(self._root)}"
            raise TsiError(
                f"eu.unicore.xnjs.ems.ExecutionException: Parent <{shown}> is not a directory "
                "(XNJS error)"
            )
        if above != local.parent:
            await self._tsi.exchange()
            self._tsi.make_directory(local.parent)
        with self._tsi.writing(local) as file:
            async for chunk in request.stream():
                self._tsi.check()
                file.write(chunk)
        return empty(204)

    async def _change(self, request: Request, _: str, local: Path) -> Response:
        if not _is_there(local):
            return empty(404)
        try:
            changes = await request.json()
        except ValueError as error:
            raise TsiError(f"org.json.JSONException: {error}") from error
        reply = {}
        permissions = changes.get("permissions", changes.get("unixPermissions"))
        if permissions is not None:
            reply["permissions"] = self._permit(local, str(permissions))
        if "metadata" in changes:
            reply["metadata"] = "Metadata is not supported for this storage."
        return JSONResponse(reply)

    def _permit(self, local: Path, letters: str) -> str:
        """Change permissions and return the server's reply; missing letters count as `-`."""
        if len(letters) % 3 or not letters or set(letters) - set("rwx-"):
            text = f"Illegal permissions string <{letters}>"
            return f"FAILED: java.lang.IllegalArgumentException: {text}"
        try:
            self._tsi.change_mode(local, letters.ljust(9, "-"))
        except TsiError as error:
            return f"FAILED: {error}"
        return "OK"

    async def _make_directory(self, _: Request, path: str, local: Path) -> Response:
        url = f"{self._url}/files/{path.lstrip('/')}"
        self._tsi.make_directory(local)
        at = next((index for index, character in enumerate(url) if character in _NO_URI), None)
        if at is not None:  # the server has created the directory all the same
            raise TsiError(
                f"java.net.URISyntaxException: Illegal character in path at index {at}: {url}"
            )
        return empty(201, {"Location": quote(url, safe=_URL_CHARACTERS)})

    async def _remove(self, _: Request, __: str, local: Path) -> Response:
        await asyncio.to_thread(self._tsi.remove, local)
        return empty(204)

    async def move(self, source: str, target: str, *, copy: bool) -> Response:
        """Rename or copy a file of this storage."""
        start, end = (self._root / text.lstrip("/") for text in (source, target))
        try:
            await self._tsi.exchange()
            await asyncio.to_thread(self._tsi.move, start, end, copy=copy)
        except TsiError as error:
            name = "copy" if copy else "rename"
            return failure(500, f"Error handling action: '{name}': {error}")
        return empty(204)


def _may_read(path: str, local: Path) -> bool:
    return "'" not in path and "$HOME" not in path and _is_there(local)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _range(header: str, size: int) -> tuple[int, int]:
    """Return start and length of a `Range` header; a start beyond the end gives length 0."""
    unit, _, text = header.partition("=")
    if unit != "bytes":
        raise ValueError("java.lang.IllegalArgumentException (no further message available)")
    first, _, last = text.strip().partition("-")
    try:
        if not first:
            start, end = size - int(last), size
        else:
            start, end = int(first), int(last) + 1 if last else size
    except ValueError as error:
        raise ValueError(f'java.lang.NumberFormatException: For input string: "{first}"') from error
    if start < 0 or (end <= start and last):
        raise ValueError("java.lang.IllegalArgumentException (no further message available)")
    return start, max(0, min(end, size) - start)


async def _content(local: Path, start: int, length: int) -> AsyncIterator[bytes]:
    with local.open("rb") as file:
        file.seek(start)
        while length > 0 and (chunk := file.read(min(_CHUNK, length))):
            length -= len(chunk)
            yield chunk
