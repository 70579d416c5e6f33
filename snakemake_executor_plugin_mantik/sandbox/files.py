"""Files of a storage, as UNICORE's REST resource `storages/X/files` shows and changes them.

Emulated is a server with the TSI on a Slurm login node (unix permissions, `rm -rf` that never
complains, trouble with single quotes and `$HOME`), not the embedded one.
"""

import asyncio
import grp
import os
import pwd
import shutil
import stat
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from snakemake_executor_plugin_mantik.private import change_mode
from snakemake_executor_plugin_mantik.sandbox.answers import date, empty, failure

MAX_ENTRIES = 10_000
"""Most entries of one listing."""

_CHUNK = 1 << 18
_FORBIDDEN = ("%25", "%5c", "%2f", "//", "%7f", *(f"%{code:02x}" for code in range(32)))


class BadPath(Exception):  # noqa: N818
    """The server refuses the path before it looks for the file: 400 and an empty body."""


def decode_path(raw: str) -> str:
    """The path, with a leading `/`, that the encoded rest of a URL means.

    Raises:
        BadPath: for what the real server answers with 400: an encoded percent sign, slash,
            backslash or control character, an empty segment, or bytes that are not UTF-8.
    """
    lowered = raw.lower()
    if any(text in lowered for text in _FORBIDDEN):
        raise BadPath(raw)
    # A bare `;` starts a matrix parameter, which is dropped.
    segments: list[str] = []
    for segment in raw.split("/"):
        name = segment.partition(";")[0]
        if name == "..":
            if not segments:
                raise BadPath(raw)
            segments.pop()
        elif name not in ("", "."):
            segments.append(name)
    try:
        return "/" + unquote_to_bytes("/".join(segments)).decode()
    except UnicodeDecodeError as error:
        raise BadPath(raw) from error


@cache
def owner_name(uid: int) -> str:
    """The login name of a user, the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@cache
def group_name(gid: int) -> str:
    """The name of a group, the number if it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _properties(status: os.stat_result) -> dict[str, Any]:
    return {
        "isDirectory": stat.S_ISDIR(status.st_mode),
        "size": status.st_size,
        "lastAccessed": date(status.st_mtime),
        "owner": owner_name(status.st_uid),
        "group": group_name(status.st_gid),
        "permissions": stat.filemode(status.st_mode)[1:],
    }


