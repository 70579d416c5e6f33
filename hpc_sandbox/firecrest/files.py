"""Files over firecREST's REST API: at once (`.../ops/...`) and in jobs (`.../transfer/...`).

Clients wait for a transfer's job and then search its log for a phrase; the phrases here are the
server's.
"""

import asyncio
import itertools
import shlex
import uuid
from html import escape
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..settings import FirecrestSettings
from . import commands
from .answers import Failure, either, flag, invalid, json_body, number, text
from .compute import Compute
from .shell import TIMEOUT_STATUS, CommandError, LoginNode, channel_closed, too_slow
from .store import ObjectStore

_SOURCE = ("path", "sourcePath", "source_path")
_TARGET = ("targetPath", "target_path")
_WINDOW = 2 << 20
"""Bytes of a command's output that an ssh channel buffers until they are read."""

_READING = ("ls", "stat", "file", "head", "tail", "view", "checksum", "download")
_METHODS = {
    "ops": {
        **dict.fromkeys(_READING, "GET"),
        **dict.fromkeys(("upload", "mkdir", "symlink", "compress", "extract"), "POST"),
        **dict.fromkeys(("chmod", "chown"), "PUT"),
        "rm": "DELETE",
    },
    "transfer": {
        **dict.fromkeys(("upload", "download", "cp", "mv", "compress", "extract"), "POST"),
        "rm": "DELETE",
    },
}
"""The requests, each with its HTTP method."""

_LOOKS = 1440
"""How often an upload's job checks for its object."""

_DIRECTIVES = ("#SBATCH --nodes=1", "#SBATCH --time=0-00:15:00")
_TAR_FLAGS = {"none": "", "gzip": "z", "bzip2": "j", "xz": "J"}
_VARIABLES = {"PATH": "/bin:/usr/bin/:/usr/local/bin/"}

_SIMPLE = """\
if {command}; then
    echo "Files were successfully {done}."
else
    code=$?
    echo "not {done}, exit code $code" >&2
    exit $code
fi
"""

_UPLOAD = """\
if [ -d {target} ]; then
    echo "the target is a directory" >&2
    exit 3
fi
echo "Waiting for the object"
for look in $(seq {looks}); do
    if [ -f {object} ]; then
        # The real script ignores errors of cp, too: a missing directory is no error.
        cp -- {object} {target}
        echo "File was successfully downloaded"
        exit 0
    fi
    sleep {interval}
done
"""

_DOWNLOAD = """\
if [ ! -f {source} ]; then
    echo "file_not_found" >&2
    exit 34
fi
cp -- {source} {object}.new && mv -- {object}.new {object} || exit 70
echo "[INFO] Multipart file upload successfully completed"
"""


