"""Pages of the reference that say what the code says: options, keys of backend configs, commands.

`python -m website.reference` writes them into docs/, where GitHub and `smk-mantik docs` show them.
"""

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal

import typer
from typer.core import TyperGroup

from snakemake_executor_plugin_mantik import ExecutorSettings
from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.cli.docs import config_schema

DOCS: Final = Path(__file__).parents[1] / "docs"
MADE: Final = "<!-- Made by `python -m website.reference` from the code; do not edit. -->"
SECTIONS: Final = {
    "": "",
    "Firecrest": "FirecrestConfig",
    "Resources": "ResourcesConfig",
    "Environment": "EnvironmentConfig",
    "Environment: Apptainer": "ApptainerConfig",
    "Environment: ContainerEngine": "ContainerEngineConfig",
    "Environment: Pyxis": "PyxisConfig",
    "Environment: Uenv": "UenvConfig",
    "Pools: NAME": "PoolConfig",
    "Site": "SiteSettings",
}
"""Parts of a backend config, and their names in the schema."""


def pages() -> Mapping[str, Callable[[], str]]:
    """Return what makes each page, by the name of its file in docs/."""
    return {"options.md": options, "config-keys.md": config_keys, "commands.md": commands}


def options() -> str:
    """Return the page of the executor's options."""
    rows = []
    for field in dataclasses.fields(ExecutorSettings):
        facts = field.metadata
        listed = field.default_factory is not dataclasses.MISSING
        value = facts.get("metavar", "")
        option = f"--mantik-{field.name.replace('_', '-')}"
        shown = f"`{option}{f' {value}' if value else ''}{' …' if listed else ''}`"
        default = "" if listed or field.default in (None, "") else f"`{_yaml(field.default)}`"
        rows.append((shown, default, _text(facts["help"])))
    return _page(
        "Options of snakemake",
        "`snakemake --executor mantik` has these options. In a profile they are written without "
        "dashes in front (`mantik-presubmit: 0`), in the environment as "
        "`SNAKEMAKE_MANTIK_PRESUBMIT=0`. [Kinds of rules](rules.md#snakemakes-options) lists "
        "what Snakemake's own options do.",
        _table(("option", "default", "effect"), rows),
    )


def config_keys() -> str:
    """Return the page of the keys of backend configs."""
    schema = config_schema()
    parts = []
    for title, name in SECTIONS.items():
        part = schema["$defs"][name] if name else schema
        required = part.get("required", ())
        rows = [
            (
                f"`{key}`",
                _value(facts),
                _default(facts, key in required),
                _text(facts.get("description", "")),
            )
            for key, facts in part["properties"].items()
            if not facts.get("deprecated")
        ]
        heading = f"## {title}\n\n" if title else ""
        parts.append(heading + _table(("key", "value", "default", "means"), rows))
    return _page(
        "Keys of a backend config",
        "All keys of a Compute Backend Config. [Connect a site](backend-config.md) has "
        "examples, and what keys become at a site. One of `UnicoreApiUrl` and `Firecrest` is "
        "required. `smk-mantik docs --schema` prints the same for editors.\n\n"
        "A *time* is a whole number with one of `s`, `m`, `h`, `d`, and a *size* one with one of "
        "`K`, `M`, `G`, `T`, 1024-based.",
        *parts,
    )


def commands() -> str:
    """Return the page of the commands of smk-mantik."""
    group = typer.main.get_command(_app())
    assert isinstance(group, TyperGroup)
    panels: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        texts = panels.setdefault(vars(command)["rich_help_panel"], [])
        texts += _commands(f"smk-mantik {name}", command)
    return _page(
        "Commands",
        "The commands of `smk-mantik`, as `--help` shows them. After a mistake, or an error of a "
        "site, they exit with code 2.",
        *(text for panel, texts in panels.items() for text in (f"## {panel}", *texts)),
    )


def _commands(name: str, command: Any) -> Iterator[str]:
    if command.hidden:
        return
    if isinstance(command, TyperGroup):
        for below, other in command.commands.items():
            yield from _commands(f"{name} {below}", other)
        return
    parameters = [each for each in command.get_params(typer.Context(command)) if not each.hidden]
    hints = typing.get_type_hints(command.callback)
    arguments = [each for each in parameters if not each.opts[0].startswith("-")]
    rows = []
    for each in parameters:
        if each.name == "help":
            continue
        if each in arguments:
            shown = f"`{_argument(each)}`"
        else:
            value = "" if each.is_flag else f" {_metavar(each, hints)}"
            words = [*each.opts, *each.secondary_opts]
            shown = ", ".join(f"`{word}{value}`" for word in words)
        plain = isinstance(each.default, str | int | float) and not isinstance(each.default, bool)
        default = f" Default: `{_yaml(each.default)}`." if plain and str(each.default) else ""
        needed = " Required." if each.required and each not in arguments else ""
        rows.append((shown, _text(each.help or "") + default + needed))
    usage = " ".join([name, "[OPTIONS]", *map(_argument, arguments)])
    yield f"### {name}\n\n    {usage}\n\n{_paragraphs(command.help or '')}"
    if rows:
        yield _table(("option", "effect"), rows)


def _argument(argument: Any) -> str:
    name = (argument.metavar or argument.name).strip("[]{}").removesuffix("...")
    name = name.removesuffix("…").upper()
    name += " …" if argument.nargs != 1 else ""
    return name if argument.required else f"[{name}]"


def _metavar(option: Any, hints: Mapping[str, Any]) -> str:
    if option.metavar:
        return str(option.metavar)
    kind = hints.get(option.name)
    for each in (kind, *typing.get_args(kind)):  # a type, or each of `T | None`
        if typing.get_origin(each) is Literal:
            return "|".join(map(str, typing.get_args(each)))
        if isinstance(each, type) and issubclass(each, Enum):
            return "|".join(str(word.value) for word in each)
    return str(option.name).upper()


def _value(facts: Mapping[str, Any]) -> str:
    """Return in words what a schema accepts."""
    if "$ref" in facts:
        return "a mapping, see below"
    several = facts.get("anyOf", ())
    for each in several:
        if "enum" in each:
            return ", ".join(f"`{word}`" for word in each["enum"])
    if several:
        return " or ".join(dict.fromkeys(_value(each) for each in several))
    pattern, kinds = facts.get("pattern", ""), facts.get("type", "string")
    number = "integer" in kinds or "number" in kinds
    words = (
        (kinds == "boolean", "`true` or `false`"),
        (kinds == "array", "a list"),
        (kinds == "object", "a mapping"),
        ("[smhd]" in pattern, "a time"),
        ("[KMGT" in pattern, "a size"),
        ("[Hh][Tt][Tt][Pp]" in pattern, "a URL"),
        (number and "string" in kinds and "minimum" in facts, f"{facts.get('minimum')} or more"),
        (kinds[0] == "number", "a number"),
    )
    return next((word for fits, word in words if fits), "a text")


def _default(facts: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = facts.get("default")
    return "" if default in (None, [], {}) else f"`{_yaml(default)}`"


def _yaml(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(text: str) -> str:
    """Return a text of the code as Markdown in one line."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([<>*\\])", r"\\\1", part) for part in parts
    )


def _paragraphs(text: str) -> str:
    return "\n\n".join(_text(each) for each in text.replace("\b", "").split("\n\n"))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", MADE, *parts)) + "\n"


if __name__ == "__main__":
    for file, make in pages().items():
        (DOCS / file).write_text(make())
