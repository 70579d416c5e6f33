"""Let Snakemake evaluate the workflow for a command that lists or brings its files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from .apps import Command
from .check import WRONG

if TYPE_CHECKING:
    from snakemake_executor_plugin_mantik.adapter.workflow_metadata import GraphFiles

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
    from snakemake_executor_plugin_mantik.adapter.dryrun import dry_run
    from snakemake_executor_plugin_mantik.adapter.workflow_metadata import read_graph_files

    arguments: Sequence[str] = context.meta[_ARGUMENTS]
    if directory != Path():
        arguments = ["--directory", str(directory), *arguments]
    found = dry_run(arguments, lambda workflow, _options, _logger: read_graph_files(workflow))
    if found is None:
        raise typer.Exit(WRONG)
    return found
