"""`smk-mantik run` and `call`: run an entry point, or a Python function, as a job."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from ..common.errors import printable
from ..config.reading import read_configs
from ..mlproject.command_line import (
    CommandFiles,
    CommandMistakes,
    ContinueOptions,
    check_command_files,
)
from ..mlproject.single_rule import prepare_single_rule, snakemake_command
from ..runs.functions import (
    default_result,
    describe_call,
    find_function,
    parse_argument,
    write_call,
)
from .shared import (
    Checkpoint,
    EntryName,
    Extra,
    ForSnakemake,
    Inputs,
    Outputs,
    Parameters,
    Segments,
    SiteConfig,
    run_child,
    warn,
)


def run(
    project: Annotated[Path, typer.Argument(help="The project: a folder, or its MLproject file.")],
    snakemake: ForSnakemake = None,
    *,
    entry_point: EntryName = "main",
    parameter: Parameters = None,
    extra: Extra = None,
    site: SiteConfig = "",
    inputs: Inputs = None,
    outputs: Outputs = None,
    segments: Segments = None,
    checkpoint: Checkpoint = "",
    check: Annotated[
        bool, typer.Option("--check", help="Only check the arguments, and run nothing.")
    ] = False,
) -> None:
    """Run one entry point of an MLproject as a job, and wait for it here.

    Write a workflow of one rule and run snakemake on it. An existing file that is the value of a
    parameter of type path is an input anyway.

    {input} and {output} in a parameter's value stand for the files of --input and --output; after
    --input NAME=PATH, {input.NAME} stands for that one.

    Without --output, new and changed files of the project's folder are copied to a folder in
    mlproject-runs/.
    """
    arguments = snakemake or []
    snakefile = prepare_single_rule(
        project, entry_point, parameter or [], extra or [],
        site=site, inputs=inputs or [], outputs=outputs or [],
        going_on=ContinueOptions(segments, checkpoint), here=_is_local(arguments),
        write=not check,
    )  # fmt: skip
    if check:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    words = snakemake_command(snakefile, site, arguments)
    os.execv(sys.executable, words)  # noqa: S606 - replaces this process


def _is_local(words: list[str]) -> bool:
    return any(
        word in ("--executor=local", "-e=local", "-elocal")
        or (word in ("--executor", "-e") and words[at + 1 : at + 2] == ["local"])
        for at, word in enumerate(words)
    )


_DRY_RUN: Final = re.compile(r"--dry-?run|-[a-zA-Z]*n[a-zA-Z]*")
_SHOWN_BYTES: Final = 100_000
"""A larger result is not printed."""


def call(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="The function, in a module of this directory."
        ),
    ],
    snakemake: ForSnakemake = None,
    *,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            "-a",
            metavar="NAME=VALUE",
            help="An argument: JSON such as 0.1, true or [1, 2], else a text; repeatable.",
        ),
    ] = None,
    site: SiteConfig = "",
    inputs: Inputs = None,
    outputs: Outputs = None,
    result: Annotated[
        str,
        typer.Option(metavar="PATH", help="The file with what it returns; default: in calls/."),
    ] = "",
    pickled: Annotated[
        bool, typer.Option("--pickle", help="Pickle what it returns to the file of --result.")
    ] = False,
    installed: Annotated[
        bool, typer.Option("--installed", help="The module is installed in the site's environment.")
    ] = False,
) -> None:
    """Call a Python function as a job, wait for it here, and print what it returns as JSON.

    The same command again reattaches a job that still runs, and prints the result of one that has
    ended, unless one of the function's modules or inputs has changed.
    """
    wrong = CommandMistakes()
    arguments = {n: parse_argument(v) for n, v in wrong.pairs("--arg", argument or []).items()}
    read, made = inputs or [], outputs or []
    with wrong.gathered():
        if site:
            read_configs([site], Path())
    if pickled and not result:
        wrong.notify("--pickle", "", "needs --result PATH")
    with wrong.gathered():
        check_command_files(
            CommandFiles(read), CommandFiles([*([result] if result else []), *made])
        )
    if result.endswith("/") or Path(result or "-").is_dir():
        wrong.notify("--result", "", f"has to be a file, found {result!r}")
    wrong.end()
    found = find_function(function, arguments, installed=installed)
    result = result or default_result(found, arguments)
    check_command_files(CommandFiles([*found.files]), CommandFiles([result, *made]))
    snakefile = write_call(found, arguments, result, inputs=read, outputs=made, pickled=pickled)
    options = snakemake or []
    if code := run_child(snakemake_command(snakefile, site, options), to_stderr=True):
        raise typer.Exit(code)
    if any(map(_DRY_RUN.fullmatch, options)):
        return  # a file that is there may be the result of an older version
    _show(Path(result), describe_call(found, arguments), pickled=pickled)


def _show(result: Path, called: str, *, pickled: bool) -> None:
    """Print the result, unless snakemake was asked for something else than a run."""
    if not result.exists():
        return
    warn(f"{called} is in {result}.")
    if not pickled and result.stat().st_size <= _SHOWN_BYTES:
        sys.stdout.write(printable(result.read_text(encoding="utf-8")))
