"""`smk-mantik report`: what a workflow did, as one HTML file, and what to request next time."""

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from snakemake_executor_plugin_mantik.common.errors import UserError, json_text, printable
from snakemake_executor_plugin_mantik.common.humanize import humanize_count
from snakemake_executor_plugin_mantik.common.secret_names import secret_values
from snakemake_executor_plugin_mantik.common.state_directory import replace_file
from snakemake_executor_plugin_mantik.staging.sources import REPORT_FILE
from snakemake_executor_plugin_mantik.views.report import GENERATOR, gather_report, render_report
from snakemake_executor_plugin_mantik.views.usage import render_profile

from .shared import Workdir

_HEAD_BYTES: Final = 1024
"""How much of a file is read to see whether it is a report."""


def report(
    directory: Workdir = Path(),
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file to write.")
    ] = Path(REPORT_FILE),
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="DIRECTORY",
            help="Also write what to request next time as a profile of Snakemake: its config.yaml"
            " sets it with set-resources. Or name a YAML file.",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show all runs of Snakemake, not only the last one.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that are no reports.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON, and write no HTML.")
    ] = False,
) -> None:
    """Write a report of a workflow's jobs: timeline, pipeline, used resources, failures.

    It is one HTML file that needs no server and no internet. It may be written while Snakemake
    runs, and contacts no site.
    """
    target = _profile_file(profile) if profile is not None else None
    if target is not None and target.exists() and not force:
        raise UserError(
            "the file exists already", where=str(target), do="Use --force, or another name"
        )
    if not as_json and not force:
        _refuse_others(output)
    found = gather_report(
        directory,
        every=every,
        secrets=secret_values(os.environ),
        warn=lambda text: typer.echo(printable(text), err=True),
    )
    if as_json:
        typer.echo(json_text(found.as_json()))
    else:
        _write(output, render_report(found))
        typer.echo(printable(f"The report is in {output}."))
    if target is not None:
        _write(target, render_profile(found.rules))
        number = sum(bool(usage.advice) for usage in found.rules)
        words = f"It changes {number} of {humanize_count(len(found.rules), 'rule')}."
        typer.echo(printable(f"The profile is in {target}. {words}"), err=as_json)


def _profile_file(profile: Path) -> Path:
    return profile if profile.suffix in (".yaml", ".yml") else profile / "config.yaml"


def _refuse_others(output: Path) -> None:
    """Check that a file does not exist, or is a report.

    Raises:
        UserError: it is something else.
    """
    try:
        with output.open("rb") as file:
            known = f'content="{GENERATOR}"'.encode() in file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"the report cannot be written ({error.strerror})",
            where=str(output),
            do="Name another file with --output",
        ) from error
    if not known:
        raise UserError(
            "the file exists already and is no report of this command",
            where=str(output),
            do="Use --force, or name another file with --output",
        )


def _write(path: Path, text: str) -> None:
    """Write a file as a whole, or not at all.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"the file cannot be written ({error.strerror})",
            where=str(path),
            do="Name another file, or free disk space",
        ) from error
