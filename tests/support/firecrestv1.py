"""A small server that answers as firecREST version 1 does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

SYSTEMS = {
    "description": "List of systems with status and description.",
    "out": [{"description": "System ready", "status": "available", "system": "daint"}],
}
"""Its `/status/systems`; version 2 has `systems`."""


class FirecrestV1:
    """Speaks version 1 below a path that does not tell it; a context manager.

    Attributes:
        url: base of its API.
    """

    def __init__(self, base: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                known = self.path == f"{base}/status/systems"
                missing = {"message": "no Route matched with those values"}  # its gateway
                body = json.dumps(SYSTEMS if known else missing).encode()
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
