"""`smk-mantik ls`: show the outputs that stay at sites."""

import os
import time
from pathlib import Path

import typer

from snakemake_executor_plugin_mantik.cli import tables
from snakemake_executor_plugin_mantik.cli.options import Workdir
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration, humanize_size
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.jobs.paths import display_path, local_path
from snakemake_executor_plugin_mantik.journal import read_stored


def ls(directory: Workdir = Path()) -> None:
    """Show the outputs that stay at sites: where, how big, how old, and which job made them.

    To bring them here, use smk-mantik get.
    """
    known = read_stored(directory / STATE)
    outputs = [output for output in known.outputs if not output.here]
    if not outputs:
        typer.echo("No output stays at a site.")
        return
    names = {site.place: site.site for site in known.sites.values()}
    titles = ("file", "site", "size", "age", "made by", "here")
    shown = tables.new_table(titles, right=("size", "age"))
    for output in outputs:
        tables.add_row(
            shown,
            [
                display_path(output.path) + "/" * output.directory,
                names.get(output.place, output.place),
                humanize_size(output.size),
                humanize_duration(max(0.0, time.time() - output.made)),
                output.job,
                "a file of this name"
                if os.path.lexists(local_path(output.path, directory))
                else "",
            ],
        )
    tables.make_console().print(shown)
    total = humanize_size(sum(output.size for output in outputs))
    typer.echo(f"{len(outputs)} outputs, {total}")
