"""Files over firecREST's REST API, at once: `/filesystem/SYSTEM/ops/...`."""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from . import commands
from .answers import Failure, flag, invalid, json_body, number, text
from .shell import TIMEOUT_STATUS, CommandError, LoginNode, channel_closed, too_slow

SOURCE = ("path", "sourcePath", "source_path")
TARGET = ("targetPath", "target_path")
_WINDOW = 2 << 20
"""Bytes of a command's output that an ssh channel buffers until they are read."""

_READING = ("ls", "stat", "file", "head", "tail", "view", "checksum", "download")
_METHODS = {
    **dict.fromkeys(_READING, "GET"),
    **dict.fromkeys(("upload", "mkdir", "symlink", "compress", "extract"), "POST"),
    **dict.fromkeys(("chmod", "chown"), "PUT"),
    "rm": "DELETE",
}


class Files:
    """Reads requests for files of one system, each of which has its own HTTP method."""

    def __init__(self, node: LoginNode) -> None:
        self._node = node

    @staticmethod
    def _check_method(request: Request, name: str, methods: Mapping[str, str]) -> None:
        if name not in methods:
            raise Failure(404, "Not Found")
        if request.method != methods[name]:
            raise Failure(405, "Method Not Allowed")

    def _path(self, request: Request) -> str:
        path = request.query_params.get("path")
        if path is None:
            raise invalid("query", "path", "Field required")
        return self._node.check(path)

    async def _body(self, request: Request) -> tuple[dict[str, Any], str]:
        body = await json_body(request)
        return body, self._node.check(text(body, *SOURCE))