def _word(path: str) -> str:
    """Quote a path for a transfer job's script, with HTML escapes as in the server's code."""
    return shlex.quote(escape(path).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"))


def directives(settings: FirecrestSettings) -> list[str]:
    """Return the `#SBATCH` lines of transfer jobs, with `{account}` if they need one."""
    return [*_DIRECTIVES, *(["#SBATCH --account={account}"] if settings.account_needed else [])]


class Files:
    """The files of one system."""

    def __init__(self, node: LoginNode, compute: Compute, store: ObjectStore) -> None:
        self._node = node
        self._settings = node.settings
        self._compute = compute
        self._store = store
        self._races = itertools.cycle((True, False))  # which of two events is first

    async def handle(self, request: Request, kind: str, name: str) -> Response:
        """Answer a request; `kind` is `ops` or `transfer`. Raise `Failure` if it fails."""
        method = _METHODS[kind].get(name)
        if method is None:
            raise Failure(404, "Not Found")
        if request.method != method:
            raise Failure(405, "Method Not Allowed")
        if kind == "transfer":
            return await self._transfer(request, name)
        if name == "upload":
            return await self._upload(request)
        if name == "download":
            return await self._download(self._path(request))
        if name in _READING:
            return _output(await self._read(request, name))
        entry = await self._change(request, name)
        if entry is None:
            return Response(status_code=204)
        return _output(entry, 201 if method == "POST" else 200)

    def _path(self, request: Request) -> str:
        path = request.query_params.get("path")
        if path is None:
            raise invalid("query", "path", "Field required")
        return self._node.check(path)

    async def _body(self, request: Request) -> tuple[dict[str, Any], str]:
        body = await json_body(request)
        return body, self._node.check(text(body, *_SOURCE))

    def _limited(self, data: bytes, encoded: int | None = None) -> bytes:
        """Return a command's output, or raise `Failure` if it is larger than firecREST reads."""
        if (len(data) if encoded is None else encoded) >= self._settings.max_file_size:
            raise Failure(413, "Command output exceeded buffer limit.")
        return data

    # --- looking -------------------------------------------------------------------------------

    async def _read(self, request: Request, name: str) -> Any:
        path, run = self._path(request), self._node.run
        match name:
            case "ls":
                return await run(
                    commands.ls, path, hidden=flag(request, "showHidden"),
                    recursive=flag(request, "recursive"), numeric=flag(request, "numericUid"),
                    follow=flag(request, "dereference"),
                )  # fmt: skip
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
        most = self._settings.max_file_size
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
        if encoded > self._settings.max_file_size + _WINDOW:
            await asyncio.sleep(self._settings.command_timeout)
            # The channel may be closed already when the server tries to end the command.
            raise channel_closed() if next(self._races) else too_slow()
        return Response(self._limited(data, encoded), media_type="application/octet-stream")

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
            await self._node.run(commands.write, f"{directory}/{name}", content=content)
        except Failure as failure:
            # The shell may end before all of its input is written.
            raise (channel_closed() if next(self._races) else failure) from failure
        if not content:
            # Without input, `base64 -d` waits until it or the server gives up; the file exists.
            await asyncio.sleep(self._settings.command_timeout)
            raise too_slow() if next(self._races) else CommandError(TIMEOUT_STATUS, "").failure()
        return Response(status_code=204)

    async def _change(self, request: Request, name: str) -> commands.Entry | None:
        """Run a command that changes files; return the entry of the new or changed one."""
        if name == "rm":
            await self._node.run(commands.rm, self._path(request))
            return None
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
                target, follow = text(body, *_TARGET), bool(body.get("dereference"))
                if text(body, "matchPattern", "match_pattern", needed=False):
                    raise Failure(501, "The sandbox does not support matchPattern.")
                kind = _compression(body)
                await run(commands.compress, path, target, compression=kind, follow=follow)
            case _:
                target = text(body, *_TARGET)
                await run(commands.extract, path, target, compression=_compression(body))
        return None

    # --- in jobs -------------------------------------------------------------------------------

    async def _transfer(self, request: Request, name: str) -> Response:
        if name == "rm":
            command = f"rm -R -- {_word(self._path(request))}"
            script = _SIMPLE.format(command=command, done="deleted")
            account = request.query_params.get("account", "")
            return JSONResponse(await self._job("DeleteFiles", script, account))
        if name == "upload":
            answer = await self._large_upload(await json_body(request))
        elif name == "download":
            answer = await self._large_download(await json_body(request))
        else:
            answer = await self._internal(name, *await self._body(request))
        return JSONResponse(answer, 201)

    async def _internal(self, name: str, body: dict[str, Any], path: str) -> dict[str, Any]:
        target = text(body, *_TARGET)
        follow = bool(body.get("dereference", False))
        match name:
            case "cp":
                links = "L" if follow else "d"
                command = f"cp --force -R{links} --preserve=all -- {_word(path)} {_word(target)}"
                title, done = "CopyFiles", "copied"
            case "mv":
                command = f"mv -- {_word(path)} {_word(target)}"
                title, done = "MoveFiles", "moved"
            case "compress":
                options = f"-c{_TAR_FLAGS[_compression(body)]}f" + (" -h" if follow else "")
                parent, _, file = path.rpartition("/")
                command = f"tar {options} {_word(target)} -C {_word(parent)} -- {_word(file)}"
                title, done = "CompressFiles", "compressed"
            case _:
                options = f"-x{_TAR_FLAGS[_compression(body)]}f"
                command = f"tar {options} {_word(path)} -C {_word(target)}"
                title, done = "CompressFiles", "extracted"
        script = _SIMPLE.format(command=command, done=done)
        return await self._job(title, script, text(body, "account", needed=False))

    def _method(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the transfer's directives, or raise `Failure` for an unavailable method."""
        given = either(body, "transferDirectives", "transfer_directives")
        if not isinstance(given, dict):
            raise invalid("body", "transferDirectives", "Field required")
        method = text(given, "transferMethod", "transfer_method")
        if method not in ("s3", "streamer", "wormhole"):
            raise invalid("body", "transferDirectives", "Input should be 's3'")
        if self._settings.transfer_method is None:
            problem = "(\"'NoneType' object has no attribute 'service_type'\",)"
            raise Failure(500, problem, unhandled=True)
        if method != self._settings.transfer_method:
            raise Failure(400, "Requested transfer method is not available.")
        return given

    async def _large_upload(self, body: dict[str, Any]) -> dict[str, Any]:
        path, given = text(body, *_SOURCE), self._method(body)
        size = either(given, "fileSize", "file_size")
        if not str(size).isdecimal():
            raise invalid("body", "fileSize", "Input should be a valid integer")
        key, most = self._store.new_key(path), self._settings.max_part_size
        parts = range(1, -(-int(str(size)) // most) + 1)
        script = _UPLOAD.format(
            target=_word(path),
            object=shlex.quote(str(self._store.object_path(key))),
            looks=_LOOKS,
            interval=self._settings.store_interval,
        )
        account = text(body, "account", needed=False)
        return await self._job("IngressFileTransfer", script, account) | {
            "transferDirectives": {
                "transferMethod": "s3",
                "partsUploadUrls": [self._store.presigned("PUT", key, str(part)) for part in parts],
                "completeUploadUrl": self._store.presigned("POST", key),
                "maxPartSize": most,
            }
        }

    async def _large_download(self, body: dict[str, Any]) -> dict[str, Any]:
        path = text(body, *_SOURCE)
        self._method(body)
        await self._node.run(commands.stat_file, path, follow=True)
        key = self._store.new_key(path)
        made = shlex.quote(str(self._store.object_path(key)))
        script = _DOWNLOAD.format(source=_word(path), object=made)
        account = text(body, "account", needed=False)
        given = {"transferMethod": "s3", "downloadUrl": self._store.presigned("GET", key)}
        answer = await self._job("OutgressFileTransfer", script, account)
        return answer | {"transferDirectives": given}

    async def _job(self, name: str, script: str, account: str) -> dict[str, Any]:
        """Submit a transfer job and return its part of the answer."""
        lines = "\n".join(directives(self._settings))
        if "{account}" in lines:
            if not account:
                raise Failure(400, "Account parameter is required on this system.")
            lines = lines.format(account=account)
        home = str(self._node.home)
        log = f"{home}/.f7t_file_handling_job_{{}}{uuid.uuid4()}.log"
        job = {
            "name": name, "workingDirectory": home, "standardInput": "/dev/null",
            "standardOutput": log.format(""), "standardError": log.format("error_"),
            "env": _VARIABLES,
            "script": f'#!/bin/bash\n{lines}\n\necho "{name} (id:$SLURM_JOB_ID)"\n{script}',
        }  # fmt: skip
        await self._node.occupy()
        return {
            "transferJob": {
                "jobId": str(await self._compute.submit(job)),
                "system": self._node.name,
                "workingDirectory": home,
                "logs": {"outputLog": job["standardOutput"], "errorLog": job["standardError"]},
            }
        }


def _compression(body: dict[str, Any]) -> str:
    """Return the requested compression of an archive; raise `Failure` for an unknown one."""
    kind = text(body, "compression", needed=False) or "gzip"
    if kind not in commands.COMPRESSIONS:
        allowed = ", ".join(repr(known) for known in commands.COMPRESSIONS)
        raise invalid("body", "compression", f"Input should be {allowed}")
    return kind


def _output(output: Any, status: int = 200) -> Response:
    return JSONResponse({"output": output}, status)
