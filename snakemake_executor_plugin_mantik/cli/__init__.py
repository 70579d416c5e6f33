"""The command `smk-mantik`."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer

from snakemake_executor_plugin_mantik.adapter.snakemake_errors import check_snakemake_version
from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError

_FAILED = 2
"""Exit code after an error."""

_INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_PREPARE = "Before a run"
_JOBS = "The jobs of the workflow in this directory"
_FILES = "Their files"
_RUNS = "Without a Snakefile: entry points of an MLproject, and functions"


def main() -> None:
    """Run the command and report a `MantikError` as a message, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may not be valid text
            stream.reconfigure(errors="backslashreplace")
    try:
        with _here():
            check_snakemake_version()  # before commands are imported, most of which need it
            _app()()
    except MantikError as error:
        typer.echo(f"smk-mantik: {error}", err=True)
        sys.exit(_FAILED)
    except KeyboardInterrupt:  # before the command starts: imports take a second
        sys.exit(_INTERRUPTED)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"smk-mantik {metadata.version('snakemake-executor-plugin-mantik')}")
        raise typer.Exit


@contextmanager
def _here() -> Iterator[None]:
    """Replace a `FileNotFoundError` by a clear error if the working directory was removed."""
    try:
        yield
    except FileNotFoundError:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise UserError(
                "the directory that you are in was removed",
                do="Change into an existing one, and run the command again",
            ) from None
        raise


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run Snakemake rules as jobs at HPC sites behind REST APIs."""


def _app() -> typer.Typer:
    from . import runs, sandbox, schedule
    from .bootstrap import bootstrap
    from .cancel import cancel, clean
    from .check import check
    from .docs import docs, schema
    from .get import get, ls
    from .init import init
    from .jobs import jobs
    from .logs import logs
    from .plan import plan, render
    from .put import put
    from .report import report
    from .run import call, run
    from .shared import App, Evaluating, Passing
    from .track import track
    from .watch import watch

    app = App(
        name="smk-mantik",
        help="Run Snakemake rules as jobs at HPC sites behind REST APIs.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    passing_on: dict[str, Any] = {"context_settings": {"allow_interspersed_args": True}}
    app.command(rich_help_panel=_PREPARE)(init)
    app.command(rich_help_panel=_PREPARE)(check)
    app.command(rich_help_panel=_PREPARE)(schema)
    app.command(rich_help_panel=_PREPARE, **passing_on)(bootstrap)
    app.command(rich_help_panel=_PREPARE)(docs)
    app.add_typer(sandbox.sandbox_app, name="sandbox", rich_help_panel=_PREPARE)
    app.command(rich_help_panel=_JOBS, cls=Passing)(plan)
    app.command(rich_help_panel=_JOBS)(render)
    app.command(rich_help_panel=_JOBS)(jobs)
    app.command(rich_help_panel=_JOBS)(watch)
    app.command(rich_help_panel=_JOBS)(logs)
    app.command(rich_help_panel=_JOBS)(cancel)
    app.command(rich_help_panel=_JOBS)(report)
    app.command(rich_help_panel=_JOBS)(track)
    app.command(rich_help_panel=_FILES, cls=Evaluating)(ls)
    app.command(rich_help_panel=_FILES, cls=Evaluating)(get)
    app.command(rich_help_panel=_FILES)(put)
    app.command(rich_help_panel=_FILES)(clean)
    app.command(rich_help_panel=_RUNS, **passing_on)(run)
    app.command(rich_help_panel=_RUNS, **passing_on)(call)
    app.add_typer(runs.runs_app, name="runs", rich_help_panel=_RUNS)
    app.add_typer(schedule.schedule_app, name="schedule", rich_help_panel=_RUNS)
    return app
