"""`smk-mantik docs`: show a page of the docs, or the schema of backend configs."""

import json
import os
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.errors import UserError, find_alike
from ..config.environment_keys import IMAGE_KEYS, LOGIN_HOOKS
from ..config.model import ENVIRONMENT_NAME, BackendConfig
from . import shared

_PACKAGE = "snakemake_executor_plugin_mantik"
_DIRECTORY = "docs"
_TITLES = {"intro": "Overview", "further": "User guide"}
"""Of pages without a title, which are parts of pages elsewhere."""


def docs(
    page: Annotated[
        str, typer.Argument(help="A page, such as credentials; default: list all pages.")
    ] = "",
    *,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            help="Print the JSON Schema of the Compute Backend Config instead, for editors that"
            " check while typing.",
        ),
    ] = False,
) -> None:
    """Show a page of the documentation."""
    if schema:
        typer.echo(json.dumps(config_schema(), indent=2, ensure_ascii=False))
        return
    pages = documentation_pages()
    if not page:
        firsts = {name: file.read_text("utf-8").partition("\n")[0] for name, file in pages.items()}
        rows = ([n, _TITLES.get(n) or firsts[n].removeprefix("# ")] for n in sorted(pages))
        shared.print_table(("page", "title"), rows)
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        near = find_alike(name, pages, 3)
        raise UserError(
            f"there is no page {page!r}",
            do=f"Did you mean {near}?" if near else "List them: smk-mantik docs",
        )
    text = pages[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.markdown import Markdown

    # Colours, and no pager for what fits on the screen.
    os.environ.setdefault("LESS", "FRX")
    console = shared.make_console()
    with console.pager(styles=True):
        console.print(Markdown(text))


def documentation_pages() -> dict[str, Traversable]:
    """Return the pages by name, such as `credentials`."""
    root: Traversable = files(_PACKAGE) / _DIRECTORY
    if not root.is_dir():  # installed from a clone, for those who change it
        root = Path(__file__).parents[2] / _DIRECTORY
    found = [file for file in root.iterdir() if file.name.endswith(".md")]
    return {file.name.removesuffix(".md"): file for file in found}


def config_schema() -> Any:
    """Return the JSON Schema of the Compute Backend Config."""
    dialect = "https://json-schema.org/draft/2020-12/schema"  # that of pydantic's schemas
    described = {"$schema": dialect, **BackendConfig.model_json_schema()}
    described["title"] = "Compute Backend Config"
    keys = described["$defs"]["ResourcesConfig"]["properties"]
    keys["Memory"] = {**keys["MemoryPerNode"], "title": "Memory", "deprecated": True}
    # pydantic's schema lacks the rules between keys.
    excluded = [*combinations(IMAGE_KEYS, 2), ("Apptainer", "Python")]
    described["$defs"]["EnvironmentConfig"]["not"] = {
        "anyOf": [{"required": list(pair)} for pair in excluded]
    }
    for key in ("Environments", "Pools"):
        named = described["properties"][key]
        named["propertyNames"] = {"pattern": f"^{ENVIRONMENT_NAME.pattern}$"}
    one = [{"required": ["File"]}, {"required": ["Name"]}]
    described["$defs"]["ContainerEngineConfig"]["oneOf"] = one
    described["$defs"]["ResourcesConfig"]["not"] = {"required": ["Memory", "MemoryPerNode"]}
    on_login = {"anyOf": [{"required": [hook]} for hook in LOGIN_HOOKS]}
    described["if"] = {"required": ["Firecrest"]}
    described["then"] = {
        "properties": {
            "Environment": {"not": on_login},
            "Environments": {"additionalProperties": {"not": on_login}},
        }
    }
    described["oneOf"] = [{"required": ["UnicoreApiUrl"]}, {"required": ["Firecrest"]}]
    return _without_null(described)


def _without_null(value: Any) -> Any:
    """Remove null from a schema, also in defaults, because a key without a value is a mistake."""
    if isinstance(value, list):
        return [_without_null(item) for item in value if item != {"type": "null"}]
    if not isinstance(value, dict):
        return value
    kept = {
        key: _without_null(item)
        for key, item in value.items()
        if not (key == "default" and (item is None or isinstance(item, dict)))
    }
    return {**kept.pop("anyOf")[0], **kept} if len(kept.get("anyOf", ())) == 1 else kept
