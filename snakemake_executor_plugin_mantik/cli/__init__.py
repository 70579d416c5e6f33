"""The command `smk-mantik`."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer

from snakemake_executor_plugin_mantik.adapter.snakemake_version import check_snakemake_version
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
    from snakemake_executor_plugin_mantik.cli import runs, sandbox, schedule
    from snakemake_executor_plugin_mantik.cli.apps import App
    from snakemake_executor_plugin_mantik.cli.bootstrap import bootstrap
    from snakemake_executor_plugin_mantik.cli.call import call
    from snakemake_executor_plugin_mantik.cli.cancel import cancel
    from snakemake_executor_plugin_mantik.cli.check import check
    from snakemake_executor_plugin_mantik.cli.clean import clean
    from snakemake_executor_plugin_mantik.cli.docs import docs, schema
    from snakemake_executor_plugin_mantik.cli.evaluation import Evaluating
    from snakemake_executor_plugin_mantik.cli.get import get
    from snakemake_executor_plugin_mantik.cli.init import init
    from snakemake_executor_plugin_mantik.cli.jobs import jobs
    from snakemake_executor_plugin_mantik.cli.logs import logs
    from snakemake_executor_plugin_mantik.cli.ls import ls
    from snakemake_executor_plugin_mantik.cli.plan import Passing, plan
    from snakemake_executor_plugin_mantik.cli.put import put
    from snakemake_executor_plugin_mantik.cli.render import render
    from snakemake_executor_plugin_mantik.cli.report import report
    from snakemake_executor_plugin_mantik.cli.run import run
    from snakemake_executor_plugin_mantik.cli.track import track
    from snakemake_executor_plugin_mantik.cli.watch import watch

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
