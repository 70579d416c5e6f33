"""The controller of a run: Snakemake in the run's directory, as a process of its own session.

It outlives the terminal and the command that started it. A lock tells whether it is there: taken
before it is started, held by it and by the Snakemake below it, so that neither a process id nor a
moment in between can deceive. All of it is one process group, which cannot be another one's while
the lock is held.

    python -m snakemake_executor_plugin_mantik.runs.controller DIRECTORY LOCK-DESCRIPTOR
"""

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, Final

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.common.locks import is_locked, take_lock
from snakemake_executor_plugin_mantik.common.state_directory import STATE, open_private
from snakemake_executor_plugin_mantik.runs.directories import RunDirectory
from snakemake_executor_plugin_mantik.runs.request import RunRequest, read_request

if TYPE_CHECKING:
    from snakemake_executor_plugin_mantik.journal import TryRecord

MODULE: Final = "snakemake_executor_plugin_mantik.runs.controller"
_RUN_ID: Final = "MANTIK_RUN_ID"
"""The variable that names the MLflow run which was made for the workflow's only job."""

_FOREIGN: Final = ("SNAKEMAKE_", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_", _RUN_ID)
"""How variables begin that were set for something else, and would change the run."""

_INTERRUPTED: Final = 130

# As whoever starts and asks


def start_controller(directory: RunDirectory, environ: Mapping[str, str] | None = None) -> bool:
    """Start the controller of a run; False: one is there.

    Args:
        directory: of the run, with its request.
        environ: this process's environment, where credentials come from.

    Raises:
        MantikError: the run's request cannot be read, or no process can be started.
    """
    request = read_request(directory)
    lock = hold_directory(directory)
    if lock is None:
        return False
    words = [sys.executable, "-P", "-m", MODULE, str(directory.path), str(lock.fileno())]
    directory.cancelled.unlink(missing_ok=True)
    try:
        with lock, open_private(directory.log, "ab") as log:
            # The shell ends at once, and nobody need wait for what it has started.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *words], cwd=directory.path,
                env=controller_environment(
                    request, directory, os.environ if environ is None else environ
                ),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock.fileno()],
                start_new_session=True, check=True,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise MantikError(
            f"the run's controller cannot be started ({error})",
            where=str(directory.path),
            do=f"Start it later: smk-mantik runs continue {request.run_id}",
        ) from None
    return True


def controller_environment(
    request: RunRequest, directory: RunDirectory, environ: Mapping[str, str]
) -> dict[str, str]:
    """What the controller's environment is."""
    from snakemake_executor_plugin_mantik.sites.lookup import variable_prefix
    from snakemake_executor_plugin_mantik.tracking.run import without_user

    made = {n: v for n, v in environ.items() if not n.startswith(_FOREIGN)}
    # A password in the URI is kept nowhere; it is the environment that has it.
    if without_user(made.get("MLFLOW_TRACKING_URI", "")) != request.tracking_uri:
        made["MLFLOW_TRACKING_URI"] = request.tracking_uri
    made["MLFLOW_EXPERIMENT_ID"] = request.experiment_id
    made["MLFLOW_EXPERIMENT_NAME"] = request.experiment
    made[_RUN_ID] = request.run_id
    if request.account:
        made[f"{variable_prefix(request.site)}_COMPUTE_BUDGET_ACCOUNT"] = request.account
    # The snapshot is in no repository, whatever lies above it.
    made["GIT_CEILING_DIRECTORIES"] = str((directory.path / request.folder).parent)
    return made


def hold_directory(directory: RunDirectory) -> BinaryIO | None:
    """The run's lock, which is the caller's from now on; None: a controller has it."""
    try:
        lock = open_private(directory.lock, "ab")
    except OSError as error:
        raise MantikError(
            f"the run's lock cannot be used ({error.strerror or error})",
            where=str(directory.path),
            do="Check that it is yours, and on a file system that has locks",
        ) from None
    if take_lock(lock):
        # Nobody is interrupted whom an earlier holder has named.
        lock.truncate(0)
        return lock
    lock.close()
    return None


