"""`smk-mantik sandbox`: run a site on this machine, for first steps and for tests."""

import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_sandbox.settings import (
    APIS,
    SCHEDULERS,
    FirecrestSettings,
    SandboxError,
    SandboxSettings,
    SiteOption,
    Timing,
    machine_slots,
)

from ..common.errors import UserError, install_command
from ..config.reading import check_site_name
from ..sites.credentials import variable_prefix
from .shared import App, run_child, warn

if TYPE_CHECKING:
    from hpc_sandbox.server import Sandbox

_BACKEND_CONFIG = """\
# Written by `smk-mantik sandbox` for a site on this machine. Times are shorter than at a real one.
{site}Resources:
  Queue: {queue}
Site:
  Scheduler: slurm
  Poll: 5s
  TermGrace: 3s
"""
_FIRECREST = """\
Firecrest:
  ApiUrl: {url}
  TokenUrl: {token_url}
  Machine: {machine}
"""

_DIRECTORY = "MANTIK_SANDBOX_DIR"
"""The variable with the sandbox's directory; files of jobs stay in it after the end."""
_TOKEN = "MANTIK_SANDBOX_TOKEN"  # noqa: S105 - the name of a variable
"""The variable with the token of the sandbox's control API, which causes failures on demand."""

sandbox_app = App(
    name="sandbox", help="A site on this machine that runs jobs as local processes.",
    no_args_is_help=True,
)  # fmt: skip
_SITES: Any = ("hpc1=unicore",)


@sandbox_app.command("run", context_settings={"allow_interspersed_args": False})
def run_in_sandbox(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command and its arguments, after --.")
    ] = None,
    *,
    site: Annotated[
        list[str],
        typer.Option(help="A site and its API, NAME=unicore or NAME=firecrest; repeatable."),
    ] = _SITES,
    scheduler: Annotated[
        str, typer.Option(help="What runs the jobs: local processes, or this machine's slurm.")
    ] = "local",
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, help="CPUs that the running jobs of a site share; default: the machine's."
        ),
    ] = None,
    status_interval: Annotated[
        float,
        typer.Option(
            min=0.01, help="UNICORE: seconds between two polls of its scheduler; real: 10 to 60."
        ),
    ] = Timing.status_interval,
    death_lag: Annotated[
        float,
        typer.Option(
            min=0, help="UNICORE: seconds that a killed job keeps its old status; real: 134."
        ),
    ] = Timing.death_lag,
    accounting_lag: Annotated[
        float,
        typer.Option(
            min=0, help="firecREST: delay of its reports on jobs, in seconds; real: up to 4."
        ),
    ] = FirecrestSettings.accounting_lag,
    token_lifetime: Annotated[
        float,
        typer.Option(
            min=1, help="firecREST: how long a token is valid, in seconds; 30 must be left."
        ),
    ] = FirecrestSettings.token_lifetime,
) -> None:
    """Start a sandbox, run COMMAND with its credentials, stop it, return COMMAND's exit code.

    Each site's backend config is $MANTIK_SANDBOX_DIR/NAME.yaml, and the credentials are in
    COMMAND's environment. Without COMMAND, print these variables for another terminal, and run
    until Ctrl-C.
    """
    if command and shutil.which(command[0]) is None:
        raise UserError(
            f"there is no command {command[0]!r}",
            where="smk-mantik sandbox run",
            do="Correct the name after --",
        )
    if scheduler not in SCHEDULERS:
        raise UserError(
            f"there is no scheduler {scheduler!r}",
            where="--scheduler",
            do=f"Use one of: {', '.join(SCHEDULERS)}",
        )
    settings = SandboxSettings(
        timing=Timing(status_interval=status_interval, death_lag=death_lag),
        slots=slots or machine_slots(),
        scheduler=scheduler,
        firecrest=FirecrestSettings(accounting_lag=accounting_lag, token_lifetime=token_lifetime),
    )
    with _sandbox(site, settings) as box:
        variables = {**environment_of(box), _TOKEN: box.token}
        names = " and ".join(f"{option.name} ({option.api})" for option in box.options)
        configs = ", ".join(str(box.directory / f"{option.name}.yaml") for option in box.options)
        if command:
            warn(f"Sandbox with {names} until the command ends. Backend configs: {configs}")
            raise typer.Exit(run_child(command, {**os.environ, **variables}))
        over = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: over.set())
        for name, value in variables.items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        typer.echo(f"# Backend configs: {configs}. Ctrl-C ends the sandbox and all its jobs.")
        sys.stdout.flush()
        over.wait()


def backend_config(box: "Sandbox", name: str) -> str:
    """Return the backend config of one of a sandbox's sites."""
    from hpc_sandbox.firecrest.site import FirecrestServer

    site = box.site(name)
    where = (
        _FIRECREST.format(url=site.url, token_url=site.token_url, machine=site.machine)
        if isinstance(site, FirecrestServer)
        else f"UnicoreApiUrl: {site.url}\n"
    )
    return _BACKEND_CONFIG.format(site=where, queue=site.scheduler.partitions[0].name)


def environment_of(box: "Sandbox") -> dict[str, str]:
    """Return the environment variables with which the executor uses a sandbox."""
    found = {_DIRECTORY: str(box.directory), "MANTIK_COMPUTE_BUDGET_ACCOUNT": "sandbox"}
    for option in box.options:
        firecrest = option.api == "firecrest"
        kinds = ("CLIENT_ID", "CLIENT_SECRET") if firecrest else ("USERNAME", "PASSWORD")
        for kind, value in zip(kinds, box.credentials(option.name), strict=True):
            found[f"{variable_prefix(option.name)}_{kind}"] = value
    return found


def _site_option(text: str) -> SiteOption:
    """Read `NAME=API`, or `NAME` for UNICORE."""
    name, _, api = text.partition("=")
    api = api or APIS[0]
    where = f"--site {text}"
    if mistake := check_site_name(name):
        raise UserError(
            mistake.partition(";")[0], where=where, do="Use another name, as in --site hpc1=unicore"
        )
    if api not in APIS:
        raise UserError(
            f"there is no API {api!r}", where=where, do=f"Use one of: {', '.join(APIS)}"
        )
    return SiteOption(name, api)


@contextmanager
def _sandbox(sites: Sequence[str], settings: SandboxSettings) -> Iterator["Sandbox"]:
    """Run a sandbox, in the directory from the environment or in a temporary one."""
    options = [_site_option(text) for text in sites]
    if len({variable_prefix(option.name) for option in options}) < len(options):
        raise UserError(
            "two sites have the same name", where="--site", do="Use a different name for each"
        )
    sandbox = _sandbox_class()
    given = os.environ.get(_DIRECTORY)
    with ExitStack() as stack:
        directory = given or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="mantik-sandbox-", ignore_cleanup_errors=True)
        )
        try:
            box = stack.enter_context(sandbox(Path(directory), options, settings))
        except SandboxError as error:
            raise UserError(error.what, where=error.where, do=error.do) from error
        for option in options:
            (box.directory / f"{option.name}.yaml").write_text(backend_config(box, option.name))
        yield box


def _sandbox_class() -> "type[Sandbox]":
    """Import the class when needed, because the sandbox's libraries are an extra."""
    try:
        from hpc_sandbox.server import Sandbox
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "h11", "python_multipart"):
            raise
        raise UserError(
            f"the sandbox needs the package {error.name}, which is not installed",
            where="smk-mantik sandbox",
            do=f"Install it with: {install_command('sandbox')}",
        ) from error
    return Sandbox
