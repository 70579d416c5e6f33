"""What several commands share: options, tables, arguments of Snakemake, processes that they run."""

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from ..common.errors import UserError, install_command, json_text, printable
from ..common.state_directory import replace_file

if TYPE_CHECKING:
    from ..adapter.workflow_metadata import GraphFiles

NOT_DONE: Final = 1
"""Exit code if what a command is for was not done, or not wholly: a job may still run, say."""
WRONG: Final = 2
"""Exit code after an error, as if a file, a workflow, or with `--connect` a site has a mistake."""

# Options

Workdir = Annotated[
    Path,
    typer.Option(
        "--directory",
        "-d",
        exists=True,
        file_okay=False,
        help="The workflow's working directory.",
    ),
]
"""The working directory of a workflow that has run."""

Sites = Annotated[
    list[str] | None,
    typer.Option(
        "--site",
        metavar="[NAME=]FILE",
        help="A site's backend config, if it has moved since the last run; repeatable.",
    ),
]
"""The current paths of the backend configs of a workflow that has run."""

Segments = Annotated[
    int | None,
    typer.Option(
        "--continue",
        min=0,
        metavar="SEGMENTS",
        help="Go on past the walltime, in up to so many jobs, from --checkpoint.",
    ),
]
"""How many segments a run may have."""

Checkpoint = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="What the next job goes on from: a file, or with a trailing / a folder; several are"
        " separated by blanks.",
    ),
]
"""What the segments of a run go on from."""


