"""Files over firecREST's REST API, at once: `/filesystem/SYSTEM/ops/...`."""

import asyncio
import itertools
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..settings import FirecrestSettings
from . import commands
from .answers import (
    Failure,
    flag,
    invalid,
    json_body,
    number,
    text,
)
from .shell import (
    TIMEOUT_STATUS,
    CommandError,
    Shell,
    channel_closed,
    too_slow,
)

_SOURCE = ("path", "sourcePath", "source_path")
_WINDOW = 2 << 20
"""Bytes of a command's output that an ssh channel buffers until they are read."""


def check_path(path: str, roots: Sequence[Path], system: str) -> None:
    """Raise `Failure` for a path that is relative or not below `roots`.

    It resolves `..`, but not links.
    """
    if not path.startswith("/"):
        raise Failure(400, f"The provided path ({path}) is not an absolute path.")
    normal = os.path.normpath(path)
    if not any(Path(normal).is_relative_to(root) for root in roots):
        raise Failure(
            400,
            f"The provided path ({normal}) does not match any of the defined filesystem paths "
            f"for the requested system ({system}).",
        )


class Operations:
    """The commands on files of one site."""

    def __init__(
        self, shell: Shell, settings: FirecrestSettings, roots: Sequence[Path], system: str
    ) -> None:
        self._shell = shell
        self._settings = settings
        self._roots = roots
        self._system = system
        self._races = itertools.cycle((True, False))  # which of two events is first
        self._handlers = {
            ("GET", "ls"): self._ls,
            ("GET", "stat"): self._stat,
            ("GET", "file"): self._file,
            ("GET", "head"): self._head,
            ("GET", "tail"): self._tail,
            ("GET", "view"): self._view,
            ("GET", "checksum"): self._checksum,
            ("GET", "download"): self._download,
            ("POST", "upload"): self._upload,
            ("POST", "mkdir"): self._mkdir,
            ("POST", "symlink"): self._symlink,
            ("POST", "compress"): self._compress,
            ("POST", "extract"): self._extract,
            ("PUT", "chmod"): self._chmod,
            ("PUT", "chown"): self._chown,
            ("DELETE", "rm"): self._rm,
        }

    async def handle(self, request: Request, name: str) -> Response:
        """Answer a request for the command `name`, or raise `Failure`."""
        handler = self._handlers.get((request.method, name))
        if handler is None:
            known = any(command == name for _, command in self._handlers)
            raise Failure(405, "Method Not Allowed") if known else Failure(404, "Not Found")
        return await handler(request)

    def _path(self, request: Request) -> str:
        path = request.query_params.get("path")
        if path is None:
            raise invalid("query", "path", "Field required")
        check_path(path, self._roots, self._system)
        return path

    async def _body(self, request: Request) -> tuple[dict[str, Any], str]:
        body = await json_body(request)
        path = text(body, *_SOURCE)
        check_path(path, self._roots, self._system)
        return body, path

    def _limited(self, data: bytes, encoded: int | None = None) -> bytes:
        """Return a command's output, or raise `Failure` if it is larger than firecREST reads."""
        if (len(data) if encoded is None else encoded) >= self._settings.max_file_size:
            raise Failure(413, "Command output exceeded buffer limit.")
        return data

    # --- looking -------------------------------------------------------------------------------

    async def _ls(self, request: Request) -> Response:
        command = partial(
            commands.ls,
            self._path(request),
            hidden=flag(request, "showHidden"),
            recursive=flag(request, "recursive"),
            numeric=flag(request, "numericUid"),
            follow=flag(request, "dereference"),
        )
        return _output(await self._shell.run(command))

    async def _stat(self, request: Request) -> Response:
        path, follow = self._path(request), flag(request, "dereference")
        return _output(await self._shell.run(partial(commands.stat_file, path, follow=follow)))

    async def _file(self, request: Request) -> Response:
        return _output(await self._shell.run(partial(commands.file_type, self._path(request))))

    async def _head(self, request: Request) -> Response:
        path, rest = self._path(request), flag(request, "skipTrailing")
        size, lines = _amount(request)
        command = partial(commands.head, path, size=size, lines=lines, without_end=rest)
        data = self._limited(await self._shell.run(command))
        amount = lines if lines is not None else size
        end = 10 if amount is None else -amount if rest else amount
        return _content(data, size, 0, end)

    async def _tail(self, request: Request) -> Response:
        path, rest = self._path(request), flag(request, "skipHeading")
        size, lines = _amount(request)
        command = partial(commands.tail, path, size=size, lines=lines, without_start=rest)
        data = self._limited(await self._shell.run(command))
        amount = lines if lines is not None else size
        start = 10 if amount is None else amount if rest else -amount
        return _content(data, size, start, -1)

    async def _view(self, request: Request) -> Response:
        path, most = self._path(request), self._settings.max_file_size
        given, offset = number(request, "size"), number(request, "offset") or 0
        size = most if given is None else given
        if offset < 0:
            raise Failure(400, "`offset` value must be an integer value equal or greater than 0")
        if size <= 0:
            raise Failure(400, "`size` value must be an integer value greater than 0")
        if size > most:
            raise Failure(400, f"`size` value must be less than {most} bytes")
        data = self._limited(await self._shell.run(partial(commands.view, path, size, offset)))
        # The server counts characters of the decoded text where it should count bytes.
        begin = offset % size
        return _output(data.decode(errors="replace")[begin : begin + size])

    async def _checksum(self, request: Request) -> Response:
        digest = await self._shell.run(partial(commands.checksum, self._path(request)))
        return _output({"algorithm": "SHA256", "checksum": digest})

    async def _download(self, request: Request) -> Response:
        """Return a file; base64 above the limit plus the channel's buffer blocks the command."""
        data = await self._shell.run(partial(commands.read, self._path(request)))
        encoded = -(-len(data) // 3) * 4
        if encoded > self._settings.max_file_size + _WINDOW:
            await asyncio.sleep(self._settings.command_timeout)
            # The channel may be closed already when the server tries to end the command.
            raise channel_closed() if next(self._races) else too_slow()
        self._limited(data, encoded)
        return Response(data, media_type="application/octet-stream")

    # --- changing ------------------------------------------------------------------------------

    async def _upload(self, request: Request) -> Response:
        directory = self._path(request)
        async with request.form() as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise invalid("body", "file", "Field required")
            content, name = await file.read(), file.filename
        if len(content) > self._settings.max_file_size:
            raise Failure(413, "File to upload is too large.")
        try:
            await self._shell.run(partial(commands.write, f"{directory}/{name}", content))
        except Failure as failure:
            # The shell may end before all of its input is written.
            raise (channel_closed() if next(self._races) else failure) from failure
        if not content:
            # Without input, `base64 -d` waits until it or the server gives up; the file exists.
            await asyncio.sleep(self._settings.command_timeout)
            raise too_slow() if next(self._races) else CommandError(TIMEOUT_STATUS, "").failure()
        return Response(status_code=204)

    async def _mkdir(self, request: Request) -> Response:
        body, path = await self._body(request)
        command = partial(commands.mkdir, path, parents=bool(body.get("parent", False)))
        return _output(await self._shell.run(command), 201)

    async def _symlink(self, request: Request) -> Response:
        body, path = await self._body(request)
        link = text(body, "linkPath", "link_path")
        return _output(await self._shell.run(partial(commands.symlink, path, link)), 201)

    async def _chmod(self, request: Request) -> Response:
        body, path = await self._body(request)
        return _output(await self._shell.run(partial(commands.chmod, path, text(body, "mode"))))

    async def _chown(self, request: Request) -> Response:
        body, path = await self._body(request)
        owner, group = (text(body, name, needed=False) for name in ("owner", "group"))
        return _output(await self._shell.run(partial(commands.chown, path, owner, group)))

    async def _rm(self, request: Request) -> Response:
        await self._shell.run(partial(commands.rm, self._path(request)))
        return Response(status_code=204)

    async def _compress(self, request: Request) -> Response:
        body, path = await self._body(request)
        target, follow = text(body, "targetPath", "target_path"), bool(body.get("dereference"))
        if text(body, "matchPattern", "match_pattern", needed=False):
            raise Failure(501, "The sandbox does not support matchPattern.")
        command = partial(commands.compress, path, target, compression(body), follow=follow)
        await self._shell.run(command)
        return Response(status_code=204)

    async def _extract(self, request: Request) -> Response:
        body, path = await self._body(request)
        target = text(body, "targetPath", "target_path")
        await self._shell.run(partial(commands.extract, path, target, compression(body)))
        return Response(status_code=204)


def compression(body: dict[str, Any]) -> str:
    """Return the requested compression of an archive; raise `Failure` for an unknown one."""
    kind = text(body, "compression", needed=False) or "gzip"
    if kind not in commands.COMPRESSIONS:
        allowed = ", ".join(repr(known) for known in commands.COMPRESSIONS)
        raise invalid("body", "compression", f"Input should be {allowed}")
    return kind


def _amount(request: Request) -> tuple[int | None, int | None]:
    size, lines = number(request, "bytes") or None, number(request, "lines") or None
    if size and lines:
        raise Failure(400, "Only one of `bytes` or `lines` can be specified.")
    return size, lines


def _content(data: bytes, size: int | None, start: int, end: int) -> Response:
    return _output(
        {
            "content": data.decode(errors="replace"),
            "contentType": "bytes" if size else "lines",
            "startPosition": start,
            "endPosition": end,
        }
    )


def _output(output: Any, status: int = 200) -> Response:
    return JSONResponse({"output": output}, status)
