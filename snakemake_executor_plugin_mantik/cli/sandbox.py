"""`smk-mantik sandbox`: run a site on this machine, for first steps and for tests."""

import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from snakemake_executor_plugin_mantik.cli.apps import App
from snakemake_executor_plugin_mantik.cli.children import run_child
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.installing import install_command
from snakemake_executor_plugin_mantik.sandbox.settings import (
    SCHEDULERS,
    FirecrestSettings,
    SandboxSettings,
    SiteOption,
    Timing,
    machine_slots,
)

if TYPE_CHECKING:
    from snakemake_executor_plugin_mantik.sandbox.server import Sandbox

_DIRECTORY = "MANTIK_SANDBOX_DIR"
"""The variable with the sandbox's directory; files of jobs stay in it after the end."""
_TOKEN = "MANTIK_SANDBOX_TOKEN"  # noqa: S105 - the name of a variable
"""The variable with the token of the sandbox's control API, which causes failures on demand."""

sandbox_app = App(
    name="sandbox", help="A site on this machine that runs jobs as local processes.",
    no_args_is_help=True,
)  # fmt: skip

_Sites = Annotated[
    list[str],
    typer.Option("--site", help="A site and its API, NAME=unicore or NAME=firecrest; repeatable."),
]
_Slots = Annotated[
    int | None,
    typer.Option(min=1, help="CPUs that the running jobs of a site share; default: the machine's."),
]
_StatusInterval = Annotated[
    float,
    typer.Option(
        min=0.01, help="UNICORE: seconds between two polls of its scheduler; real: 10 to 60."
    ),
]
_DeathLag = Annotated[
    float,
    typer.Option(min=0, help="UNICORE: seconds that a killed job keeps its old status; real: 134."),
]
_AccountingLag = Annotated[
    float,
    typer.Option(min=0, help="firecREST: delay of its reports on jobs, in seconds; real: up to 4."),
]
_TokenLifetime = Annotated[
    float,
    typer.Option(min=1, help="firecREST: how long a token is valid, in seconds; 30 must be left."),
]
_SchedulerName = Annotated[
    str,
    typer.Option(
        "--scheduler", help="What runs the jobs: local processes, or this machine's slurm."
    ),
]
_DEFAULT_SITES = ["hpc1=unicore"]


@sandbox_app.command("run", context_settings={"allow_interspersed_args": False})
def run_in_sandbox(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    *,
    site: _Sites = _DEFAULT_SITES,
    scheduler: _SchedulerName = "local",
    slots: _Slots = None,
    status_interval: _StatusInterval = Timing.status_interval,
    death_lag: _DeathLag = Timing.death_lag,
    accounting_lag: _AccountingLag = FirecrestSettings.accounting_lag,
    token_lifetime: _TokenLifetime = FirecrestSettings.token_lifetime,
) -> None:
    """Start a sandbox, run COMMAND with its credentials, stop it, return COMMAND's exit code.

    Each site's backend config is $MANTIK_SANDBOX_DIR/NAME.yaml, and the credentials are in
    COMMAND's environment.
    """
    if shutil.which(command[0]) is None:
        raise UserError(
            f"there is no command {command[0]!r}",
            where="smk-mantik sandbox run",
            do="Correct the name after --",
        )
    settings = SandboxSettings(
        timing=Timing(status_interval=status_interval, death_lag=death_lag),
        slots=slots or machine_slots(),
        scheduler=_scheduler(scheduler),
        firecrest=FirecrestSettings(accounting_lag=accounting_lag, token_lifetime=token_lifetime),
    )
    with _sandbox(site, settings) as box:
        code = run_child(command, {**os.environ, **box.environment(), _TOKEN: box.token})
    raise typer.Exit(code)


@sandbox_app.command()
def up(
    *,
    site: _Sites = _DEFAULT_SITES,
    scheduler: _SchedulerName = "local",
    slots: _Slots = None,
    status_interval: _StatusInterval = Timing.status_interval,
    death_lag: _DeathLag = Timing.death_lag,
    accounting_lag: _AccountingLag = FirecrestSettings.accounting_lag,
    token_lifetime: _TokenLifetime = FirecrestSettings.token_lifetime,
) -> None:
    """Start a sandbox that runs until Ctrl-C, and print the variables for another terminal."""
    over = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        over.set()

    settings = SandboxSettings(
        timing=Timing(status_interval=status_interval, death_lag=death_lag),
        slots=slots or machine_slots(),
        scheduler=_scheduler(scheduler),
        firecrest=FirecrestSettings(accounting_lag=accounting_lag, token_lifetime=token_lifetime),
    )
    with _sandbox(site, settings) as box:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        for name, value in box.environment().items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        typer.echo(f"export {_TOKEN}={shlex.quote(box.token)}")
        configs = ", ".join(str(box.config_path(option.name)) for option in box.options)
        typer.echo(f"# Backend configs: {configs}. Ctrl-C ends the sandbox and all its jobs.")
        sys.stdout.flush()
        over.wait()


def _scheduler(name: str) -> str:
    if name not in SCHEDULERS:
        raise UserError(
            f"there is no scheduler {name!r}",
            where="--scheduler",
            do=f"Use one of: {', '.join(SCHEDULERS)}",
        )
    return name


@contextmanager
def _sandbox(sites: Sequence[str], settings: SandboxSettings) -> Iterator["Sandbox"]:
    """Run a sandbox, in the directory from the environment or in a temporary one."""
    options = [SiteOption.parse(text) for text in sites]
    if len({option.variable for option in options}) < len(options):
        raise UserError(
            "two sites have the same name", where="--site", do="Use a different name for each"
        )
    sandbox = _sandbox_class()
    given = os.environ.get(_DIRECTORY)
    if given:
        with sandbox(Path(given), options, settings) as box:
            yield box
        return
    temporary = tempfile.TemporaryDirectory(prefix="mantik-sandbox-", ignore_cleanup_errors=True)
    with temporary as made, sandbox(Path(made), options, settings) as box:
        yield box


def _sandbox_class() -> "type[Sandbox]":
    """Import the class when needed, because the sandbox's libraries are an extra."""
    try:
        from snakemake_executor_plugin_mantik.sandbox.server import Sandbox
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "h11", "python_multipart"):
            raise
        raise UserError(
            f"the sandbox needs the package {error.name}, which is not installed",
            where="smk-mantik sandbox",
            do=f"Install it with: {install_command('sandbox')}",
        ) from error
    return Sandbox
