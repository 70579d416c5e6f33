"""The command `smk-mantik`."""

import importlib
import io
import os
import sys
from importlib import metadata
from typing import Annotated, Any, Final

import typer

from ..adapter.snakemake_errors import check_snakemake_version
from ..common.errors import MantikError, UserError
from .shared import WRONG, App, Evaluating, Passing

_INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_PREPARE = "Before a run"
_JOBS = "The jobs of the workflow in this directory"
_FILES = "Their files"
_RUNS = "Without a Snakefile: entry points of an MLproject, and functions"

_PASSING_ON: Final = {"context_settings": {"allow_interspersed_args": True}}

_COMMANDS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "init": ("init:init", _PREPARE, {}),
    "check": ("check:check", _PREPARE, {}),
    "bootstrap": ("bootstrap:bootstrap", _PREPARE, _PASSING_ON),
    "docs": ("docs:docs", _PREPARE, {}),
    "sandbox": ("sandbox:sandbox_app", _PREPARE, {}),
    "plan": ("plan:plan", _JOBS, {"cls": Passing}),
    "render": ("plan:render", _JOBS, {}),
    "jobs": ("watch:jobs", _JOBS, {}),
    "watch": ("watch:watch", _JOBS, {}),
    "logs": ("logs:logs", _JOBS, {}),
    "exec": ("logs:exec_", _JOBS, {"context_settings": {"allow_interspersed_args": False}}),
    "cancel": ("cancel:cancel", _JOBS, {}),
    "unlock": ("cancel:unlock", _JOBS, {}),
    "report": ("report:report", _JOBS, {}),
    "track": ("track:track", _JOBS, {}),
    "ls": ("get:ls", _FILES, {"cls": Evaluating}),
    "get": ("get:get", _FILES, {"cls": Evaluating}),
    "put": ("put:put", _FILES, {}),
    "clean": ("cancel:clean", _FILES, {}),
    "run": ("run:run", _RUNS, _PASSING_ON),
    "call": ("run:call", _RUNS, _PASSING_ON),
    "runs": ("runs:runs_app", _RUNS, {}),
    "schedule": ("schedule:schedule_app", _RUNS, {}),
}
"""The subcommands: where each stands, the panel of `--help` that lists it, and its settings."""


def main() -> None:
    """Run the command and report a `MantikError` as a message, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may not be valid text
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise UserError(
                "the directory that you are in was removed",
                do="Change into an existing one, and run the command again",
            ) from None
        check_snakemake_version()  # before commands are imported, most of which need it
        _app(sys.argv[1] if len(sys.argv) > 1 else "")()
    except MantikError as error:
        named = "" if error.where.startswith("smk-mantik ") else "smk-mantik: "
        typer.echo(f"{named}{error}", err=True)
        sys.exit(WRONG)
    except KeyboardInterrupt:  # before the command starts: imports take a second
        sys.exit(_INTERRUPTED)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"smk-mantik {metadata.version('snakemake-executor-plugin-mantik')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run Snakemake rules as jobs at HPC sites behind REST APIs."""


def _app(wanted: str = "") -> typer.Typer:
    """The whole command; with the name of a subcommand only that one, to import no other."""
    app = App(
        name="smk-mantik",
        help="Run Snakemake rules as jobs at HPC sites behind REST APIs.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in [wanted] if wanted in _COMMANDS else _COMMANDS:
        place, panel, settings = _COMMANDS[name]
        module, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(f".{module}", __name__), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel, **settings)(command)
    return app
