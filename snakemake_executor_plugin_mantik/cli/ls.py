"""`smk-mantik ls`: show the outputs that stay at sites."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from snakemake_executor_plugin_mantik.common.errors import json_text
from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.jobs.paths import display_path, local_path
from snakemake_executor_plugin_mantik.journal import (
    StoredOutput,
    UndeclaredFile,
    read_stored,
    read_undeclared,
)

from . import tables
from .evaluation import NEEDED_BY, read_files
from .options import Workdir

if TYPE_CHECKING:
    from snakemake_executor_plugin_mantik.adapter.workflow_metadata import GraphFiles


def ls(
    context: typer.Context,
    *,
    directory: Workdir = Path(),
    needed_by: Annotated[
        bool,
        typer.Option(
            NEEDED_BY,
            help="Also show which rules of the Snakefile read them. Arguments for snakemake follow"
            " after --.",
        ),
    ] = False,
    undeclared: Annotated[
        bool,
        typer.Option(
            "--undeclared", help="Show the new files that jobs left beside their outputs instead."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the outputs that stay at sites: where, how big, how old, and which job made them.

    To bring them here, use smk-mantik get.
    """
    files = read_files(context, directory) if needed_by else None
    directory = directory if files is None else files.workdir
    known = read_stored(directory / STATE)
    names = {site.place: site.site for site in known.sites.values()}
    if undeclared:
        _show_undeclared(read_undeclared(directory / STATE), names, directory, as_json=as_json)
        return
    outputs = [output for output in known.outputs if not output.here]
    if as_json:
        typer.echo(json_text([_as_json(output, names, directory, files) for output in outputs]))
        return
    if not outputs:
        typer.echo("No output stays at a site.")
        return
    tables.make_console().print(_table(outputs, names, directory, files))
    total = humanize_size(sum(output.size for output in outputs))
    typer.echo(f"{humanize_count(len(outputs), 'output')}, {total}")


def _show_undeclared(
    files: Sequence[UndeclaredFile], names: Mapping[str, str], directory: Path, *, as_json: bool
) -> None:
    """Print the files that no rule declares, as far as the journal lists them."""
    rows = [
        (
            display_path(file.path),
            names.get(file.place, file.place),
            file.size,
            file.job,
            os.path.lexists(local_path(file.path, directory)),
        )
        for file in files
    ]
    if as_json:
        keys = ("file", "site", "size", "job", "here")
        typer.echo(json_text([dict(zip(keys, row, strict=True)) for row in rows]))
    elif not rows:
        typer.echo("No job has left a new file that no rule declares.")
    else:
        shown = tables.new_table(["file", "site", "size", "seen by", "here"], right=("size",))
        for path, site, size, job, here in rows:
            tables.add_row(shown, [path, site, humanize_size(size), job, "yes" * here])
        tables.make_console().print(shown)


def _table(
    outputs: Iterable[StoredOutput],
    names: Mapping[str, str],
    directory: Path,
    files: "GraphFiles | None",
) -> Table:
    titles = ["file", "site", "size", "age", "made by", "here"]
    if files is not None:
        titles.insert(5, "needed by")
    shown = tables.new_table(titles, right=("size", "age"))
    for output in outputs:
        cells = [
            display_path(output.path) + "/" * output.directory,
            names.get(output.place, output.place),
            humanize_size(output.size),
            humanize_duration(max(0.0, time.time() - output.made)),
            output.job,
            "a file of this name" if _has_namesake(output, directory) else "",
        ]
        if files is not None:
            target = "(target)" if output.path in files.targets else ""
            cells.insert(5, ", ".join(files.readers.get(output.path, ())) or target)
        tables.add_row(shown, cells)
    return shown


def _as_json(
    output: StoredOutput, names: Mapping[str, str], directory: Path, files: "GraphFiles | None"
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "file": display_path(output.path),
        "directory": output.directory,
        "site": names.get(output.place, output.place),
        "size": output.size,
        "made": output.made,
        "job": output.job,
        "here": _has_namesake(output, directory),
    }
    if files is not None:
        found["needed_by"] = list(files.readers.get(output.path, ()))
        found["target"] = output.path in files.targets
    return found


def _has_namesake(output: StoredOutput, directory: Path) -> bool:
    """Return whether there is a file of the output's name on this machine."""
    return os.path.lexists(local_path(output.path, directory))
