"""`smk-mantik run`: run one entry point of an MLproject, as a workflow of one rule."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from snakemake_executor_plugin_mantik.mlproject.command_line import ContinueOptions
from snakemake_executor_plugin_mantik.mlproject.single_rule import (
    prepare_single_rule,
    snakemake_command,
)

from .options import Checkpoint, Segments


def run(
    project: Annotated[Path, typer.Argument(help="The project: a folder, or its MLproject file.")],
    snakemake: Annotated[
        list[str] | None, typer.Argument(help="Options for snakemake, after --.")
    ] = None,
    *,
    entry_point: Annotated[
        str, typer.Option("--entry-point", "-e", help="The entry point, or a script.")
    ] = "main",
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--param-list",
            "-P",
            metavar="NAME=VALUE",
            help="A parameter of the entry point. {input}, {output}, {input.NAME} stand for files.",
        ),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A parameter that the entry point does not declare: appended to the command.",
        ),
    ] = None,
    site: Annotated[
        str,
        typer.Option(
            metavar="[NAME=]FILE",
            help="The site's backend config; default: that of a profile or of the environment.",
        ),
    ] = "",
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="[NAME=]PATH",
            help="A file or folder that it reads; repeatable. An existing file that is the value of"
            " a parameter of type path is one anyway.",
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            metavar="[NAME=]PATH",
            help="A file, or with a trailing / a folder, that it makes; repeatable.",
        ),
    ] = None,
    segments: Segments = None,
    checkpoint: Checkpoint = "",
    check: Annotated[
        bool, typer.Option("--check", help="Only check the arguments, and run nothing.")
    ] = False,
) -> None:
    """Run one entry point of an MLproject as a job, and wait for it here.

    Write a workflow of one rule and run snakemake on it.

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
    words = snakemake_command(snakefile, site)
    if not any(word == "-e" or word.startswith("--executor") for word in arguments):
        words += ["--executor", "mantik", "--jobs", "1"]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [*words, *arguments])  # noqa: S606 - replaces this process


def _is_local(arguments: Sequence[str]) -> bool:
    words = list(arguments)
    return any(
        word in ("--executor=local", "-e=local", "-elocal")
        or (word in ("--executor", "-e") and words[at + 1 : at + 2] == ["local"])
        for at, word in enumerate(words)
    )
