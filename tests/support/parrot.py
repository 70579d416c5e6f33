"""An HTTP server that says what it is told: what real servers say too seldom for a test."""

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import pytest

from snakemake_executor_plugin_mantik.sites import rest


@dataclass
class Say:
    """An answer; `length` is the Content-Length it claims, None the true one.

    One with `again_s` says its body again and again, with that pause, until nobody listens.
    """

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    delay_s: float = 0.0
    again_s: float | None = None


class Parrot:
    """An HTTP server that gives the answers it was told, in order, the last one for ever."""

    def __init__(self, base: str = "", tls: ssl.SSLContext | None = None) -> None:
        """Prepare a server of URLs that begin with `base`, with `tls` one of https."""
        self.answers: list[Say] = [Say()]
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.held: dict[str, threading.Event] = {}
        """By method: requests are answered once that is set."""
        parrot = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parrot.asked.append((self.command, self.path, dict(self.headers)))
                say = parrot.say(self.path, dict(self.headers), body)
                if self.command in parrot.held:
                    parrot.held[self.command].wait(600)
                time.sleep(say.delay_s)
                self.send_response_only(say.status)
                for name, value in {"Content-Type": "application/json", **say.headers}.items():
                    self.send_header(name, value)
                length = len(say.body) if say.length is None else say.length
                if say.again_s is None:
                    self.send_header("Content-Length", str(length))
                self.end_headers()
                with suppress(ConnectionError):
                    self.wfile.write(say.body)
                    while say.again_s is not None:
                        time.sleep(say.again_s)
                        self.wfile.write(say.body)

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self.server.server_port}{base}"
        if tls is not None:
            # The handshake belongs to the connection's own thread.
            self.server.socket = tls.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
            self.server.handle_error = lambda *_: None  # type: ignore[method-assign] # refusals
            self.url = f"https://localhost:{self.server.server_port}{base}"

    def say(self, path: str, headers: dict[str, str], body: bytes) -> Say:
        """The answer to a request; others than parrots look at it."""
        del path, headers, body
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    @contextmanager
    def running(self) -> Iterator[Self]:
        self.thread.start()
        yield self
        self.stop()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parrot]:
    """A server that is asked again at once."""
    monkeypatch.setattr(rest, "REPEAT_FIRST_S", 0.01)
    with Parrot("/rest/core").running() as made:
        yield made
