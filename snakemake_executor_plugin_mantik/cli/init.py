"""`smk-mantik init`: write the two files that a workflow needs, a backend config and a profile."""

import json
import re
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any, Final, Literal

import typer
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ..common.errors import UserError
from ..config.known_sites import KNOWN_SITES, KnownSite
from ..config.reading import check_site_name, parse_backend_config
from ..sites.credentials import variable_prefix
from .shared import write_file

PROFILE: Final = Path("profiles", "default", "config.yaml")
"""Snakemake uses a profile of this name beside the Snakefile by default."""

_CONFIGS: Final = "mantik-backend-config"
_IMAGE: Final = "env/train.sif"
_NO_URL: Final = "no URL is published, use --url"

_EXAMPLE_SITE: Final = "hpc"
_EXAMPLE: Final = KnownSite(
    _EXAMPLE_SITE, "an example", "unicore", "https://unicore.example.org/SITE/rest/core",
    ("batch",), "", "", "",
)  # fmt: skip

_REMOTE_IMAGE: Final = "docker://docker.io/library/python:3.12"
_REQUIREMENTS: Final = "requirements.txt"

_Kind = Literal[
    "apptainer", "container-engine", "uenv", "pyxis", "venv", "python", "modules", "none"
]


def init(  # noqa: PLR0917 - options of a command line
    site: Annotated[
        str, typer.Option(help="Name of the site; for those of --list the URL is known.")
    ] = _EXAMPLE_SITE,
    queue: Annotated[
        str, typer.Option(help="Queue (partition) of the jobs; default: a known one.")
    ] = "",
    url: Annotated[
        str, typer.Option(help="URL of the UNICORE API, or with --machine of firecREST.")
    ] = "",
    machine: Annotated[
        str, typer.Option(help="Name of the system, for a site behind firecREST.")
    ] = "",
    token_url: Annotated[
        str, typer.Option(help="Issuer of tokens, for a site behind firecREST.")
    ] = "",
    environment: Annotated[
        _Kind, typer.Option(help="The environment of the jobs' commands.")
    ] = "none",
    path: Annotated[
        str,
        typer.Option(
            help="The image, definition, virtual environment or modules of --environment."
        ),
    ] = "",
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="The workflow's working directory.")
    ] = Path(),
    files_stay: Annotated[
        bool,
        typer.Option("--files-stay", help="Leave outputs at the site where a job made them."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show the known public sites and write nothing.")
    ] = False,
) -> None:
    """Write a commented backend config for a site, and a profile that makes Snakemake use it."""
    if show_list:
        typer.echo(_listed())
        return
    if site == _EXAMPLE_SITE and not url and _is_terminal():
        site = typer.prompt(f"Name of the site ({', '.join(KNOWN_SITES)}, or another one)").strip()
    if mistake := check_site_name(site):
        raise UserError(mistake, where="--site")
    known = KNOWN_SITES.get(site.lower())
    if _is_terminal() and (known is None or not known.url):
        url = url or typer.prompt("URL of its UNICORE API (for firecREST use --machine, too)")
        queue = queue or (known.queues[0] if known else typer.prompt("Queue (partition)"))
    if path and environment == "none":
        raise UserError(
            "--path is given without --environment",
            do="Add --environment apptainer, or another kind",
        )
    chosen = _site(site, url, machine, token_url)
    config, taken = directory / f"{site}.yaml", _find_profiles(directory)
    profile = taken[0] if taken else directory / PROFILE
    if config.exists() and not force:
        raise UserError(
            "the file exists already", where=str(config), do="Use --force, or another name"
        )
    text = _filled(
        "backend-config.yaml",
        site=chosen.title if chosen.source else site,
        source=f"\n# URL and queue are from {chosen.source}." if chosen.source else "",
        api=_api(chosen),
        queue=_queue(chosen, queue),
        pools=_pools(chosen, queue, environment),
        environment=_environment(environment, path, directory),
    )
    parse_backend_config(text.encode(), "yaml", shown=config.name)  # refuses a wrong URL or queue
    write_file(config, text)
    typer.echo(f"Wrote {config}: review it; everything that is commented out is optional.")
    if chosen is _EXAMPLE:
        typer.echo("Set the site's UnicoreApiUrl and Queue in it: those are examples.")
    is_local = environment == "apptainer" and path and not path.startswith("/")
    if is_local and "://" not in path and not (directory / path).is_file():
        typer.echo(f"Put the image at the path in the config: {path}")
    more = _filled("files-stay.yaml") if files_stay else ""
    lines = _filled("profile.yaml", file=_quoted(config.name), more=more)
    extended = _extended(profile, config.name, lines) if taken else lines
    if extended is None and not force:
        options = "\n".join(f"  {line}" for line in lines.splitlines() if line and line[0] != "#")
        typer.echo(f"Kept {profile}; for this site and executor it has to say:\n{options}")
    else:
        write_file(profile, extended or lines)
        done = f"Added {config.name} to" if taken and extended else "Wrote"
        typer.echo(f"{done} {profile}: with it, plain `snakemake` here uses the executor.")
    if taken[1:]:
        others = ", ".join(map(str, taken[1:]))
        typer.echo(f"Snakemake may use {others} instead of {profile}: keep only one.")
    typer.echo(next_steps(site, chosen.api))


