"""`smk-mantik track`: publish a workflow's runs to MLflow that are not published yet."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import typer

from ..common.errors import JournalLocked, MantikError, UserError
from ..common.humanize import humanize_count
from ..common.locks import is_locked
from ..common.state_directory import STATE
from ..journal import JOURNAL_FILE, Journal
from ..tracking.cursor import count_unpublished
from ..tracking.process import DRAIN_S, WORKER_LOCK
from ..tracking.store import DIRECTORY
from ..tracking.worker_client import WorkerClient
from .shared import NOT_DONE, Workdir, require_mlflow, say, warn

_IMPORT_S = 60.0
"""Seconds allowed for the import of MLflow, in addition to those for publishing."""


def track(
    directory: Workdir = Path(),
) -> None:
    """Publish to MLflow what it has missed of a workflow's jobs, for example while down."""
    kept = directory / DIRECTORY
    if not kept.exists() or not (directory / STATE / JOURNAL_FILE).exists():
        raise UserError(
            "no run has been tracked", where=str(directory), do="Set the working directory with -d"
        )
    require_mlflow()
    try:
        _settle(directory)
        before = count_unpublished(directory)
        why = _work(directory, kept) if before else ""
        left = count_unpublished(directory)
    except (OSError, sqlite3.Error) as error:
        raise MantikError(f"it cannot be used ({error})", where=str(kept)) from error
    text = f"{humanize_count(max(0, before - left), 'run')} published, {left} left"
    if left:
        say(f"{text}: {why or f'see {kept}/worker.log'}")
        raise typer.Exit(NOT_DONE)
    typer.echo(f"{text}.")


def _work(directory: Path, kept: Path) -> str:
    """Let a worker publish what it can; return why it could not publish the rest."""
    if is_locked(kept / WORKER_LOCK):
        return "another process is publishing them now."
    worker = WorkerClient(directory, warn)
    worker.wake()
    ended = worker.close(_IMPORT_S + DRAIN_S)
    return worker.why if ended else "publishing continues in the background."


def _settle(directory: Path) -> None:
    """End the MLflow runs of workflows whose Snakemake is gone and that have no open attempts.

    Do nothing while a controller holds the journal.
    """
    with suppress(JournalLocked), closing(Journal(directory / STATE)) as journal:
        journal.tracked.settle()
