"""Files over firecREST's REST API, in jobs: `/filesystem/SYSTEM/transfer/...`.

Clients wait for the job and then search its log for a phrase; the phrases here are the server's.
"""

import shlex
import uuid
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..settings import FirecrestSettings
from . import commands
from .answers import Failure, either, invalid, json_body, text
from .compute import Compute
from .operations import SOURCE, TARGET, Files, compression
from .shell import LoginNode
from .store import ObjectStore

_LOOKS = 1440
"""How often an upload's job checks for its object."""

_METHODS = {
    **dict.fromkeys(("upload", "download", "cp", "mv", "compress", "extract"), "POST"),
    "rm": "DELETE",
}
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


class TransferService(Files):
    """The transfer jobs of one site."""

    def __init__(self, node: LoginNode, compute: Compute, store: ObjectStore) -> None:
        super().__init__(node)
        self._settings = node.settings
        self._compute = compute
        self._store = store

    async def handle(self, request: Request, name: str) -> Response:
        """Answer a request for the transfer `name`, or raise `Failure`."""
        self._check_method(request, name, _METHODS)
        if name == "rm":
            command = f"rm -R -- {_word(self._path(request))}"
            script = _SIMPLE.format(command=command, done="deleted")
            account = request.query_params.get("account", "")
            return JSONResponse(await self._job("DeleteFiles", script, account))
        if name == "upload":
            answer = await self._upload(await json_body(request))
        elif name == "download":
            answer = await self._download(await json_body(request))
        else:
            answer = await self._internal(name, *await self._body(request))
        return JSONResponse(answer, 201)

    async def _internal(self, name: str, body: dict[str, Any], path: str) -> dict[str, Any]:
        target = text(body, *TARGET)
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
                options = f"-c{_TAR_FLAGS[compression(body)]}f" + (" -h" if follow else "")
                parent, _, file = path.rpartition("/")
                command = f"tar {options} {_word(target)} -C {_word(parent)} -- {_word(file)}"
                title, done = "CompressFiles", "compressed"
            case _:
                options = f"-x{_TAR_FLAGS[compression(body)]}f"
                command = f"tar {options} {_word(path)} -C {_word(target)}"
                title, done = "CompressFiles", "extracted"
        script = _SIMPLE.format(command=command, done=done)
        return await self._job(title, script, text(body, "account", needed=False))

    # --- large files ---------------------------------------------------------------------------

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

    async def _upload(self, body: dict[str, Any]) -> dict[str, Any]:
        path, given = text(body, *SOURCE), self._method(body)
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
        answer = await self._job("IngressFileTransfer", script, text(body, "account", needed=False))
        answer["transferDirectives"] = {
            "transferMethod": "s3",
            "partsUploadUrls": [self._store.presigned("PUT", key, str(part)) for part in parts],
            "completeUploadUrl": self._store.presigned("POST", key),
            "maxPartSize": most,
        }
        return answer

    async def _download(self, body: dict[str, Any]) -> dict[str, Any]:
        path = text(body, *SOURCE)
        self._method(body)
        await self._node.run(commands.stat_file, path, follow=True)
        key = self._store.new_key(path)
        made = shlex.quote(str(self._store.object_path(key)))
        script = _DOWNLOAD.format(source=_word(path), object=made)
        account = text(body, "account", needed=False)
        answer = await self._job("OutgressFileTransfer", script, account)
        url = self._store.presigned("GET", key)
        answer["transferDirectives"] = {"transferMethod": "s3", "downloadUrl": url}
        return answer

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
            "name": name,
            "workingDirectory": home,
            "standardInput": "/dev/null",
            "standardOutput": log.format(""),
            "standardError": log.format("error_"),
            "env": _VARIABLES,
            "script": f'#!/bin/bash\n{lines}\n\necho "{name} (id:$SLURM_JOB_ID)"\n{script}',
        }
        await self._node.occupy()
        return {
            "transferJob": {
                "jobId": str(await self._compute.submit(job)),
                "system": self._node.name,
                "workingDirectory": home,
                "logs": {"outputLog": job["standardOutput"], "errorLog": job["standardError"]},
            }
        }
