"""A proxy in front of one HTTP server, on loopback, that lets requests fail as it is told.

It knows neither the server's API nor a failure of its own: a rule names the requests by their kind
and says what is done to them, a coroutine that is given the `Exchange`. Whatever no rule takes is
passed on, so that an unmodified client talks to an unmodified server. The server may speak TLS; the
proxy itself speaks plain HTTP, which clients accept on loopback.

Addresses of the server in its answers become the proxy's, as behind a gateway.
"""

import asyncio
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import h11
import httpx

READ_BYTES = 1 << 16
PATIENCE_S = 600.0
"""Seconds that the server behind has to answer, and the proxy itself to start or end."""

_OF_ONE_CONNECTION = {
    "connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Request:
    """What a client asked: `target` is the path with the query, as it was sent."""

    method: str
    target: str
    headers: Headers
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What a server says."""

    status: int
    headers: Headers = ()
    body: bytes = b""


@dataclass(frozen=True)
class Seen:
    """One request that came by.

    Attributes:
        kind: what it is, as the proxy was told to call it.
        request: as it came.
        rule: the name of the rule that took it, empty if it was passed on.
    """

    kind: str
    request: Request
    rule: str = ""


class Exchange:
    """One request of a client, and what can be done about it."""

    def __init__(self, proxy: "Proxy", request: Request, kind: str, client: "_Client") -> None:
        self.proxy = proxy
        self.request = request
        self.kind = kind
        self._client = client

    async def forward(self) -> Answer:
        """Let the server act; the client hears nothing of it yet."""
        return await self.proxy.ask(self.request)

    async def send(self, answer: Answer) -> None:
        """Give the client an answer, whole."""
        head, body = self._wire(answer)
        await self._client.write(head + body)

    async def send_part(self, answer: Answer, share: float) -> None:
        """Give the client a part of an answer, and end the connection in the middle.

        An answer without a body ends in the middle of its head.
        """
        head, body = self._wire(answer)
        end = len(head) + int(len(body) * share) if body else int(len(head) * share)
        await self._client.write((head + body)[:end])
        self._client.close()

    async def send_slowly(self, answer: Answer, seconds: float, pieces: int) -> None:
        """Give the client an answer in `pieces`, over `seconds` in all."""
        head, body = self._wire(answer)
        whole = head + body
        length = -(-len(whole) // pieces)
        for start in range(0, len(whole), length):
            await asyncio.sleep(seconds / pieces)
            await self._client.write(whole[start : start + length])

    def reset(self) -> None:
        """Break the connection as a crash does: the client gets a RST."""
        self._client.reset()

    async def gone(self) -> None:
        """Say nothing until the client gives up."""
        await self._client.gone()

    def _wire(self, answer: Answer) -> tuple[bytes, bytes]:
        lines = [f"HTTP/1.1 {answer.status} -"]
        lines += [f"{name}: {value}" for name, value in answer.headers]
        lines += [f"content-length: {len(answer.body)}"] if answer.status != 204 else []
        body = b"" if self.request.method == "HEAD" else answer.body
        return "\r\n".join([*lines, "", ""]).encode("latin-1"), body


Act = Callable[[Exchange], Awaitable[None]]
"""What is done to a request, instead of passing it on."""


async def pass_on(exchange: Exchange) -> None:
    """Do what a proxy does."""
    await exchange.send(await exchange.forward())


@dataclass
class Rule:
    """What happens to which requests.

    Attributes:
        name: for the record.
        kinds: the requests that it takes; None: all.
        act: what is done to them.
        times: how many of each kind it takes, None for all.
        skip: how many of each kind pass before.
        taken: how many it has taken, by kind.
    """

    name: str
    kinds: Collection[str] | None
    act: Act
    times: int | None = 1
    skip: int = 0
    taken: Counter[str] = field(default_factory=Counter)
    _passed: Counter[str] = field(default_factory=Counter)

    def takes(self, kind: str) -> bool:
        """Whether a request is for it; counts it if so."""
        if self.kinds is not None and kind not in self.kinds:
            return False
        if self.times is not None and self.taken[kind] >= self.times:
            return False
        if self._passed[kind] < self.skip:
            self._passed[kind] += 1
            return False
        self.taken[kind] += 1
        return True


class Proxy:
    """Passes requests on to a server, but for those that a rule takes; a context manager.

    Attributes:
        url: what it serves, without a path.
        rules: what is done to which requests; the first that takes one has it.
        seen: all that came by, in its order.
    """

    def __init__(
        self, server: str, kind: Callable[[Request], str], *, ca_file: Path | None = None
    ) -> None:
        """Prepare for one server.

        Args:
            server: its address: scheme, host and port.
            kind: what a request is called in rules and in the record.
            ca_file: the certificate that it is trusted by, if it speaks TLS.
        """
        self.rules: list[Rule] = []
        self.seen: list[Seen] = []
        self._kind = kind
        parts = urlsplit(server)
        self._server = f"{parts.scheme}://{parts.netloc}"
        self._tls = ssl.create_default_context(cafile=ca_file) if ca_file else False
        # It listens to nobody and keeps the port while the proxy refuses connections.
        self._holder = _socket()
        self._holder.bind(("127.0.0.1", 0))
        self._port: int = self._holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._clients: set[_Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self._ended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
        self._holder.close()

    def add(self, rule: Rule) -> Rule:
        """Let a rule hold from now on; it tells what it has taken."""
        self.rules.append(rule)
        return rule

    def heal(self) -> None:
        self.rules.clear()

    def counted(self) -> Counter[str]:
        return Counter(seen.kind for seen in list(self.seen))

    def shut(self, seconds: float) -> None:
        """Refuse all connections for a while, those that are open included; called by an `Act`."""
        self._deaf()
        for client in list(self._clients):
            client.reset()
        self._loop.call_later(seconds, self._listen)

    async def ask(self, request: Request) -> Answer:
        headers = [(n, v) for n, v in request.headers if n.lower() not in _OF_ONE_CONNECTION]
        asked = self._upstream.build_request(
            request.method, self._server + request.target, headers=headers, content=request.body
        )
        response = await self._upstream.send(asked, stream=True)
        try:
            body = b"".join([chunk async for chunk in response.aiter_raw()])
        finally:
            await response.aclose()
        given = [
            (name, value.replace(self._server, self.url))
            for name, value in response.headers.multi_items()
            if name.lower() not in _OF_ONE_CONNECTION
        ]
        if "json" in response.headers.get("content-type", ""):
            body = body.replace(self._server.encode(), self.url.encode())
        return Answer(response.status_code, given, body)

    def _call(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self) -> None:
        self._upstream = httpx.AsyncClient(
            verify=self._tls, trust_env=False, follow_redirects=False, timeout=PATIENCE_S
        )
        self._listen()

    def _listen(self) -> None:
        if self._ended or self._listening is not None:  # it was shut more than once
            return
        listening = _socket()
        listening.bind(("127.0.0.1", self._port))
        listening.listen()
        listening.setblocking(False)
        self._listening = listening
        self._loop.add_reader(listening, self._accept, listening)

    def _deaf(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    async def _stop(self) -> None:
        self._ended = True
        self._deaf()
        ending = [*self._tasks]
        for task in ending:
            task.cancel()
        for client in list(self._clients):
            client.reset()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.sleep(0)  # in which the connections are closed
        await self._upstream.aclose()

    def _accept(self, listening: socket.socket) -> None:
        # asyncio's own server loses a connection that comes while it is closed.
        with suppress(BlockingIOError, ConnectionError):
            connection, _ = listening.accept()
            client = _Client(connection)
            self._clients.add(client)
            self._keep(self._serve(client))

    async def _serve(self, client: "_Client") -> None:
        try:
            # What a client that has given up does not hear is its own affair.
            with suppress(ConnectionError, h11.RemoteProtocolError):
                await client.open(self._loop)
                while (request := await client.request()) is not None:
                    kind = self._kind(request)
                    rule = next((rule for rule in self.rules if rule.takes(kind)), None)
                    self.seen.append(Seen(kind, request, rule.name if rule else ""))
                    exchange = Exchange(self, request, kind, client)
                    await (rule.act if rule else pass_on)(exchange)
        finally:
            self._clients.discard(client)
            client.close()


class _Client:
    """One connection of a client."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        protocol = asyncio.StreamReaderProtocol(self._reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._socket)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)

    async def request(self) -> Request | None:
        """The next request, None if there is none any more. Clients of today send one by one."""
        if self._writer is None or self._writer.transport.is_closing():
            return None
        parser = h11.Connection(h11.SERVER)
        head: h11.Request | None = None
        body = b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await self._reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in head.headers]
                method, target = head.method.decode("ascii"), head.target.decode("ascii")
                return Request(method, target, headers, body)
            else:
                return None

    async def write(self, data: bytes) -> None:
        if self._writer is None:
            raise ConnectionResetError
        self._writer.write(data)
        await self._writer.drain()

    async def gone(self) -> None:
        with suppress(ConnectionError):
            await self._reader.read()
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()

    def reset(self) -> None:
        if self._socket.fileno() >= 0:
            now = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._socket.close()


def _socket() -> socket.socket:
    """A socket that may share its port with others of this process."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return made