def _find_profiles(directory: Path) -> list[Path]:
    """Return the files that Snakemake may use as the workflow's profile, the likeliest first.

    It takes the first directory that exists, and there a file for its major version, if there is
    one. Of two files without a version, the order in the file system decides (Snakemake 9.27:
    `cli.parse_args`, `cli.get_profile_dir`).
    """
    for at in ("default", "profiles/default", "workflow/profiles/default"):
        names = sorted(path.name for path in (directory / at).glob("*.yaml"))
        versions = {
            name: int(found[2] or 0)
            for name in reversed(names)  # profile.yaml is the newer name
            if (found := re.fullmatch(r"(profile|config)(?:\.v(\d+)\+)?\.yaml", name))
            and int(found[2] or 0) <= int(version("snakemake").partition(".")[0])
        }
        if versions:
            newest = max(versions.values())
            return [directory / at / name for name, of in versions.items() if of == newest]
    return []


def _extended(profile: Path, config: str, lines: str) -> str | None:
    """Return the text of a profile that exists, with a backend config and what else it lacks.

    What stands in it stays as it is. None if it is for another executor, or cannot be read.
    """
    yaml, text = YAML(typ="safe", pure=True), profile.read_text(errors="replace").rstrip("\n")
    try:
        given, wanted = yaml.load(text) or {}, yaml.load(lines)
        if given.get("executor", "mantik") != "mantik":
            return None
        lacking = {key: value for key, value in wanted.items() if key not in given}
        if configs := given.get(_CONFIGS):
            [node] = [node for key, node in yaml.compose(text).value if key.value == _CONFIGS]
            names = [configs] if isinstance(configs, str) else configs
            if config not in (spec.rpartition("=")[2] for spec in names):
                text = _with_item(text, node, names, config)
        return "\n".join([text, *(f"{k}: {json.dumps(v)}" for k, v in lacking.items()), ""])
    except (YAMLError, AttributeError):  # no YAML, or no options
        return None


def _with_item(text: str, node: Any, items: list[str], new: str) -> str:
    """Return the text of a YAML file with one more item in the list, or the single text, `node`."""
    start, end, added = node.start_mark.index, node.end_mark.index, _quoted(new)
    if isinstance(node.value, str):
        return f"{text[:start]}[{_quoted(items[0])}, {added}]{text[end:]}"
    end = node.value[-1].end_mark.index
    if not node.flow_style:  # after the comment of the last one
        end = (text + "\n").index("\n", end)
    added = f", {added}" if node.flow_style else f"\n{' ' * node.start_mark.column}- {added}"
    return text[:end] + added + text[end:]


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _listed() -> str:
    lines = []
    for site in KNOWN_SITES.values():
        api = "UNICORE" if site.api == "unicore" else "firecREST"
        queues = ", ".join(site.queues)
        lines.append(f"{site.name:<9} {site.title} ({api}; {queues}): {site.url or _NO_URL}")
    return "\n".join(lines)


def _site(name: str, url: str, machine: str, token_url: str) -> KnownSite:
    """Return the site that the options describe; they override what is known of it."""
    known = KNOWN_SITES.get(name.lower())
    if name == _EXAMPLE_SITE and not (url or machine or token_url):
        return _EXAMPLE
    base = known or replace(_EXAMPLE, name=name, url="", queues=())
    if machine or token_url:
        base = replace(
            base,
            api="firecrest",
            machine=machine or base.machine,
            token_url=token_url or base.token_url,
        )
    base = replace(base, url=url or base.url)
    if not base.url:
        known_urls = ", ".join(site.name for site in KNOWN_SITES.values() if site.url)
        raise UserError(
            f"the URL of {name} is not known",
            where="--url",
            do=f"Set it with --url; known are those of {known_urls}",
        )
    if base.api == "firecrest" and not (base.machine and base.token_url):
        raise UserError(
            "a site behind firecREST needs --machine and --token-url, but one of them is missing",
            where=f"site {name}",
            do="Set both; see the site's documentation",
        )
    return base


def _api(site: KnownSite) -> str:
    if site.api == "unicore":
        return f"UnicoreApiUrl: {_quoted(site.url)}"
    return (
        f"Firecrest:\n  ApiUrl: {_quoted(site.url)}\n"
        f"  TokenUrl: {_quoted(site.token_url)}\n  Machine: {_quoted(site.machine)}"
    )


