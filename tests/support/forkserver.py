"""Runs `python -m snakemake`, or our own command, without its imports: most of a second of CPU.

One process per test worker imports Snakemake and the executor once; each run is a fork of it, a
session of its own with the directory, environment, arguments and streams that it was asked for.
The fork then does what `python -m snakemake` does. Signals reach it alone, its exit code is the
real one, and it ends through the interpreter's own end, so that threads and `atexit` are as ever.

The server is asked over a socket: one byte, and with it the descriptors of stdin, stdout, stderr
and of a channel. On the channel the fork reads what to run, until its end, and answers with its
process id once signals do what they do in a new process; the server writes the status when the
fork has ended.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from snakemake_executor_plugin_mantik.sites.http import tls_context

_PRELOADED = (
    "snakemake.cli",
    "snakemake.executors.local",
    "snakemake.profiles",
    "snakemake.report.html_reporter",
    "snakemake.storage",
    "snakemake_executor_plugin_mantik.adapter.planning",
    "snakemake_executor_plugin_mantik.adapter.progress_line",
    "snakemake_executor_plugin_mantik.adapter.startup",
    "snakemake_executor_plugin_mantik.retry",
    "snakemake_executor_plugin_mantik.rules.make_request",
    "snakemake_executor_plugin_mantik.sites.firecrest",
    "snakemake_executor_plugin_mantik.sites.unicore",
    "anyio._backends._asyncio",
    "anyio.to_thread",
    "argparse_dataclass",
    "graphlib",
    "httpcore._async.connection_pool",
    "multiprocessing.managers",
    "platformdirs",
    "smart_open",
)
"""Modules that a run imports; what is missing here is imported by the run itself."""

_REGISTRIES = {
    "snakemake_interface_executor_plugins.registry": "ExecutorPluginRegistry",
    "snakemake_interface_logger_plugins.registry": "LoggerPluginRegistry",
    "snakemake_interface_report_plugins.registry": "ReportPluginRegistry",
    "snakemake_interface_scheduler_plugins.registry": "SchedulerPluginRegistry",
    "snakemake_interface_storage_plugins.registry": "StoragePluginRegistry",
}
"""Snakemake's lists of plugins. Each looks through all installed packages once per process, and
imports its plugins, such as S3's."""

_FROZEN_AT_START = ("PYTHON", "LD_", "OPENBLAS", "LANG", "LC_", "SSL_", "TZ")
"""Beginnings of variables that a process reads only when it starts."""

LIMITS = "MANTIK_TEST_LIMITS"
"""A variable with constants that a slow machine or a patient test needs to be others, as JSON: by
their names with those of their modules."""

_NUMBER = struct.Struct("=i")

_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""


class Fork:
    """A run that was forked, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it goes on after `timeout` seconds.
        """
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(_read_number(self._channel))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("snakemake", timeout or 0.0) from None
            self._channel.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_run(environment: Mapping[str, str]) -> bool:
    """Whether a fork can stand for a new process with this environment."""
    ours = {k: v for k, v in os.environ.items() if k.startswith(_FROZEN_AT_START)}
    return ours == {k: v for k, v in environment.items() if k.startswith(_FROZEN_AT_START)}


def run(
    arguments: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    output: int,
    errors: int | None = None,
    module: str = "snakemake",
) -> Fork:
    """Start `python -m snakemake` with `arguments`.

    Args:
        arguments: of the command.
        cwd: its working directory.
        environment: its environment, one that it `can_run` with.
        output: descriptor of its stdout and stderr; stdin is empty.
        errors: descriptor of its stderr, if that is another one.
        module: what runs instead of `snakemake`.
    """
    here, there = socket.socketpair()
    with there, open(os.devnull, "rb") as nothing:
        errors = output if errors is None else errors
        descriptors = [nothing.fileno(), output, errors, there.fileno()]
        socket.send_fds(_server(), [b"."], descriptors)
    wanted = {
        "arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment),
        "module": module,
    }  # fmt: skip
    here.sendall(json.dumps(wanted).encode())
    here.shutdown(socket.SHUT_WR)
    return Fork(here, _read_number(here))