SiteConfig = Annotated[
    str,
    typer.Option(
        "--site",
        metavar="[NAME=]FILE",
        help="The site's backend config.",
    ),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--param-list",
        "-P",
        metavar="NAME=VALUE",
        help="A parameter of the entry point.",
    ),
]
Extra = Annotated[
    list[str] | None,
    typer.Option(
        "--extra",
        metavar="NAME=VALUE",
        help="A parameter that the entry point does not declare: appended to the command.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="PATH", help="A file or folder that it reads; repeatable."),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        metavar="PATH",
        help="A file, or with a trailing / a folder, that it makes; repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EntryName = Annotated[
    str, typer.Option("--entry-point", "-e", help="The entry point, or a script.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended.")]
Project = Annotated[
    Path, typer.Option(help="The project folder; paths in configs are relative to it.")
]
ForSnakemake = Annotated[list[str] | None, typer.Argument(help="Options for snakemake, after --.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


# Commands


class Command(TyperCommand):
    """A command; its help has no `<bool>` at flags, and lines as long as the terminal is wide."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:  # noqa: A002
        # Typer keeps the line ends of all paragraphs but the first.
        lines = re.sub(r"(?<=\S)\n(?!\s|[-*] )", " ", inspect.cleandoc(help)) if help else help
        super().__init__(*args, help=lines, **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags without a type."""
        return _without_types(super().get_params(ctx))


_MEANT: Final = {
    "doctor": "smk-mantik check --connect",
    "download": "smk-mantik get",
    "dry-run": "smk-mantik plan",
    "help": "smk-mantik --help",
    "kill": "smk-mantik cancel",
    "ps": "smk-mantik jobs",
    "rerun": "snakemake",
    "resume": "snakemake",
    "retry": "snakemake",
    "schema": "smk-mantik docs --schema",
    "sites": "smk-mantik check --connect",
    "status": "smk-mantik jobs",
    "stop": "smk-mantik cancel",
    "submit": "smk-mantik runs submit",
    "tail": "smk-mantik logs --follow",
    "upload": "smk-mantik put",
    "validate": "smk-mantik check",
    "version": "smk-mantik --version",
}
"""The commands for words that other tools have taught people to type."""


class _Group(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or name the one that was meant."""
        if ctx.parent is None and args[0] in _MEANT:
            ctx.fail(f"There is no command '{args[0]}'; use: {_MEANT[args[0]]}")
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class App(typer.Typer):
    """A group of such commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[Any], Any]:
        """Add a command, as `typer.Typer.command` does; see `_spread`."""
        added = super().command(name, cls=cls or Command, **settings)
        return lambda command: added(_spread(command))


def is_config(site: str) -> bool:
    """Return whether a site is given by its backend config, `[NAME=]FILE`, and not by its name."""
    return "=" in site or os.path.exists(site)


def _spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter of a command that is a dataclass by options for its fields, if any."""
    hints = get_type_hints(command, include_extras=True)
    kept = next((name for name, kind in hints.items() if dataclasses.is_dataclass(kind)), None)
    if kept is None:
        return command
    kind = hints[kept]
    fields = inspect.signature(kind).parameters
    types = get_type_hints(kind, include_extras=True)

    def run(**given: Any) -> Any:
        options = kind(**{name: given.pop(name) for name in fields})
        return command(**given, **{kept: options})

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        parameters += fields.values() if name == kept else [parameter]
    functools.update_wrapper(run, command)
    run.__annotations__ = {p.name: types.get(p.name, hints.get(p.name)) for p in parameters}
    only = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=only, annotation=run.__annotations__[each.name]) for each in parameters]
    )
    return run


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


ALL_TARGETS: Final = "--all-targets"
NEEDED_BY: Final = "--needed-by"

_ARGUMENTS: Final = f"{__name__}.arguments"


class Evaluating(Command):
    """A command that takes Snakemake's arguments after `--` with an option that evaluates."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments after `--` for `read_files`, if the workflow is to be evaluated."""
        cut = args.index("--") if "--" in args else len(args)
        if not {ALL_TARGETS, NEEDED_BY}.intersection(args[:cut]):
            cut = len(args)
        ctx.meta[_ARGUMENTS] = args[cut + 1 :]
        rest: list[str] = super().parse_args(ctx, args[:cut])
        return rest


def read_files(context: typer.Context, directory: Path) -> "GraphFiles":
    """Return the files of the workflow that `snakemake` would run in `directory`.

    Raises:
        UserError: the arguments run no workflow at sites.
        Exit: something is wrong with the workflow, which Snakemake has reported.
    """
    from ..adapter.planning import dry_run
    from ..adapter.workflow_metadata import read_graph_files

    arguments: Sequence[str] = context.meta[_ARGUMENTS]
    if directory != Path():
        arguments = ["--directory", str(directory), *arguments]
    found = dry_run(arguments, lambda workflow, _options, _logger: read_graph_files(workflow))
    if found is None:
        raise typer.Exit(WRONG)
    return found


_OURS: Final = ("--json", "--connect", "--details", "--project-files", "--help")
"""The own options of a command that passes on all others."""


class Passing(Command):
    """A command that takes a few options of its own and passes on all others unchanged."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove our options from the arguments before `--`."""
        cut = args.index("--") if "--" in args else len(args)
        own = [word for word in args[:cut] if word in _OURS]
        rest: list[str] = super().parse_args(ctx, own)
        ctx.params["arguments"] = [word for word in args[:cut] if word not in _OURS] + args[cut:]
        return rest


# Lines and tables


def confirm(question: str) -> bool:
    """Ask a question and return the answer; raise UserError if there is no terminal."""
    if not sys.stdin.isatty():
        raise UserError(f"there is no terminal to ask: {question}", do="Add --yes to confirm it")
    return typer.confirm(question)


def say(text: str) -> None:
    """Print a line, without what could change the terminal."""
    typer.echo(printable(text))


def warn(text: str) -> None:
    """Print a line on the standard error, without what could change the terminal."""
    typer.echo(printable(text), err=True)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json_text(value))


ONE_LINE = 10_000
"""Columns without a terminal, so that programs find each row in one line."""


def make_console() -> Console:
    """Return a console as wide as the terminal; without one, each row gets one line."""
    found = Console()
    return found if found.is_terminal else Console(width=ONE_LINE)


def shorten_paths(paths: Sequence[str], kinds: Sequence[str], width: int) -> list[str]:
    """Leave out of long paths what all of one kind have in common, but the last part."""
    depths = [(kind, path.count("/")) for kind, path in zip(kinds, paths, strict=True)]
    alike: dict[object, set[str]] = {}
    for depth, path in zip(depths, paths, strict=True):
        for number, part in enumerate(path.split("/")[:-1]):
            alike.setdefault((depth, number), set()).add(part)
    short = []
    for depth, path in zip(depths, paths, strict=True):
        *parts, last = path.split("/")
        kept = [p if len(alike[depth, n]) > 1 else "…" for n, p in enumerate(parts)]
        short.append("/".join([*(p for p, _ in itertools.groupby(kept)), last]))
    return [path if len(path) <= width else s for path, s in zip(paths, short, strict=True)]


def new_table(
    titles: Iterable[str], right: Container[str] = (), whole: Container[str] = ()
) -> Table:
    """Return an empty table; `right` holds the titles of right-aligned columns.

    `whole` holds those of columns whose texts are in one line.
    """
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        made.add_column(
            title, justify="right" if title in right else "left", no_wrap=title in whole,
            overflow="ellipsis" if title in whole else "fold",
        )  # fmt: skip
    return made


def add_row(to: Table, cells: Iterable[str]) -> None:
    """Add a row. Cells are text, not markup: names and outcomes come from users and sites."""
    to.add_row(*(Text(" ".join(printable(cell).split())) for cell in cells))


def print_table(
    titles: Iterable[str],
    rows: Iterable[Iterable[str]],
    right: Container[str] = (),
    whole: Container[str] = (),
) -> None:
    """Print a table of texts, without columns that are empty; see `new_table` and `add_row`."""
    columns = list(itertools.zip_longest(*rows, fillvalue=""))
    shown = [t for t, c in zip(titles, columns, strict=False) if any(c)] if columns else titles
    made = new_table(shown, right, whole)
    for row in zip(*filter(any, columns), strict=True):
        add_row(made, row)
    make_console().print(made)


WRITABLE: Final = "its permissions and the free disk space"
"""What to check if something cannot be written."""


def write_file(path: Path, text: str) -> None:
    """Write a file whole, or not at all, and make its directory; raise UserError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"the file cannot be written ({error.strerror})",
            where=str(path),
            do=f"Name another file, or check {WRITABLE}",
        ) from error


def make_progress() -> Progress:
    """Return a progress bar of bytes; without a terminal it shows nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, TimeRemainingColumn(), disable=not sys.stderr.isatty())


def require_mlflow() -> None:
    """Set MLflow's time-outs and log level; raise UserError if it is not installed."""
    from ..tracking.process import SETTINGS

    if importlib.util.find_spec("mlflow") is None:
        what = "MLflow is not installed here"
        raise UserError(what, do=f"Install it with: {install_command('mlflow')}")
    for name, value in {**SETTINGS, "MLFLOW_LOGGING_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)


# Processes

_STDERR: Final = 2


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    to_stderr: bool = False,
) -> int:
    """Run a command and pass on signals; return its exit code, 128 + n if signal n ended it.

    With `to_stderr` its standard output is joined to this process's standard error.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and _from_terminal():
            return  # the terminal sends it to the command, too
        if child is None:
            early.append(number)
            return
        with suppress(ProcessLookupError):
            child.send_signal(number)

    passed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in passed}
    try:
        child = subprocess.Popen(command, env=environment, stdout=_STDERR if to_stderr else None)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _from_terminal() -> bool:
    """Return whether this process is in a terminal's foreground group, which receives Ctrl-C."""
    with suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