def _queue(site: KnownSite, queue: str) -> str:
    """Return the given queue or the first known one, with the others in a comment."""
    if not queue and not site.queues:
        raise UserError(
            "the queues of this site are not known", where="--queue", do="Set one with --queue"
        )
    chosen = queue or site.queues[0]
    others = [name for name in site.queues if name != chosen]
    comment = f"   # also known: {', '.join(others)}" if others and site.source else ""
    return f"{_quoted(chosen)}{comment}"


def _pools(site: KnownSite, queue: str, kind: _Kind) -> str:
    """Return the lines of `Pools`; commented out unless jobs of this kind pay for whole nodes.

    An allocation costs little more than the jobs in it, even if it runs few: it leaves soon.
    """
    queue = queue or site.queues[0]
    cores = site.cores.get(queue, site.cores.get(""))
    text = _filled("pools.yaml", queue=_quoted(queue), cores=str(cores or 8)).rstrip("\n")
    brief = re.search("devel|debug", queue)  # its jobs may not run as long as an allocation does
    if cores is None or brief or kind in ("container-engine", "uenv", "pyxis"):
        return "\n".join(f"# {line}" for line in text.splitlines())
    return text


def _environment(kind: _Kind, path: str, directory: Path) -> str:
    """Return the lines of `Environment`, commented out if `kind` is none.

    What they name exists, or lies at the site, unless `path` names a file that is yet to come.
    """
    if kind == "none":
        head = "Environment:              # an image, a virtual environment, … or neither"
        lines = _filled("apptainer.yaml", path=_quoted(_IMAGE)).splitlines()
        return "\n".join(f"# {line}" for line in (head, *lines))
    if kind == "apptainer":
        image = path or (_IMAGE if (directory / _IMAGE).is_file() else _REMOTE_IMAGE)
        text = _filled("apptainer.yaml", path=_quoted(image)).rstrip("\n")
        if "://" in image or (image.startswith("/") and not Path(image).is_file()):
            text = f"  Apptainer:\n    Path: {_quoted(image)}\n    Type: remote"
        return f"Environment:\n{text}"
    return f"Environment:\n  {_line(kind, path, directory)}"


def _line(kind: _Kind, path: str, directory: Path) -> str:
    if kind == "container-engine":
        key = "File" if path.endswith(".toml") or "/" in path else "Name"
        comment = (
            "a definition here or an absolute path" if key == "File" else "in EDF_PATH, ~/.edf"
        )
        return f"ContainerEngine: {{{key}: {_quoted(path or 'my-environment')}}}   # {comment}"
    if kind == "uenv":
        return f"Uenv: {{Image: {_quoted(path or 'prgenv-gnu/24.11:v1')}, View: default}}"
    if kind == "pyxis":
        return f"Pyxis: {{Image: {_quoted(path or 'nvcr.io#nvidia/pytorch:24.01-py3')}}}"
    if kind == "modules":
        names = path.replace(",", " ").split() or ["Python"]
        return f"Modules: [{', '.join(map(_quoted, names))}]"
    if not path and (directory / _REQUIREMENTS).is_file():
        return f"Python: {{Path: venv, Requirements: {_REQUIREMENTS}}}   # made once at the site"
    is_here = (directory / "venv" / "pyvenv.cfg").is_file()
    place = path or ("venv-at-site" if is_here else "venv")
    return f"Python: {_quoted(place)}   # at the site: in the workspace, or absolute"


def next_steps(site: str, api: str = "unicore") -> str:
    """Return the instructions for after `init`: set credentials and account, check, run."""
    prefix = variable_prefix(site)
    ways = {
        "unicore": (
            "USERNAME=… {}_PASSWORD=…",
            "USERNAME=… {}_SSH_KEY=~/.ssh/id_ed25519",
            "TOKEN=…",
        ),
        "firecrest": ("CLIENT_ID=… {}_CLIENT_SECRET=…", "API_KEY=…", "TOKEN=…"),
    }[api]
    return "\n".join(
        (
            "",
            "Next, set your credentials for the site, in one of these ways:",
            *(f"  export {prefix}_{way.format(prefix)}" for way in ways),
            "and the compute budget account, if the site wants one:",
            "  export MANTIK_COMPUTE_BUDGET_ACCOUNT=…",
            f"Then: smk-mantik check --connect {site}.yaml",
            "and: snakemake",
        )
    )


def _filled(template: str, **values: str) -> str:
    folder = files("snakemake_executor_plugin_mantik.cli") / "templates"
    return Template((folder / template).read_text(encoding="utf-8")).substitute(values)


def _quoted(text: str) -> str:
    """Quote `text` as a YAML scalar: texts of JSON are valid in YAML."""
    return json.dumps(text, ensure_ascii=False)