def is_alive(directory: RunDirectory) -> bool:
    """Whether a controller, or a Snakemake that it has started, is there."""
    return is_locked(directory.lock)


def wait_for_controller(directory: RunDirectory) -> None:
    """Wait until no controller is there."""
    with suppress(FileNotFoundError), directory.lock.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def interrupt_controller(directory: RunDirectory) -> None:
    """Press Ctrl-C, so to say, where the controller is.

    Raises:
        UserError: it is on another machine.
    """
    with suppress(ValueError, KeyError, FileNotFoundError, ProcessLookupError):
        holder = json.loads(directory.lock.read_text())
        if holder["host"] != platform.node():
            raise UserError(
                f"its controller runs on {holder['host']}",
                where=str(directory.path),
                do="Cancel it there",
            )
        os.killpg(holder["group"], signal.SIGINT)


def tries_in(workdir: Path) -> "list[TryRecord]":
    """What the journal of a workflow knows of its jobs; nothing if none was ever planned."""
    from snakemake_executor_plugin_mantik.journal import JOURNAL_FILE, read_history

    return read_history(workdir / STATE) if (workdir / STATE / JOURNAL_FILE).exists() else []


def has_left_tries(workdir: Path) -> bool:
    """Whether a job of the workflow may be at its site, or has not been taken over yet."""
    from snakemake_executor_plugin_mantik.journal import TryState

    return any(each.may_run or each.state is TryState.ENDED for each in tries_in(workdir))


# As the controller


class _Controller:
    def __init__(self, directory: RunDirectory, lock: int) -> None:
        self._directory = directory
        self._lock = lock
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = 0

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._hear)
        holder = {"group": os.getpgrp(), "pid": os.getpid(), "host": platform.node()}
        os.write(self._lock, json.dumps(holder).encode())
        if self._directory.cancelled.exists():  # by somebody who could not see whom to interrupt
            self._stopped = signal.SIGINT
        request = read_request(self._directory)
        workdir = self._directory.path / request.folder
        os.chdir(workdir)
        try:
            code = _INTERRUPTED if self._stopped else self._snakemake(self._words(request))
        except MantikError as error:
            sys.stderr.write(f"{error}\n")
            code = 2
        if not has_left_tries(workdir):
            self._directory.write_end(code)
            self._settle(request)
        return code

    def _words(self, request: RunRequest) -> list[str]:
        from snakemake_executor_plugin_mantik.mlproject.single_rule import (
            prepare_single_rule,
            snakemake_command,
        )

        site = f"{request.site}={self._directory.path / request.config}"
        snakefile = prepare_single_rule(
            Path(), request.entry_point,
            [f"{name}={value}" for name, value in request.values.items()],
            [f"{name}={value}" for name, value in request.extra.items()],
            site=site, inputs=[], outputs=[],
        )  # fmt: skip
        return [
            *snakemake_command(snakefile, site), "--executor", "mantik", "--jobs", "1",
            # What the user has set up for other workflows is none of this one.
            "--profile", "none", "--workflow-profile", "none",
            "--mantik-on-interrupt", "cancel",
        ]  # fmt: skip

    def _snakemake(self, words: list[str]) -> int:
        if self._stopped:
            return _INTERRUPTED
        self._child = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[self._lock])
        if self._stopped:  # between the two
            self._child.send_signal(self._stopped)
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stopped = number
        # Of Ctrl-C the whole group hears; the others are sent to this process alone.
        if self._child is not None and number != signal.SIGINT:
            self._child.send_signal(number)

    def _settle(self, request: RunRequest) -> None:
        from snakemake_executor_plugin_mantik.runs.settlement import settle_run

        try:
            settle_run(self._directory, request)
        except MantikError as error:
            # Whoever asks about the run tries again.
            sys.stderr.write(f"MLflow has not been told of the end yet. {error}\n")


def main() -> int:
    """Be the controller of the run directory that is the first argument."""
    return _Controller(RunDirectory(Path(sys.argv[1])), int(sys.argv[2])).run()


if __name__ == "__main__":
    sys.exit(main())
