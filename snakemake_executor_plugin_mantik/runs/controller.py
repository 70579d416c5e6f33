"""The controller of a run: it runs Snakemake in the run's directory, in a session of its own.

It outlives the terminal and the command that started it. A lock shows whether it is alive. The lock
is taken before the controller starts, and is held by it and by its Snakemake. So there is no moment
without a lock, and a reused process id misleads nothing. Both are in one process group, whose id
cannot be reused while the lock is held.

    python -m snakemake_executor_plugin_mantik.runs.controller DIRECTORY LOCK-DESCRIPTOR
"""

import fcntl
import json
import os
import platform
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final

from ..common.errors import MantikError, UserError
from ..common.locks import take_lock
from ..common.state_directory import STATE, open_private
from ..journal import JOURNAL_FILE
from ..tracking.cursor import count_unpublished, is_reported
from ..tracking.worker_client import start_worker
from .directories import RunDirectory

_REASON: Final = "it ended before a job was submitted; see smk-mantik runs logs"


def run_status(directory: RunDirectory) -> str:
    """Return MLflow's status for a run that is over."""
    end = directory.end
    if end is not None and end["exit_code"] == 0:
        return "FINISHED"
    return "KILLED" if directory.cancelled.exists() else "FAILED"


def settle_run(directory: RunDirectory) -> None:
    """Report the end of a run that is over to MLflow; import mlflow only if needed.

    If events are left in the workflow's log, only start a worker that publishes them.

    Raises:
        MantikError: a request to MLflow fails.
    """
    if directory.reported.exists():
        return
    pending, published = _tracked(directory)
    if pending:
        start_worker(directory.workdir)
        return
    if not published:
        from .store import RunStore

        request = directory.request
        RunStore(request.tracking_uri).end(request.run_id, run_status(directory), _REASON)
    directory.reported.touch()


def _tracked(directory: RunDirectory) -> tuple[bool, bool]:
    """Return whether the log holds unpublished events, and whether the end is published."""
    workdir = directory.workdir
    if (workdir / STATE / JOURNAL_FILE).exists():
        with suppress(sqlite3.Error):
            return count_unpublished(workdir) > 0, is_reported(workdir, directory.request.run_id)
    return False, False


MODULE: Final = "snakemake_executor_plugin_mantik.runs.controller"
_RUN_ID: Final = "MANTIK_RUN_ID"
"""The variable that names the MLflow run that was created for the workflow's only job."""

