"""Find the runs submitted from this machine, read their logs, and end them."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.config.reading import read_config_named
from snakemake_executor_plugin_mantik.connections.connect import visit_site
from snakemake_executor_plugin_mantik.journal import JOURNAL_FILE, TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.views.job_log import LOOK_S, PIECE, JobLog
from snakemake_executor_plugin_mantik.views.workflow import present_tries

from . import controller
from .directories import NEW_PREFIX, RunDirectory, RunRequest, read_request, runs_home

_SHORTEST: Final = 4
"""The least characters of a run's id that identify it."""


@dataclass(frozen=True)
class LocalRun:
    """A run that was submitted from this machine.

    Attributes:
        alive: whether its controller is alive.
        end: how its workflow ended (`RunDirectory.read_end`); None if it is not over.
    """

    directory: RunDirectory
    request: RunRequest
    alive: bool
    end: Mapping[str, Any] | None

    @property
    def gone(self) -> bool:
        """Whether the run is not over, but its controller is gone."""
        return not self.alive and self.end is None

    @property
    def workdir(self) -> Path:
        """The snapshot of the project: the workflow's working directory."""
        return self.directory.path / self.request.folder

    @property
    def tries(self) -> list[TryRecord]:
        """The tries of its job in the journal, the oldest first."""
        return controller.tries_in(self.workdir)


def read_local_run(directory: RunDirectory) -> LocalRun:
    """Read a run from its directory.

    Raises:
        MantikError: the directory's request cannot be read.
    """
    request = read_request(directory)
    # In this order: a controller records the end while it is alive.
    alive = controller.is_alive(directory)
    return LocalRun(directory, request, alive, directory.read_end())


def list_local_runs() -> list[LocalRun]:
    """List the runs submitted from this machine, the latest first, without unreadable ones."""
    found = []
    for path in _directories():
        try:
            found.append(read_local_run(RunDirectory(path)))
        except MantikError:
            continue
    return sorted(found, key=lambda each: each.request.created, reverse=True)


def find_local_run(word: str) -> LocalRun | None:
    """Find a run of this machine by its id, the beginning of its id, or its name.

    Raises:
        UserError: several runs match.
        MantikError: the request of one whose id matches cannot be read.
    """
    if "/" in word:
        return None
    if (runs_home() / word / "request.json").is_file():
        return read_local_run(RunDirectory(runs_home() / word))
    close = [p for p in _directories() if len(word) >= _SHORTEST and p.name.startswith(word)]
    found = [read_local_run(RunDirectory(path)) for path in close]
    found = found or [each for each in list_local_runs() if each.request.name == word]
    if len(found) > 1:
        raise ambiguous_run(word, [each.request.run_id for each in found])
    return found[0] if found else None


def ambiguous_run(word: str, ids: list[str]) -> UserError:
    """Return the error for a word that matches several runs."""
    listed = "".join(f"\n  {run_id}" for run_id in ids)
    return UserError(f"{word!r} matches several runs:{listed}", do="Use the id of one of them")


def _directories() -> list[Path]:
    runs = runs_home()
    if not runs.is_dir():
        return []
    return [p for p in runs.iterdir() if not p.name.startswith(NEW_PREFIX) and p.is_dir()]


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


_Write = Callable[[str], None]


def write_controller_log(run: LocalRun, write: _Write, *, follow: bool) -> None:
    """Write the output of a run's controller and Snakemake.

    With `follow`, continue with new output until the controller ends.
    """
    with run.directory.log.open(errors="replace") as file:
        while True:
            # Check before reading: the next round reads what is written after the check.
            alive = follow and controller.is_alive(run.directory)
            while text := file.read(PIECE):
                write(text)
            if not alive:
                return
            time.sleep(LOOK_S)


def write_job_log(run: LocalRun, write: _Write, *, follow: bool) -> bool:
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
        lambda: next(reversed(present_tries(run.tries)), None),
        lambda record: _site(run, record),
        is_controlled=lambda: controller.is_alive(run.directory),
        is_over=lambda: not controller.is_alive(run.directory),
    )
    return asyncio.run(source.copy(write, follow=follow))


def _site(run: LocalRun, record: TryRecord) -> AbstractAsyncContextManager[Site]:
    """Connect to the site of a try, independently of the controller."""
    path = str(run.directory.path / run.request.config)
    loaded = read_config_named(record.site, path, run.workdir, project=None)
    return visit_site(record.site, loaded, run.workdir, run.request.account or None)
