"""Words of a command line that say what an entry point is run with: values and files, checked."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import ConfigError, Mistake
from snakemake_executor_plugin_mantik.mlproject.entry import EntryPoint, suggest
from snakemake_executor_plugin_mantik.mlproject.values import parse_value

_BRACES: Final = "Snakemake takes braces in a file's name for wildcards: rename {path!r}"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_UNDECLARED: Final = "correct the name, or give it with --extra to have it appended to the command"


@dataclass(frozen=True)
class CommandFiles:
    """Inputs or outputs: paths, and paths by name."""

    plain: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> list[str]:
        """All paths."""
        return [*self.plain, *self.named.values()]


class CommandMistakes:
    """Gathers what is wrong with a command line."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def notify(self, place: str, key: str, message: str) -> None:
        """One more: where, at which key, and what."""
        self.mistakes.append(Mistake(place, key, message))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the mistakes that end what is in the block."""
        try:
            yield
        except ConfigError as error:
            self.mistakes += error.mistakes

    def end(self) -> None:
        """Tell all of them.

        Raises:
            ConfigError: there are some.
        """
        if self.mistakes:
            raise ConfigError(list(dict.fromkeys(self.mistakes)))

    def pairs(self, option: str, given: Iterable[str]) -> dict[str, str]:
        """NAME=VALUE pairs."""
        found: dict[str, str] = {}
        for text in given:
            name, equals, value = text.partition("=")
            if not equals or not name:
                self.notify(option, "", f"has to be NAME=VALUE, found {text!r}")
            elif name in found:
                self.notify(option, name, "is given twice")
            else:
                found[name] = value
        return found

    def files(self, option: str, given: Iterable[str]) -> CommandFiles:
        """Paths, and paths by name."""
        files = CommandFiles()
        for text in given:
            name, equals, path = text.partition("=")
            if not equals or not _NAME.fullmatch(name) or os.path.lexists(text):
                files.plain.append(text)
            elif name in files.named:
                self.notify(option, name, "is given twice")
            else:
                files.named[name] = path
        return files

    def names(
        self, shown: str, point: EntryPoint, given: dict[str, str], more: dict[str, str]
    ) -> None:
        """Take out the parameters that are given with the wrong option."""
        for name in [] if point.script else [n for n in given if n not in point.parameters]:
            del given[name]
            told = (
                f"is no parameter of {point.name}{suggest(name, point.parameters)}: {_UNDECLARED}"
            )
            self.notify(shown, f"{point.name}.{name}", told)
        for name in [n for n in more if n in point.parameters]:
            given.setdefault(name, more.pop(name))
            told = "is a parameter of the entry point: give it with -P"
            self.notify("--extra", name, told)

    def values(
        self, options: Mapping[str, Mapping[str, str]], things: Mapping[str, object]
    ) -> None:
        """See to it that the files that values name are some of the job's."""
        for option, values in options.items():
            for name, text in values.items():
                try:
                    value = parse_value(text)
                except ValueError:
                    continue  # the entry point tells it
                try:
                    value.resolve(things, str)
                except ValueError as error:
                    self.notify(option, name, f"{error}")


def check_command_files(read: CommandFiles, made: CommandFiles) -> None:
    """See to it that inputs and outputs can be a rule's.

    Raises:
        ConfigError: with all that cannot.
    """
    mistakes = []
    for option, files in (("--input", read), ("--output", made)):
        for path in files.all:
            if not path or os.path.isabs(path) or os.path.normpath(path).split("/")[0] == "..":
                told = f"has to be a path below this directory, found {path!r}"
                mistakes.append(Mistake(option, "", told))
            elif set(path) & set("{}"):
                mistakes.append(Mistake(option, "", _BRACES.format(path=path)))
            elif option == "--input" and not os.path.exists(path):
                mistakes.append(Mistake(option, "", f"there is no file {path!r}"))
    for path in set(map(os.path.normpath, read.all)) & set(map(os.path.normpath, made.all)):
        mistakes.append(Mistake("--output", "", f"is an input, too: {path!r}"))
    if mistakes:
        raise ConfigError(mistakes)


def is_path(declared: Mapping[str, object], name: str) -> bool:
    """Whether a declared parameter is of type path."""
    return getattr(declared[name], "type", "") == "path"


def is_input(value: str, known: Sequence[str]) -> bool:
    """Whether a value of type path is a file here that goes up as an input."""
    return (
        not os.path.isabs(value)
        and os.path.exists(value)
        and os.path.normpath(value).split("/")[0] not in ("..", ".")
        and value not in known
    )
