"""`smk-mantik init`: the two files that a workflow needs, a backend config and a profile."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from snakemake_executor_plugin_mantik.config.reading import name_mistake, parse_backend_config
from snakemake_executor_plugin_mantik.errors import UserError

PROFILE: Final = Path("profiles", "default", "config.yaml")
"""Snakemake uses a profile of this name beside the Snakefile without being told."""

KNOWN_SITES: Final[Mapping[str, str]] = {
    "jupiter": "https://unicore.fz-juelich.de/JUPITER/rest/core",
    "jureca": "https://unicore.fz-juelich.de/JURECA/rest/core",
    "juwels": "https://unicore.fz-juelich.de/JUWELS/rest/core",
}
"""UNICORE's URLs at the Jülich Supercomputing Centre, as published; the site may move them."""

_EXAMPLE_SITE: Final = "hpc"
_EXAMPLE_URL: Final = "https://unicore.example.org/SITE/rest/core"
_EXAMPLE_QUEUE: Final = "batch"


def init(
    site: Annotated[
        str,
        typer.Option(
            "--site", help="Name of the site; of these the URL is known: jupiter, jureca, juwels."
        ),
    ] = _EXAMPLE_SITE,
    queue: Annotated[
        str, typer.Option("--queue", help="Queue (partition) of the jobs.")
    ] = _EXAMPLE_QUEUE,
    url: Annotated[
        str, typer.Option("--url", help="The site's UNICORE API, ends with /rest/core.")
    ] = "",
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="The workflow's working directory.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write a commented backend config for a site, and a profile that makes Snakemake use it."""
    if mistake := name_mistake(site):
        raise UserError(mistake, where="--site")
    example = site == _EXAMPLE_SITE and not url
    address = url or KNOWN_SITES.get(site.lower(), _EXAMPLE_URL if example else "")
    if not address:
        raise UserError(
            f"the URL of {site} is not known here",
            where="--url",
            do=f"Give it with --url; known are {', '.join(KNOWN_SITES)}",
        )
    config, profile = directory / f"{site}.yaml", directory / PROFILE
    if config.exists() and not force:
        raise UserError(
            "the file is there already", where=str(config), do="Use --force, or another name"
        )
    text = _filled("backend-config.yaml", site=site, url=_quoted(address), queue=_quoted(queue))
    parse_backend_config(text.encode(), "yaml", shown=config.name)  # a wrong URL or queue ends here
    _write(config, text)
    typer.echo(f"Wrote {config}: look through it, all that is commented out is optional.")
    if example:
        typer.echo("Put the site's UnicoreApiUrl and Queue into it: those are examples.")
    if profile.exists() and not force:
        typer.echo(f"Kept {profile}: add '- {config.name}' to its mantik-backend-config.")
    else:
        _write(profile, _filled("profile.yaml", file=_quoted(config.name)))
        typer.echo(f"Wrote {profile}: it makes plain `snakemake` run here with the executor.")
    typer.echo(next_steps(site))


def next_steps(site: str) -> str:
    """What is to be done after the files are there: who the user is, and who pays."""
    prefix = f"MANTIK_{site.upper().replace('-', '_')}"
    return "\n".join(
        (
            "",
            "Next, say who you are there, in one of these ways:",
            f"  export {prefix}_USERNAME=… {prefix}_PASSWORD=…",
            f"  export {prefix}_USERNAME=… {prefix}_SSH_KEY=~/.ssh/id_ed25519",
            f"  export {prefix}_TOKEN=…",
            "and which compute budget account pays, where the site wants one:",
            "  export MANTIK_COMPUTE_BUDGET_ACCOUNT=…",
            "Then: snakemake",
        )
    )


def _filled(template: str, **values: str) -> str:
    folder = files("snakemake_executor_plugin_mantik.cli") / "templates"
    return Template((folder / template).read_text(encoding="utf-8")).substitute(values)


def _quoted(text: str) -> str:
    """`text` as a YAML scalar: JSON's texts are YAML's too."""
    return json.dumps(text, ensure_ascii=False)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError("the file cannot be written", where=str(path), do=reason) from error