class Files:
    """The files below one directory, under one storage URL."""

    def __init__(self, root: Path, url: str) -> None:
        """Serve what is below `root`; `url` is the storage's."""
        self._root = root
        self._url = url

    async def handle(  # noqa: PLR0911 - one return per kind of request
        self, request: Request, raw_path: str
    ) -> Response:
        """Answer a request for `raw_path`, the still encoded path below `files`."""
        try:
            path = decode_path(raw_path)
        except BadPath:
            return empty(400)
        if "$HOME" in path:
            return failure(500, f"Error listing '{path}': TSI <ls> failed")
        local = self._root / path.lstrip("/")
        match request.method:
            case "GET" | "HEAD":
                return await self._get(request, path, local)
            case "PUT":
                return await self._put(request, path, local)
            case "POST":
                return self._make_directory(path, local)
            case "DELETE":
                return await asyncio.to_thread(self._remove, path, local)
        return empty(405)

    async def _get(self, request: Request, path: str, local: Path) -> Response:
        if "'" in path or not local.exists():
            return empty(404)
        accept = request.headers.get("accept", "")
        if "application/json" in accept:
            return await asyncio.to_thread(self._show, request, path, local)
        if local.is_dir():
            return empty(406)
        return self._download(request, path, local)

    def _show(self, request: Request, path: str, local: Path) -> Response:
        status = local.stat()
        links = {"parentStorage": {"href": self._url, "description": "Parent Storage"}}
        shown = _properties(status) | {"metadata": {}, "_links": links}
        if not shown["isDirectory"]:
            return JSONResponse(shown, headers={"Accept-Ranges": "bytes"})
        # The root of a storage is always listed from the start.
        offset = 0 if path == "/" else int(request.query_params.get("offset", "0"))
        number = MAX_ENTRIES if path == "/" else int(request.query_params.get("num", MAX_ENTRIES))
        content = self._list(path, local, offset, min(number, MAX_ENTRIES))
        number = len(content)
        base = f"{self._url}/files"
        links["self"] = {"href": f"{base}?offset={offset}&num={number}"}
        links["next"] = {"href": f"{base}?offset={offset + number}&num={number}"}
        return JSONResponse(shown | {"content": content})

    @staticmethod
    def _list(path: str, local: Path, offset: int, number: int) -> dict[str, Any]:
        content: dict[str, Any] = {}
        base = "" if path == "/" else path
        with os.scandir(local) as entries:
            for index, entry in enumerate(entries):
                if index < offset:
                    continue
                if len(content) == number:
                    break
                try:
                    status = entry.stat()
                except OSError:  # removed meanwhile, or a link to nowhere
                    continue
                name = os.fsencode(entry.name).decode(errors="replace")
                properties = _properties(status)
                content[f"{base}/{name}{'/' if properties['isDirectory'] else ''}"] = properties
        return content

    def _download(self, request: Request, path: str, local: Path) -> Response:
        try:
            size = local.stat().st_size
            wanted = request.headers.get("range")
            start, length = _range(wanted, size) if wanted else (0, size)
        except ValueError as error:
            return failure(416, f"Range header '{wanted}' cannot be parsed: {error}")
        except OSError as error:
            return failure(500, f"Error downloading from '{path}': {error}")
        return StreamingResponse(
            _content(local, start, length),
            status_code=206 if wanted else 200,
            media_type="application/octet-stream",
            headers={"Content-Length": str(length)},
        )

    async def _put(self, request: Request, path: str, local: Path) -> Response:
        kind = request.headers.get("content-type", "")
        if not kind:
            return empty(415)
        if kind.startswith("application/json"):
            return await self._change(request, local)
        try:
            for parent in local.parents:
                if parent.exists():
                    if not parent.is_dir():
                        return failure(
                            500,
                            f"Error uploading to '{path}': eu.unicore.xnjs.ems.ExecutionException: "
                            f"Parent <{parent}> is not a directory (XNJS error)",
                        )
                    break
            local.parent.mkdir(parents=True, exist_ok=True)
            # In place and not atomic: a broken upload leaves what came.
            with local.open("wb") as file:
                async for chunk in request.stream():
                    file.write(chunk)
        except OSError as error:
            return failure(
                500,
                f"Error uploading to '{path}': java.io.FileNotFoundException: "
                f"{local} ({error.strerror})",
            )
        return empty(204)

    async def _change(self, request: Request, local: Path) -> Response:
        if not local.exists():
            return empty(404)
        try:
            asked = await request.json()
        except ValueError as error:
            return failure(500, f": org.json.JSONException: {error}")
        reply = {}
        permissions = asked.get("permissions", asked.get("unixPermissions"))
        if permissions is not None:
            if len(permissions) == 9 and not set(permissions) - set("rwx-"):
                bits = "".join("0" if letter == "-" else "1" for letter in permissions)
                change_mode(local, int(bits, 2))
                reply["permissions"] = "OK"
            else:
                reply["permissions"] = (
                    "FAILED: java.lang.IllegalArgumentException: "
                    f"Illegal permissions string <{permissions}>"
                )
        if "metadata" in asked:
            reply["metadata"] = "Metadata is not supported for this storage."
        return JSONResponse(reply)

    def _make_directory(self, path: str, local: Path) -> Response:
        shown = path.lstrip("/")
        try:
            local.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            return failure(
                500,
                f"Cannot create directory <{shown}>: java.io.IOException: "
                f"Cannot create directory <{path}>, file exists!",
            )
        except OSError as error:
            return failure(500, f"Cannot create directory <{shown}>: java.io.IOException: {error}")
        return empty(201, {"Location": f"{self._url}/files/{shown}"})

    def _remove(self, path: str, local: Path) -> Response:
        try:
            if local.is_dir() and not local.is_symlink():
                shutil.rmtree(local)
            else:
                local.unlink(missing_ok=True)
        except OSError as error:
            return failure(500, f"Cannot delete <{path}>: {error}")
        return empty(204)

    def move(self, source: str, target: str, *, copy: bool) -> Response:
        """Rename or copy a file of this storage."""
        name = "copy" if copy else "rename"
        try:
            start, end = (self._root / text.lstrip("/") for text in (source, target))
            if not copy:
                start.rename(end)
            elif start.is_dir():
                shutil.copytree(start, end, dirs_exist_ok=True)
            else:
                shutil.copyfile(start, end)
        except OSError as error:
            return failure(500, f"Error handling action: '{name}': {error}")
        return empty(204)


def _range(header: str, size: int) -> tuple[int, int]:
    """Start and length of a `Range` header; a start beyond the end gives an empty range."""
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


def free_space(path: Path) -> tuple[int, int]:
    """Free and usable bytes of the file system of `path`."""
    space = os.statvfs(path)
    return space.f_bfree * space.f_frsize, space.f_bavail * space.f_frsize
