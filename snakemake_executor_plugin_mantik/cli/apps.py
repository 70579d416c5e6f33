"""Commands whose help fits the terminal, and shows no type for an option that takes no value."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command; its help has no `<bool>` at flags, and lines as long as the terminal is wide."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:  # noqa: A002
        # Typer keeps the line ends of all paragraphs but the first.
        lines = re.sub(r"(?<=\S)\n(?!\s|[-*] )", " ", inspect.cleandoc(help)) if help else help
        super().__init__(*args, help=lines, **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags without a type."""
        return _without_types(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class App(typer.Typer):
    """A group of such commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[Any], Any]:
        """Add a command, as `typer.Typer.command` does."""
        return super().command(name, cls=cls or Command, **settings)


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
