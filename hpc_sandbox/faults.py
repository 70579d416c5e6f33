"""Failures on demand: which requests fail and how, and the middleware that makes them fail."""

import asyncio
import errno
import os
import re
import socket
import struct
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from .site import Site

_LAST_WORDS = 0.3
"""Seconds from an answer to the end of a doomed connection; measured: below 0.5."""

Action = Literal[
    "refuse", "delay", "drop_before", "drop_after", "cut", "expire_sessions", "forget_job",
    "repeat_job", "ignore_abort", "timeout_before", "timeout_after", "fail_command",
]  # fmt: skip
"""The effect on a request; the table in README.md says what each one does."""


@dataclass
class Fault:
    """One kind of failure.

    Attributes:
        method: HTTP method, `*` for any.
        path: regular expression to search for in the path.
        count: how often the failure happens, None for ever.
        skip: how many matching requests pass first.
        status: HTTP status for `refuse`.
        retry_after: seconds in the header of that name, for `refuse`; None for no header.
        message: for `refuse`, the message in the form of the site's API; empty: an empty body. For
            `fail_command`, the system's error message.
        seconds: for `delay` and `timeout_after`.
        bytes: for `cut`.
        happened: how often the failure has happened.
    """

    action: Action
    method: str = "*"
    path: str = ""
    count: int | None = 1
    skip: int = 0
    status: int = 503
    retry_after: int | None = None
    message: str = ""
    seconds: float = 0.0
    bytes: int = 0
    happened: int = 0

    def takes(self, method: str, path: str) -> bool:
        """Return whether this request fails, and count it if so."""
        if self.method not in ("*", method) or not re.search(self.path, path):
            return False
        if self.count is not None and self.happened >= self.count:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.happened += 1
        return True


_FAILING: ContextVar[str] = ContextVar("failing", default="")
_NUMBERS = {os.strerror(number): number for number in errno.errorcode}


def spoil(only: Collection[int] | None = None) -> None:
    """Raise the OSError of the request's `fail_command` fault, if it has one.

    With `only`, raise only these error numbers.
    """
    if text := _FAILING.get():
        number = _NUMBERS.get(text, errno.EIO)
        if only is None or number in only:
            raise OSError(number, text)


@dataclass
class Faults:
    """The planned failures. A request gets the first one that matches, and no other."""

    faults: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        self.faults.clear()

    def take(self, method: str, path: str) -> Fault | None:
        return next((fault for fault in self.faults if fault.takes(method, path)), None)


class Protocol(H11Protocol):
    """uvicorn's protocol; requests find it in their scope, since ASGI cannot break connections.

    Attributes:
        lost: set when the connection is closed.
        doomed: the connections that will be closed silently, soon.
    """

    doomed: ClassVar[set["Protocol"]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin (uvicorn narrows the type in the same way)."""
        super().connection_made(transport)
        self.lost = asyncio.Event()
        self.app_state = {"connection": self}

    def connection_lost(self, exc: Exception | None) -> None:
        self.doomed.discard(self)
        super().connection_lost(exc)
        self.lost.set()


async def _break_connection(scope: Scope, *, flush: bool = False) -> None:
    """Close the connection of a request; with `flush`, after sending the buffered data."""
    connection: Protocol = scope["state"]["connection"]
    if flush:
        connection.transport.close()
    else:
        connection.transport.abort()
    # uvicorn must notice this before the application returns, or it would answer with a 500.
    await connection.lost.wait()


def doom_connection(scope: Scope) -> None:
    """Close the connection of a request silently, soon; a request before then breaks it."""
    connection: Protocol = scope["state"]["connection"]
    connection.doomed.add(connection)
    asyncio.get_running_loop().call_later(_LAST_WORDS, connection.transport.close)


async def reset_if_doomed(scope: Scope) -> bool:
    """Reset the connection if it is doomed, as a server does that has closed it."""
    connection: Protocol = scope["state"]["connection"]
    if connection not in connection.doomed:
        return False
    reset = struct.pack("ii", 1, 0)
    connection.transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, reset
    )
    await _break_connection(scope)
    return True


class FaultMiddleware:
    """Makes requests fail according to `faults`."""

    def __init__(self, app: ASGIApp, faults: Faults, site: Callable[[str], "Site | None"]) -> None:
        self._app = app
        self._faults = faults
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = None
        if not scope["path"].startswith("/sandbox/"):
            fault = self._faults.take(scope["method"], scope["path"])
        if fault is None:
            await self._app(scope, receive, send)
            return
        match fault.action:
            case "refuse":
                await self._refuse(fault, scope, receive, send)
            case "delay":
                await asyncio.sleep(fault.seconds)
                await self._app(scope, receive, send)
            case "drop_before":
                await _break_connection(scope)
            case "drop_after":
                await self._app(scope, receive, _nowhere)
                await _break_connection(scope)
            case "cut":
                await self._cut(fault, scope, receive, send)
            case "fail_command":
                before = _FAILING.set(fault.message)
                try:
                    await self._app(scope, receive, send)
                finally:
                    _FAILING.reset(before)
            case "timeout_before" | "timeout_after":
                scope["sandbox.timeout"] = fault
                await self._app(scope, receive, send)
            case _:
                if site := self._site(scope["path"]):
                    site.act(fault.action, scope)
                await self._app(scope, receive, send)

    async def _cut(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        left = fault.bytes

        async def sparing(message: Message) -> None:
            nonlocal left
            if message["type"] != "http.response.body":
                await send(message)
            elif left > 0:
                body = message.get("body", b"")[:left]
                left -= len(body)
                await send({"type": "http.response.body", "body": body, "more_body": True})

        await self._app(scope, receive, sparing)
        await _break_connection(scope, flush=True)

    async def _refuse(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        # Read the request's body: an early answer would break the connection instead.
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass
        response = Response(status_code=fault.status)
        if fault.message and (site := self._site(scope["path"])):
            response = JSONResponse(site.refusal(fault), fault.status)
        if fault.retry_after is not None:
            response.headers["retry-after"] = str(fault.retry_after)
        await response(scope, receive, send)


async def _nowhere(message: Message) -> None:
    """Discard an answer."""