class Operations(Files):
    """The commands on files of one system."""

    def __init__(self, node: LoginNode) -> None:
        super().__init__(node)
        self._races = itertools.cycle((True, False))  # which of two events is first

    async def handle(self, request: Request, name: str) -> Response:
        """Answer a request for the command `name`, or raise `Failure`."""
        self._check_method(request, name, _METHODS)
        if name == "upload":
            return await self._upload(request)
        if name == "download":
            return await self._download(self._path(request))
        if name in _READING:
            return _output(await self._read(request, name))
        if name == "rm":
            await self._node.run(commands.rm, self._path(request))
            return Response(status_code=204)
        entry = await self._change(request, name)
        if entry is None:
            return Response(status_code=204)
        return _output(entry, 201 if request.method == "POST" else 200)

    def _limited(self, data: bytes, encoded: int | None = None) -> bytes:
        """Return a command's output, or raise `Failure` if it is larger than firecREST reads."""
        if (len(data) if encoded is None else encoded) >= self._node.settings.max_file_size:
            raise Failure(413, "Command output exceeded buffer limit.")
        return data

    # --- looking -------------------------------------------------------------------------------

    async def _read(self, request: Request, name: str) -> Any:
        path, run = self._path(request), self._node.run
        match name:
            case "ls":
                return await run(
                    commands.ls,
                    path,
                    hidden=flag(request, "showHidden"),
                    recursive=flag(request, "recursive"),
                    numeric=flag(request, "numericUid"),
                    follow=flag(request, "dereference"),
                )
            case "stat":
                return await run(commands.stat_file, path, follow=flag(request, "dereference"))
            case "file":
                return await run(commands.file_type, path)
            case "checksum":
                return {"algorithm": "SHA256", "checksum": await run(commands.checksum, path)}
            case "view":
                return await self._view(request, path)
        return await self._part(request, path, name)

    async def _part(self, request: Request, path: str, tool: str) -> dict[str, Any]:
        rest = flag(request, "skipTrailing" if tool == "head" else "skipHeading")
        size, lines = number(request, "bytes") or None, number(request, "lines") or None
        if size and lines:
            raise Failure(400, "Only one of `bytes` or `lines` can be specified.")
        options = {"tool": tool, "size": size, "lines": lines, "rest": rest}
        data = self._limited(await self._node.run(commands.part, path, **options))
        amount = lines or size
        if amount is None:
            amount = 10
        elif rest == (tool == "head"):
            amount = -amount
        return {
            "content": data.decode(errors="replace"),
            "contentType": "bytes" if size else "lines",
            "startPosition": 0 if tool == "head" else amount,
            "endPosition": amount if tool == "head" else -1,
        }

    async def _view(self, request: Request, path: str) -> str:
        most = self._node.settings.max_file_size
        given, offset = number(request, "size"), number(request, "offset") or 0
        size = most if given is None else given
        if offset < 0:
            raise Failure(400, "`offset` value must be an integer value equal or greater than 0")
        if size <= 0:
            raise Failure(400, "`size` value must be an integer value greater than 0")
        if size > most:
            raise Failure(400, f"`size` value must be less than {most} bytes")
        data = await self._node.run(commands.view, path, size=size, offset=offset)
        # The server counts characters of the decoded text where it should count bytes.
        begin = offset % size
        return self._limited(data).decode(errors="replace")[begin : begin + size]

    async def _download(self, path: str) -> Response:
        """Return a file; base64 above the limit plus the channel's buffer blocks the command."""
        data = await self._node.run(commands.read, path)
        encoded = -(-len(data) // 3) * 4
        settings = self._node.settings
        if encoded > settings.max_file_size + _WINDOW:
            await asyncio.sleep(settings.command_timeout)
            # The channel may be closed already when the server tries to end the command.
            raise channel_closed() if next(self._races) else too_slow()
        return Response(self._limited(data, encoded), media_type="application/octet-stream")

    # --- changing ------------------------------------------------------------------------------

    async def _upload(self, request: Request) -> Response:
        directory, settings = self._path(request), self._node.settings
        async with request.form() as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise invalid("body", "file", "Field required")
            content, name = await file.read(), file.filename
        if len(content) > settings.max_file_size:
            raise Failure(413, "File to upload is too large.")
        try:
            await self._node.run(commands.write, f"{directory}/{name}", content=content)
        except Failure as failure:
            # The shell may end before all of its input is written.
            raise (channel_closed() if next(self._races) else failure) from failure
        if not content:
            # Without input, `base64 -d` waits until it or the server gives up; the file exists.
            await asyncio.sleep(settings.command_timeout)
            raise too_slow() if next(self._races) else CommandError(TIMEOUT_STATUS, "").failure()
        return Response(status_code=204)

    async def _change(self, request: Request, name: str) -> commands.Entry | None:
        """Run a command that changes files; return the entry of the new or changed one."""
        (body, path), run = await self._body(request), self._node.run
        match name:
            case "mkdir":
                return await run(commands.mkdir, path, parents=bool(body.get("parent", False)))
            case "symlink":
                return await run(commands.symlink, path, text(body, "linkPath", "link_path"))
            case "chmod":
                return await run(commands.chmod, path, mode=text(body, "mode"))
            case "chown":
                own = {key: text(body, key, needed=False) for key in ("owner", "group")}
                return await run(commands.chown, path, **own)
            case "compress":
                target, follow = text(body, *TARGET), bool(body.get("dereference"))
                if text(body, "matchPattern", "match_pattern", needed=False):
                    raise Failure(501, "The sandbox does not support matchPattern.")
                kind = compression(body)
                await run(commands.compress, path, target, compression=kind, follow=follow)
            case _:
                target = text(body, *TARGET)
                await run(commands.extract, path, target, compression=compression(body))
        return None


def compression(body: dict[str, Any]) -> str:
    """Return the requested compression of an archive; raise `Failure` for an unknown one."""
    kind = text(body, "compression", needed=False) or "gzip"
    if kind not in commands.COMPRESSIONS:
        allowed = ", ".join(repr(known) for known in commands.COMPRESSIONS)
        raise invalid("body", "compression", f"Input should be {allowed}")
    return kind


def _output(output: Any, status: int = 200) -> Response:
    return JSONResponse({"output": output}, status)