_FOREIGN: Final = ("SNAKEMAKE_", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_", _RUN_ID)
"""Prefixes of variables that were set for other purposes and would change the run."""

INTERRUPTED: Final = 130
"""The exit code of a run that was cancelled."""

# For the processes that start and query a controller


def start_controller(directory: RunDirectory) -> bool:
    """Start the controller of a run; return False if the run's lock is held.

    Credentials come from this process's environment.

    Raises:
        MantikError: the run's request cannot be read, its lock file cannot be opened, or no process
            can be started.
        OSError: the file system does not support locks.
    """
    request = directory.request
    lock = hold_directory(directory)
    if lock is None:
        return False
    words = [sys.executable, "-P", "-m", MODULE, str(directory.path), str(lock.fileno())]
    directory.cancelled.unlink(missing_ok=True)
    try:
        with lock, open_private(directory.log, "ab") as log:
            # The shell ends at once, so this process has no child to wait for.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *words], cwd=directory.path,
                env=controller_environment(directory, os.environ),
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


def controller_environment(directory: RunDirectory, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run's controller."""
    from ..sites.credentials import variable_prefix
    from ..tracking.run import without_user

    request = directory.request
    made = {n: v for n, v in environ.items() if not n.startswith(_FOREIGN)}
    # The request holds no password: a URI with one comes from the environment alone.
    if without_user(made.get("MLFLOW_TRACKING_URI", "")) != request.tracking_uri:
        made["MLFLOW_TRACKING_URI"] = request.tracking_uri
    made["MLFLOW_EXPERIMENT_ID"] = request.experiment_id
    made["MLFLOW_EXPERIMENT_NAME"] = request.experiment
    made[_RUN_ID] = request.run_id
    if request.account:
        made[f"{variable_prefix(request.site)}_COMPUTE_BUDGET_ACCOUNT"] = request.account
    # Or git would find a repository above the snapshot, which is in none.
    made["GIT_CEILING_DIRECTORIES"] = str(directory.workdir.parent)
    return made


def hold_directory(directory: RunDirectory) -> BinaryIO | None:
    """Take the run's lock for the caller; return None if another process holds it.

    That is a controller, a Snakemake that it started, or a command that ends or removes the run.

    Raises:
        MantikError: the lock file cannot be opened.
        OSError: the file system does not support locks.
    """
    try:
        lock = open_private(directory.lock, "ab")
    except OSError as error:
        raise MantikError(
            f"the run's lock cannot be used ({error.strerror or error})",
            where=str(directory.path),
            do="Check that the directory is yours and that its file system supports locks",
        ) from None
    if take_lock(lock):
        # Or `interrupt_controller` would signal the process group of an earlier holder.
        lock.truncate(0)
        return lock
    lock.close()
    return None


def wait_for_controller(directory: RunDirectory) -> None:
    """Wait until no process holds the run's lock (`RunDirectory.alive`)."""
    with suppress(FileNotFoundError), directory.lock.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def interrupt_controller(directory: RunDirectory) -> None:
    """Send SIGINT, as Ctrl-C does, to the controller and its Snakemake, if the lock names them.

    Raises:
        UserError: the controller is on another machine.
    """
    with suppress(ValueError, KeyError, FileNotFoundError, ProcessLookupError):
        holder = json.loads(directory.lock.read_text())
        if holder["host"] != platform.node():
            raise UserError(
                f"its controller runs on {holder['host']}",
                where=str(directory.path),
                do="Cancel the run on that machine",
            )
        os.killpg(holder["group"], signal.SIGINT)


# For the controller


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
        if self._directory.cancelled.exists():  # before the lock named a process to interrupt
            self._stopped = signal.SIGINT
        os.chdir(self._directory.workdir)
        try:
            code = INTERRUPTED if self._stopped else self._snakemake(self._words())
        except MantikError as error:
            sys.stderr.write(f"{error}\n")
            code = 2
        if not self._directory.has_left_attempts:
            self._directory.write_end(code)
            self._settle()
        return code

    def _words(self) -> list[str]:
        from ..mlproject.single_rule import prepare_single_rule, snakemake_command

        request = self._directory.request
        site = f"{request.site}={self._directory.path / request.config}"
        snakefile = prepare_single_rule(
            Path(), request.entry_point,
            [f"{name}={value}" for name, value in request.values.items()],
            [f"{name}={value}" for name, value in request.extra.items()],
            site=site, inputs=[], outputs=[], going_on=request.going_on,
        )  # fmt: skip
        # The user's profiles are for other workflows.
        profiles = ["--profile", "none", "--workflow-profile", "none"]
        return snakemake_command(snakefile, site, [*profiles, "--mantik-on-interrupt", "cancel"])

    def _snakemake(self, words: list[str]) -> int:
        if self._stopped:
            return INTERRUPTED
        self._child = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[self._lock])
        if self._stopped:  # between the check above and the start
            self._child.send_signal(self._stopped)
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stopped = number
        # Ctrl-C signals the whole group; the other signals reach this process alone.
        if self._child is not None and number != signal.SIGINT:
            self._child.send_signal(number)

    def _settle(self) -> None:
        try:
            settle_run(self._directory)
        except MantikError as error:
            # The next command that looks at the run tries again.
            sys.stderr.write(f"MLflow does not know yet that the run has ended. {error}\n")


def main() -> int:
    """Run the controller of the run directory given as the first argument."""
    return _Controller(RunDirectory(Path(sys.argv[1])), int(sys.argv[2])).run()


if __name__ == "__main__":
    sys.exit(main())
