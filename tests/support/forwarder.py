"""A server that passes every request on to another one, as a gateway does."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

import httpx

_OWN_HEADERS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class Forwarder:
    """Passes requests below a path on to those below another URL; a context manager.

    Attributes:
        url: what it serves.
        forwarded: how many requests it has passed on.
    """

    def __init__(
        self, target: str, base: str, change: Callable[[bytes], bytes] = lambda body: body
    ) -> None:
        """Prepare a forwarder; `change` makes the answers' bodies what clients get."""
        self.forwarded = 0
        self._client = httpx.Client(timeout=30, trust_env=False)
        forwarder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                given = {k: v for k, v in self.headers.items() if k.lower() not in _OWN_HEADERS}
                answer = forwarder._client.request(
                    self.command,
                    f"{target}{self.path.removeprefix(base)}",
                    headers=given,
                    content=body,
                )
                forwarder.forwarded += 1
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in _OWN_HEADERS:
                        self.send_header(name, value)
                content = change(answer.content)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}{base}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._client.close()
