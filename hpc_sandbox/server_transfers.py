"""Transfers from another server: UNICORE's REST resource `transfers`.

The server fetches the file itself, as the real one does: from another UNICORE server with a token
that this one accepts or not, from any other server without credentials. A deleted transfer goes on.
"""

import asyncio
import ipaddress
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.requests import Request
from starlette.responses import Response

from .answers import date, empty, links, shown
from .faults import spoil
from .files import decode_path
from .job_resources import new_id

_LIFETIME = 24 * 3600
_MODE = 0o600
_OK = (200, 206)


@dataclass
class _Transfer:
    source: str
    target: str
    size: int = -1
    transferred: int = 0
    status: str = "CREATED"
    message: str = ""
    id: str = field(default_factory=new_id)
    ends: float = field(default_factory=lambda: time.time() + _LIFETIME)

    @property
    def is_unicore(self) -> bool:
        return "/rest/core/storages/" in self.source


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


class ServerTransfers:
    """The transfers of one site."""

    def __init__(self, url: str, trusted: str, extra_s: float) -> None:
        """Serve them below `url`; `trusted` is the token that other UNICORE sites may accept.

        Each transfer takes `extra_s` seconds in addition.
        """
        self._url = url
        self._trusted = trusted
        self._extra_s = extra_s
        self._transfers: dict[str, _Transfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ids(self) -> list[str]:
        return list(self._transfers)

    async def create(self, request: Request, root: Path) -> Response:
        """Begin a transfer into the storage with the directory `root`."""
        body = await request.json()
        source, target = body.get("source"), body.get("file")
        if not isinstance(source, str) or not isinstance(target, str):
            return empty(400)
        made = _Transfer(source, decode_path(target))
        self._transfers[made.id] = made
        task = asyncio.create_task(self._run(made, root / made.target.lstrip("/")))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return empty(201, {"location": f"{self._url}/transfers/{made.id}"})

    async def handle(self, request: Request, name: str) -> Response:
        known = self._transfers.get(name)
        if known is None:
            return empty(404)
        if request.method == "DELETE":
            del self._transfers[name]
            return empty(204)
        if request.method != "GET":
            return empty(405)
        return shown(request, self._properties(known))

    def _properties(self, transfer: _Transfer) -> dict[str, Any]:
        done = transfer.status == "DONE"
        ended = {"DONE": "SUCCESSFUL ", "FAILED": f"NOT_SUCCESSFUL {transfer.message}"}
        url = f"{self._url}/transfers/{transfer.id}"
        return {
            "source": transfer.source, "target": transfer.target, "isExport": False,
            "protocol": "BFT" if transfer.is_unicore else "http",
            "status": transfer.status, "statusMessage": ended.get(transfer.status, ""),
            "size": transfer.size,
            # The real one counts them at the end only.
            "transferredBytes": transfer.transferred if done else 0,
            "files": {}, "terminationTime": date(transfer.ends), "tags": [], "acl": [],
            "_links": links({"self": url}),
        }  # fmt: skip

    async def _run(self, transfer: _Transfer, target: Path) -> None:
        transfer.status = "RUNNING"
        try:
            await self._fetch(transfer, target)
        except (httpx.HTTPError, OSError, ValueError) as error:
            transfer.status = "FAILED"
            transfer.message = transfer.message or f"Download failed.: {error}"
        else:
            transfer.status = "DONE"

    async def _fetch(self, transfer: _Transfer, target: Path) -> None:
        if not _is_loopback(transfer.source):
            raise ValueError("the sandbox fetches from this machine only")
        headers = {"Accept": "application/octet-stream", "Accept-Encoding": "identity"}
        if transfer.is_unicore:
            headers["Authorization"] = f"Bearer {self._trusted or 'unknown'}"
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60) as client,
            client.stream("GET", transfer.source, headers=headers) as answer,
        ):
            if answer.status_code not in _OK:
                transfer.message = (
                    "Processing failed: eu.unicore.services.restclient.RESTException: n/a"
                    f" [HTTP {answer.status_code} {answer.reason_phrase}]"
                    if transfer.is_unicore
                    else "Download failed.: java.io.IOException: Error downloading file, server"
                    f" message: <{answer.reason_phrase}>"
                )
                answer.raise_for_status()
                raise ValueError(transfer.message)
            transfer.size = int(answer.headers.get("content-length", -1))
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                target.chmod(_MODE)
                async for chunk in answer.aiter_raw():
                    spoil()
                    file.write(chunk)
                    transfer.transferred += len(chunk)
                await asyncio.sleep(self._extra_s)

    async def stop(self) -> None:
        """End those that run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
