"""`smk-mantik render`: show what would be submitted for a command, without submitting it."""

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.humanize import humanize_count, humanize_size
from snakemake_executor_plugin_mantik.config.environment import unknown_environment
from snakemake_executor_plugin_mantik.config.exclude import Exclude, Include
from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.preview import Preview, make_preview
from snakemake_executor_plugin_mantik.sites.credentials import find_account
from snakemake_executor_plugin_mantik.sites.unicore.description import HOOK_FILES
from snakemake_executor_plugin_mantik.staging import sources

from .check import WRONG, examine

_UNLIMITED = 1 << 62
_INLINE = "as shown below"


def render(  # noqa: PLR0917 - options of a command line
    file: Annotated[str, typer.Argument(metavar="FILE", help="Backend config, FILE or NAME=FILE.")],
    command: Annotated[str, typer.Option("--command", help="The command of the job.")],
    project: Annotated[Path, typer.Option("--project", help="The project folder.")] = Path(),
    environment: Annotated[
        str, typer.Option("--environment", help="One of the config's Environments, by its name.")
    ] = "",
    unicore_version: Annotated[
        str, typer.Option("--unicore-version", help="Render for this version, such as 11.0.0.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the script, the submission and the uploads of a job; connect to no site."""
    if not project.is_dir():
        raise UserError("there is no such folder", where=str(project), do="Correct --project")
    report = examine(file, project)
    if report.loaded is None:
        for mistake in report.mistakes:
            typer.echo(str(mistake), err=True)
        raise typer.Exit(WRONG)
    # A preview is possible in spite of a wrong name of the site, so that is only a warning.
    warnings = [*report.warnings, *map(str, report.mistakes)]
    if environment not in report.loaded.config.all_environments:
        raise unknown_environment(environment, report.loaded.config, "--environment")
    made = render_preview(
        report.loaded, warnings, project, command,
        unicore_version=unicore_version, environment=environment,
    )  # fmt: skip
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=2))
    else:
        typer.echo(_for_people(made))


def render_preview(
    loaded: LoadedConfig,
    warnings: list[str],
    project: Path,
    command: str,
    *,
    unicore_version: str = "",
    environment: str = "",
) -> Preview:
    """Return a preview of the submission and the uploads from the project folder.

    `environment` is the name of the config's environment; empty for its default.

    Raises:
        UserError: `unicore_version` is wrong or does not apply, or the job cannot be submitted.
    """
    config = loaded.config
    if unicore_version and config.api != "unicore":
        raise UserError(
            "--unicore-version does not apply to a site behind firecREST",
            where=str(loaded.path),
            do="Remove it",
        )
    if unicore_version and not re.search(r"\d+\.\d+", unicore_version):
        raise UserError(
            f"{unicore_version!r} is not a version",
            where="--unicore-version",
            do="Use the server's version, such as 11.0.0, or that of its UNICORE/X, such as 3.0.0",
        )
    planner = Planner(config, find_account(loaded.name, os.environ), project)
    # Without a workflow, products of rules are unknown and count as sources: so allow any total.
    chosen = sources.select_sources(
        project, Exclude(config.exclude), products=(),
        total_limit=_UNLIMITED,
        include=Include(config.site.include),
    )  # fmt: skip
    files = planner.environment_files(environment)
    found = [*warnings, *_sizes(loaded, chosen, [path for _, path in files])]
    size = files[0][0].stat().st_size if files and files[0][0].is_file() else None
    return make_preview(
        planner, loaded.name, command, environment=environment,
        uploads=chosen.paths, image_size=size, warnings=found, unicore_version=unicore_version,
    )  # fmt: skip


def _sizes(loaded: LoadedConfig, chosen: sources.Sources, files: Collection[str]) -> list[str]:
    """Warn about files that seem to hold secrets, or are too large alone or together."""
    site, warnings = loaded.config.site, []
    if chosen.withheld:
        warnings.append(chosen.withheld)
    left = [path for path in chosen.too_large if path not in files]
    if left:
        named = ", ".join(map(_shown, left[:3])) + ", …" * (len(left) > 3)
        warnings.append(
            f"not uploaded unless a rule names it as an input: {humanize_count(len(left), 'file')}"
            f" above {humanize_size(sources.FILE_BYTES)}, {named}"
        )
    if chosen.size > site.sources_limit_bytes:
        warnings.append(
            f"the project's small files are {chosen.size >> 20} MiB together, more than"
            " Site.SourcesLimit: a run would fail; name them as inputs of rules, or Exclude them"
        )
    return warnings


def _for_people(made: Preview) -> str:
    given = {key: value for key, value in made.resources.items() if value is not None}
    environment = made.environment + (f" ({made.image_type} image)" if made.image_type else "")
    lines = [
        f"Site:        {made.site} ({'UNICORE' if made.api == 'unicore' else 'firecREST'})",
        f"Resources:   {', '.join(f'{key} {value}' for key, value in given.items())}",
        f"Environment: {environment}",
        "",
        f"Variables ({len(made.variables)}):",
        *(f"  {name}={_shown(value)}" for name, value in made.variables.items()),
        "",
        f"Uploads ({len(made.uploads)}):",
        *(f"  {_shown(path)}" for path in made.uploads),
        "",
        "Submission (the script as shown below):",
        json.dumps(_without_scripts(made.submission), indent=2, ensure_ascii=False),
        "",
        "Script (/WORKSPACE and the UUID of zeros are placeholders):",
        made.script.rstrip("\n"),
    ]
    return "\n".join(lines)


def _without_scripts(value: Any) -> Any:
    """Remove the long texts from a submission, which are shown separately."""
    if isinstance(value, dict):
        if value.get("To") in HOOK_FILES.values():
            return value
        return {
            key: _INLINE if key in ("Data", "script") else _without_scripts(item)
            for key, item in value.items()
        }
    return [_without_scripts(item) for item in value] if isinstance(value, list) else value


def _shown(text: str) -> str:
    return text if text.isprintable() else repr(text)
