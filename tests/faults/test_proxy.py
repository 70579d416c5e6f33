"""The proxy itself: what a client meets is what it was told to do."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from tests.faults import faults
from tests.support.proxy import Act, Proxy, Request, Rule


class Server:
    """Counts what it is asked; a context manager."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                asked.append((self.command, self.path, body))
                text = f'{{"self": "{base}{self.path}"}}'.encode()
                self.send_response(201)
                self.send_header("Content-Type", "application/json")
                self.send_header("Location", f"{base}/made")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._server.timeout = 10
        base = self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def method(request: Request) -> str:
    return request.method


@contextmanager
def between(
    act: Act | None = None, *, times: int | None = 1, skip: int = 0
) -> Iterator[tuple[Server, Proxy, httpx.Client]]:
    """A server, a proxy that lets POST fail, and a client of the proxy."""
    with (
        Server() as server,
        Proxy(server.url, method) as proxy,
        httpx.Client(base_url=proxy.url, timeout=600, trust_env=False) as client,
    ):
        if act is not None:
            proxy.add(Rule("act", {"POST"}, act, times, skip))
        yield server, proxy, client


def test_passes_on_and_stands_for_the_server() -> None:
    with between() as (server, proxy, client):
        answer = client.post("/a%20b?c=d", content=b"body" * 100_000)
        assert client.get("/").status_code == 201
        assert answer.status_code == 201
        assert answer.json() == {"self": f"{proxy.url}/a%20b?c=d"}
        assert answer.headers["Location"] == f"{proxy.url}/made"
        assert server.asked[0] == ("POST", "/a%20b?c=d", b"body" * 100_000)
        assert proxy.counted() == {"POST": 1, "GET": 1}


@pytest.mark.parametrize(
    ("act", "acted", "error"),
    [
        (faults.reset, False, httpx.ReadError),
        (faults.lost, True, httpx.ReadError),
        (faults.hang, False, httpx.ReadTimeout),
        (faults.hang_after, True, httpx.ReadTimeout),
        (faults.cut, True, httpx.RemoteProtocolError),
    ],
)
def test_breaks(act: Act, acted: bool, error: type[Exception]) -> None:
    with between(act, skip=1) as (server, proxy, client):
        assert client.post("/passes").status_code == 201
        with pytest.raises(error):
            client.post("/fails", timeout=3.0 if error is httpx.ReadTimeout else None)
        assert client.post("/passes").status_code == 201
        assert ("POST", "/fails", b"") in server.asked or not acted
        assert len(server.asked) == (3 if acted else 2)
        assert [seen.rule for seen in proxy.seen] == ["", "act", ""]


def test_refuses_connections_for_a_while_and_keeps_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "OUTAGE_S", 2.0)
    with between(faults.refused) as (server, _, client):
        with pytest.raises(httpx.TransportError):
            client.post("/")
        refused = 0
        while True:
            try:
                assert client.get("/").status_code == 201
            except httpx.ConnectError:
                refused += 1
            else:
                break
        assert refused
        assert len(server.asked) == 1


def test_drips() -> None:
    with between(faults.drip) as (_, _, client):
        began = time.monotonic()
        assert client.post("/").json(), "all pieces come"
        assert time.monotonic() - began > 1.0


def test_answers_for_the_server() -> None:
    with between(faults.text(418, "tea")("unicore")) as (server, _, client):
        answer = client.post("/")
        assert (answer.status_code, answer.text) == (418, "tea")
        assert not server.asked
