"""The centre's object store: moto's S3 on loopback, for the transfers of firecREST."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_FORM = "application/x-www-form-urlencoded"


@contextmanager
def object_store() -> Iterator[str]:
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, _as_bytes(_application()), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _application() -> Any:
    # Half a second that all other tests need not wait for.
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    return DomainDispatcherApplication(create_backend_app)


def _as_bytes(application: Any) -> Callable[[dict[str, Any], Any], Any]:
    """`application` with bodies that it does not take for forms, which moto reads away.

    curl calls each body a form, and firecREST's jobs complete their uploads with it.
    """

    def wrapped(environment: dict[str, Any], start_response: Any) -> Any:
        kind = environment.get("CONTENT_TYPE", "")
        if kind.startswith(_FORM) or (environment["REQUEST_METHOD"] == "POST" and not kind):
            environment["CONTENT_TYPE"] = "application/octet-stream"
        return application(environment, start_response)

    return wrapped
