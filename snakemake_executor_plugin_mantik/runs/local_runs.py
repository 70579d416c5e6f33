"""Find the runs submitted from this machine, read their logs, and end them."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final

from ..common.errors import MantikError, UserError
from ..common.state_directory import STATE
from ..config.reading import read_config_named
from ..connections.connect import visit_site
from ..journal import JOURNAL_FILE, AttemptRecord
from ..sites.base import Site
from ..views.sites import LOOK_S, PIECE, JobLog
from ..views.workflow import present_attempts
from . import controller
from .directories import NEW_PREFIX, RunDirectory, runs_home

_SHORTEST: Final = 4
"""The least characters of a run's id that identify it."""


def list_local_runs() -> list[RunDirectory]:
    """List the runs submitted from this machine, the latest first, without unreadable ones."""
    found = []
    for each in _directories():
        with suppress(MantikError):
            found.append((each.request.created, each))
    return [each for _, each in sorted(found, key=lambda pair: pair[0], reverse=True)]


def find_local_run(word: str) -> RunDirectory | None:
    """Find a run of this machine by its id, the beginning of its id, or its name.

    Raises:
        UserError: several runs match.
        MantikError: the request of one whose id matches cannot be read.
    """
    if "/" in word:
        return None
    if (named := RunDirectory(runs_home() / word)).request_file.is_file():
        found = [named]
    else:
        near = len(word) >= _SHORTEST
        found = [each for each in _directories() if near and each.path.name.startswith(word)]
    for each in found:
        each.request  # noqa: B018 - it has to be readable
    found = found or [each for each in list_local_runs() if each.request.name == word]
    if len(found) > 1:
        raise ambiguous_run(word, [each.request.run_id for each in found])
    return found[0] if found else None


def ambiguous_run(word: str, ids: list[str]) -> UserError:
    """Return the error for a word that matches several runs."""
    listed = "".join(f"\n  {run_id}" for run_id in ids)
    return UserError(f"{word!r} matches several runs:{listed}", do="Use the id of one of them")


def _directories() -> list[RunDirectory]:
    runs = runs_home()
    paths = [p for p in runs.iterdir() if p.is_dir()] if runs.is_dir() else []
    return [RunDirectory(path) for path in paths if not path.name.startswith(NEW_PREFIX)]


def cancel_run(run: RunDirectory, say: Callable[[str], None]) -> None:
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
    run.cancelled.touch()
    if run.alive:
        controller.interrupt_controller(run)
        try:
            controller.wait_for_controller(run)
        except KeyboardInterrupt:
            # As at a terminal: a second Ctrl-C stops waiting for the site.
            controller.interrupt_controller(run)
            raise
    if run.end is None:
        _without_controller(run, say)


def _without_controller(run: RunDirectory, say: Callable[[str], None]) -> None:
    lock = controller.hold_directory(run)
    if lock is None:
        raise UserError(
            "its controller has just been started again", where=f"run {run.request.run_id}",
            do="Cancel it again",
        )  # fmt: skip
    with lock:
        if (run.workdir / STATE / JOURNAL_FILE).exists():
            _smk_mantik(run, say, "cancel", "--all")
        if run.has_left_attempts:
            raise MantikError(
                f"{run.request.site} did not confirm that the job was cancelled, or the job had"
                " already ended",
                where=f"run {run.request.run_id}",
                do=f"Try again, or: smk-mantik runs continue {run.request.run_id}",
            )
        run.write_end(controller.INTERRUPTED)


def clean_run(run: RunDirectory, say: Callable[[str], None]) -> None:
    """Remove the files of a run that is over from its site.

    Raises:
        MantikError: files are, or may be, left at the site.
    """
    if (run.workdir / STATE / JOURNAL_FILE).exists():
        _smk_mantik(run, say, "clean", "--yes", "--force")


def remove_run(run: RunDirectory) -> None:
    """Remove the directory of a run that is over.

    Raises:
        UserError: the run is not over.
        MantikError: the directory cannot be removed.
    """
    lock = controller.hold_directory(run)
    if lock is None:
        raise _not_over(run, "it is under way")
    with lock:
        if run.end is None:
            raise _not_over(run, "it is not over")
        try:
            shutil.rmtree(run.path)
        except OSError as error:
            raise MantikError(
                f"it cannot be removed ({error.strerror or error})",
                where=str(run.path),
                do="Remove it by hand",
            ) from None


def _not_over(run: RunDirectory, how: str) -> UserError:
    return UserError(
        how, where=f"run {run.request.run_id}",
        do=f"Cancel it first: smk-mantik runs cancel {run.request.run_id}",
    )  # fmt: skip


def _smk_mantik(run: RunDirectory, say: Callable[[str], None], *words: str) -> None:
    """Run `smk-mantik` in the workflow's directory and write its output with `say`.

    Raises:
        MantikError: the command failed.
    """
    environ = controller.controller_environment(run, os.environ)
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik", *words],
        cwd=run.workdir, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    output = ended.stdout.strip()
    if ended.returncode != 0:
        raise MantikError(output.removeprefix("smk-mantik: "), where=f"run {run.request.run_id}")
    for line in output.splitlines():
        say(line)


_Write = Callable[[str], None]


def write_controller_log(run: RunDirectory, write: _Write, *, follow: bool) -> None:
    """Write the output of a run's controller and Snakemake.

    With `follow`, continue with new output until the controller ends.
    """
    with run.log.open(errors="replace") as file:
        while True:
            # Check before reading: the next round reads what is written after the check.
            alive = follow and run.alive
            while text := file.read(PIECE):
                write(text)
            if not alive:
                return
            time.sleep(LOOK_S)


def write_job_log(run: RunDirectory, write: _Write, *, follow: bool) -> bool:
    """Write the output of a run's job, read from the site until it has been downloaded.

    With `follow`, continue with new output until the controller ends.

    Returns:
        Whether the run had a job, which may have had output.

    Raises:
        MantikError: the output is at the site and cannot be read there. With `follow`, a failed
            read is repeated.
    """
    source = JobLog(
        run.workdir,
        lambda: next(reversed(present_attempts(run.attempts)), None),
        lambda record: _site(run, record),
        is_controlled=lambda: run.alive,
        is_over=lambda: not run.alive,
    )
    return asyncio.run(source.copy(write, follow=follow))


def _site(run: RunDirectory, record: AttemptRecord) -> AbstractAsyncContextManager[Site]:
    """Connect to the site of an attempt, independently of the controller."""
    path = str(run.path / run.request.config)
    loaded = read_config_named(record.site, path, run.workdir, project=None)
    return visit_site(record.site, loaded, run.workdir, run.request.account or None)
