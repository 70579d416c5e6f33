"""The command `smk-mantik`."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated

import typer

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError

_FAILED = 2
"""Exit code after an error."""

_INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main() -> None:
    """Run the command and report a `MantikError` as a message, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may not be valid text
            stream.reconfigure(errors="backslashreplace")
    try:
        with _here():
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
    from snakemake_executor_plugin_mantik.cli.bootstrap import bootstrap
    from snakemake_executor_plugin_mantik.cli.cancel import cancel
    from snakemake_executor_plugin_mantik.cli.check import check
    from snakemake_executor_plugin_mantik.cli.clean import clean
    from snakemake_executor_plugin_mantik.cli.docs import docs
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
    from snakemake_executor_plugin_mantik.cli.schema import schema
    from snakemake_executor_plugin_mantik.cli.track import track
    from snakemake_executor_plugin_mantik.cli.watch import watch

    app = typer.Typer(
        name="smk-mantik",
        help="Run Snakemake rules as jobs at HPC sites behind REST APIs.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.command()(init)
    app.command()(check)
    app.command()(render)
    app.command(cls=Passing)(plan)
    app.command()(schema)
    app.command(context_settings={"allow_interspersed_args": True})(run)
    app.command(context_settings={"allow_interspersed_args": True})(bootstrap)
    app.command()(jobs)
    app.command()(watch)
    app.command()(logs)
    app.command()(report)
    app.command(cls=Evaluating)(ls)
    app.command(cls=Evaluating)(get)
    app.command()(put)
    app.command()(cancel)
    app.command()(clean)
    app.command()(track)
    app.command()(docs)
    app.add_typer(runs.runs_app, name="runs")
    app.add_typer(schedule.schedule_app, name="schedule")
    app.add_typer(sandbox.sandbox_app, name="sandbox")
    return app
