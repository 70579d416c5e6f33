"""`smk-mantik report`: what a workflow did, as one HTML file, and what to request next time."""

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from ..common.errors import UserError, printable
from ..common.humanize import humanize_count
from ..common.secret_names import secret_values
from ..staging.project_files import REPORT_FILE
from ..views.report import GENERATOR, gather_report, render_csv, render_report
from ..views.usage import render_profile
from .shared import Workdir, print_json, say, warn, write_file

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
    as_csv: Annotated[
        bool,
        typer.Option("--csv", help="Print each attempt as a line of CSV, and write no HTML."),
    ] = False,
) -> None:
    """Write a report of a workflow's jobs: timeline, pipeline, used resources, failures.

    It is one HTML file that needs no server and no internet. It may be written while Snakemake
    runs, and contacts no site.
    """
    target = profile
    if profile is not None and profile.suffix not in (".yaml", ".yml"):
        target = profile / "config.yaml"
    if target is not None and target.exists() and not force:
        raise UserError(
            "the file exists already", where=str(target), do="Use --force, or another name"
        )
    if not as_json and not as_csv and not force:
        _refuse_others(output)
    found = gather_report(directory, every=every, secrets=secret_values(os.environ), warn=warn)
    if as_json:
        print_json(found.as_json())
    elif as_csv:
        typer.echo(printable(render_csv(found)), nl=False)
    else:
        write_file(output, render_report(found))
        say(f"The report is in {output}.")
    if target is not None:
        write_file(target, render_profile(found.rules))
        number = sum(bool(usage.advice) for usage in found.rules)
        words = f"It changes {number} of {humanize_count(len(found.rules), 'rule')}."
        typer.echo(printable(f"The profile is in {target}. {words}"), err=as_json or as_csv)


def _refuse_others(output: Path) -> None:
    """Refuse to replace a file that is no report."""
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