@cache
def _server() -> socket.socket:
    """A channel to this process's server, which ends when the process does."""
    here, there = socket.socketpair()
    with there:
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(there.fileno())],
            cwd=Path(__file__).parents[2],
            # Threads of a library would not be there in a fork.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end() -> None:
        here.close()
        server.wait()

    atexit.register(end)
    return here


def _read_number(channel: socket.socket) -> int:
    """A number from the server, or from a fork.

    Raises:
        ChildProcessError: there is none any more.
    """
    text = channel.recv(_NUMBER.size)
    if not text:
        raise ChildProcessError("the server that forks Snakemake has ended")
    number: int = _NUMBER.unpack(text)[0]
    return number


def _serve(control: socket.socket) -> str:
    """Fork for each request until there is nobody left to ask; in a fork, what to run.

    `control` is a channel on which requests come, or a socket that whoever has one connects to.
    """
    listens = control.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    channels: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                with control.accept()[0] if listens else control.dup() as whose:
                    asked, descriptors, _, _ = socket.recv_fds(whose, 1, 4)
                if not asked:
                    return ""
                pid = os.fork()
                if pid == 0:
                    for ended, (_, channel) in channels.items():
                        os.close(ended)
                        channel.close()
                    control.close()
                    selector.close()
                    return _become(descriptors)
                for descriptor in descriptors[:3]:
                    os.close(descriptor)
                ended = os.pidfd_open(pid)
                channels[ended] = (pid, socket.socket(fileno=descriptors[3]))
                selector.register(ended, selectors.EVENT_READ)
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, channel = channels.pop(key.fd)
                with channel:
                    _notify(channel, os.waitpid(pid, 0)[1])


def _become(descriptors: list[int]) -> str:
    """Make of this fork what was asked for, all but the module, which is returned."""
    os.setsid()
    if sys.platform == "linux":
        # A test run that is killed leaves no Snakemake behind, which would wait for its site.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with socket.socket(fileno=descriptors[3]) as channel:
        with channel.makefile("rb") as asked:
            wanted = json.load(asked)
        os.chdir(wanted["cwd"])
        os.environ.clear()
        os.environ.update(wanted["environment"])
        for name, value in json.loads(os.environ.pop(LIMITS, "{}")).items():
            module, _, constant = name.rpartition(".")
            setattr(importlib.import_module(module), constant, value)
        sys.argv[1:] = wanted["arguments"]
        sys.path[0] = wanted["cwd"]
        if (snakemake := sys.modules.get("snakemake.workflow")) is not None:
            # The one thing that Snakemake takes from the process when it is imported.
            snakemake.Workflow._rundir = wanted["cwd"]
        _notify(channel, os.getpid())
    return str(wanted["module"])


def _notify(channel: socket.socket, number: int) -> None:
    """Write a number, if there is still somebody who wants it."""
    with suppress(BrokenPipeError):
        channel.sendall(_NUMBER.pack(number))


def serve(control: socket.socket, preloaded: Sequence[str]) -> None:
    """Import modules, then be the server that is asked on `control`, and each of its forks."""
    for name in preloaded:
        importlib.import_module(name)
    threads = threading.enumerate()
    assert len(threads) == 1, f"a fork would lack these threads: {threads}"
    gc.collect()
    gc.freeze()
    if (module := _serve(control)).endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    elif module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(descriptor: int) -> None:
    """Be the server that this process's `run` asks on `descriptor`."""
    for name, registry in _REGISTRIES.items():
        getattr(importlib.import_module(name), registry)()
    tls_context(None, "")
    serve(socket.socket(fileno=descriptor), _PRELOADED)


if __name__ == "__main__":
    main(int(sys.argv[1]))
