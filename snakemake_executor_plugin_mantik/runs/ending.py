"""Cancel runs, and remove runs that are over."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.journal import JOURNAL_FILE
from snakemake_executor_plugin_mantik.runs import controller
from snakemake_executor_plugin_mantik.runs.local_runs import LocalRun, read_local_run

_INTERRUPTED = 130


def cancel_run(run: LocalRun, say: Callable[[str], None]) -> None:
    """Cancel a run and wait until its site has confirmed it; MLflow is not asked.

    `say` writes a line for the user. `settle_run` reports the end to MLflow.

    Raises:
        UserError: the run is over, its controller is on another machine, or was just started again.
        MantikError: its job may still run.
    """
    if run.end is not None:
        raise UserError(
            "it is over already", where=f"run {run.request.run_id}",
            do=f"See how it ended: smk-mantik runs show {run.request.run_id}",
        )  # fmt: skip
    run.directory.cancelled.touch()
    if run.alive:
        controller.interrupt_controller(run.directory)
        try:
            controller.wait_for_controller(run.directory)
        except KeyboardInterrupt:
            # As at a terminal: a second Ctrl-C stops waiting for the site.
            controller.interrupt_controller(run.directory)
            raise
    if read_local_run(run.directory).end is None:
        _without_controller(run, say)


def _without_controller(run: LocalRun, say: Callable[[str], None]) -> None:
    lock = controller.hold_directory(run.directory)
    if lock is None:
        raise UserError(
            "its controller has just been started again", where=f"run {run.request.run_id}",
            do="Cancel it again",
        )  # fmt: skip
    with lock:
        if (run.workdir / STATE / JOURNAL_FILE).exists():
            _at_site(run, say)
        if controller.has_left_tries(run.workdir):
            raise MantikError(
                f"{run.request.site} did not confirm that the job was cancelled, or the job had"
                " already ended",
                where=f"run {run.request.run_id}",
                do=f"Try again, or: smk-mantik runs continue {run.request.run_id}",
            )
        run.directory.write_end(_INTERRUPTED)


def _at_site(run: LocalRun, say: Callable[[str], None]) -> None:
    for line in _smk_mantik(run, "cancel", "--all"):
        say(line)


def clean_run(run: LocalRun, say: Callable[[str], None]) -> None:
    """Remove the files of a run that is over from its site.

    Raises:
        MantikError: files are, or may be, left at the site.
    """
    if (run.workdir / STATE / JOURNAL_FILE).exists():
        for line in _smk_mantik(run, "clean", "--yes", "--force"):
            say(line)


def remove_run(run: LocalRun) -> None:
    """Remove the directory of a run that is over.

    Raises:
        UserError: the run is not over.
        MantikError: the directory cannot be removed.
    """
    lock = controller.hold_directory(run.directory)
    if lock is None:
        raise _not_over(run, "it is under way")
    with lock:
        if read_local_run(run.directory).end is None:
            raise _not_over(run, "it is not over")
        try:
            shutil.rmtree(run.directory.path)
        except OSError as error:
            raise MantikError(
                f"it cannot be removed ({error.strerror or error})",
                where=str(run.directory.path),
                do="Remove it by hand",
            ) from None


def _not_over(run: LocalRun, how: str) -> UserError:
    return UserError(
        how, where=f"run {run.request.run_id}",
        do=f"Cancel it first: smk-mantik runs cancel {run.request.run_id}",
    )  # fmt: skip


def _smk_mantik(run: LocalRun, *words: str) -> list[str]:
    """Run `smk-mantik` in the workflow's directory and return the lines of its output.

    Raises:
        MantikError: the command failed.
    """
    environ = controller.controller_environment(run.request, run.directory, os.environ)
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik", *words],
        cwd=run.workdir, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    output = ended.stdout.strip()
    if ended.returncode != 0:
        raise MantikError(output.removeprefix("smk-mantik: "), where=f"run {run.request.run_id}")
    return output.splitlines()
