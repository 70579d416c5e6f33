"""Runs Python that uses MLflow without its import: each run is a fork of a process that has MLflow.

Jobs of tests and the process that publishes would each import it, for seconds of CPU. What runs
instead is this file, as a program without imports of its own: it has the server fork, hands its
streams, directory and environment over, and ends as the fork does. Who kills it leaves the fork.
"""

import json
import os
import socket
import struct
import sys

_PRELOADED = (
    "mlflow",
    "mlflow.store.tracking.file_store",
    "mlflow.store.tracking.rest_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "snakemake_executor_plugin_mantik.tracking.process",
    "snakemake_executor_plugin_mantik.tracking.publishing",
)


def _ask(name: str, what: str, *arguments: str) -> int:
    """Run a module, or a file that ends with `.py`, in a fork of the server; its exit code."""
    here, there = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as server, there:
        server.connect(f"\0{name}")
        socket.send_fds(server, [b"."], [0, 1, 2, there.fileno()])
    wanted = {
        "arguments": arguments, "cwd": os.getcwd(), "environment": dict(os.environ),
        "module": what,
    }  # fmt: skip
    here.sendall(json.dumps(wanted).encode())
    here.shutdown(socket.SHUT_WR)
    here.recv(4)  # its process id
    return os.waitstatus_to_exitcode(struct.unpack("=i", here.recv(4))[0])


def _serve(name: str) -> None:
    from tests.support import forkserver

    with socket.socket(socket.AF_UNIX) as control:
        control.bind(f"\0{name}")
        control.listen(64)
        sys.stdout.write("listens\n")
        sys.stdout.flush()
        forkserver.serve(control, _PRELOADED)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        sys.exit(_ask(*sys.argv[1:]))
