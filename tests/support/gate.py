"""A gate before a server: closed, the server cannot be reached, as if it were down."""

import socket
import socketserver
import threading
from contextlib import suppress


class Gate:
    """A TCP forwarder on a port of its own that can be opened and shut."""

    def __init__(self, port: int) -> None:
        gate = self
        self._open = True
        self._goes_on = threading.Event()
        self._goes_on.set()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                gate._goes_on.wait()
                if gate._open:
                    with socket.create_connection(("127.0.0.1", port)) as other:
                        back = threading.Thread(target=_pour, args=(other, self.request))
                        back.start()
                        _pour(self.request, other)
                        back.join()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def open(self) -> None:
        self._open = True
        self._goes_on.set()

    def hold(self) -> None:
        """Take new connections, and let nothing through before it is opened or shut."""
        self._goes_on.clear()

    def shut(self) -> None:
        self._open = False
        self._goes_on.set()

    def close(self) -> None:
        self.shut()
        self._server.shutdown()
        self._server.server_close()


def _pour(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            target.sendall(content)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
